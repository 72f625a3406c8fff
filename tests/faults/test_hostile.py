"""Backends that keep no contract: whatever they do costs misses, never an exception, a hang or a wrong byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt
from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core import health, node
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, Usage, WriteResult
from tests.faults.kit import an_engine
from tests.node.shelf import Shelf

Misbehaviour = Callable[[], Any]
"""What a verb does instead of its work: it returns something or raises, or returns an awaitable."""


def raises(error: type[BaseException]) -> Misbehaviour:
    def misbehave() -> Any:
        raise error("oops")

    misbehave.__name__ = f"raises {error.__name__}"
    return misbehave


def gives(value: Any) -> Misbehaviour:
    def misbehave() -> Any:
        return value

    misbehave.__name__ = f"gives {value!r}"[:40]
    return misbehave


def hangs() -> Any:
    return asyncio.Event().wait()


def stubborn() -> Any:
    """Hangs and cannot be cancelled, then does its work."""


class Hostile(Shelf):
    """Keeps chunks like a shelf, but for one verb while it is hostile."""

    def __init__(self, verb: str, misbehave: Misbehaviour, *, abortable: bool = True) -> None:
        super().__init__()
        self.verb, self.misbehave, self.hostile, self.abortable = verb, misbehave, False, abortable

    async def stubborn(self) -> None:
        """Hang, whoever cancels it, as a call into a kernel that waits for a dead server does."""
        while self.hostile:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def _instead(self, verb: str) -> tuple[bool, Any]:
        if not (self.hostile and verb == self.verb):
            return False, None
        if self.misbehave is stubborn:
            await self.stubborn()
            return False, None
        found = self.misbehave()
        return True, await found if asyncio.iscoroutine(found) else found

    async def open(self) -> None:
        instead, _ = await self._instead("open")
        if not instead:
            await super().open()

    async def close(self) -> None:
        instead, _ = await self._instead("close")
        if not instead:
            await super().close()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        instead, found = await self._instead("read")
        return found if instead else await super().read(keys, into)

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        instead, found = await self._instead("write")
        return found if instead else await super().write(chunks)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        instead, _ = await self._instead("delete")
        if not instead:
            await super().delete(keys)

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        instead, _ = await self._instead("touch")
        if not instead:
            await super().touch(keys)

    async def describe(self, space: bytes, manifest: bytes) -> None:
        instead, _ = await self._instead("describe")
        if not instead:
            await super().describe(space, manifest)

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        instead, found = await self._instead("scan")
        if instead:
            yield found
        else:
            async for batch in super().scan():
                yield batch

    def usage(self) -> Usage:
        if self.hostile and self.verb == "usage":
            found: Usage = self.misbehave()
            return found
        return super().usage()

    def counters(self) -> Mapping[str, int]:
        if self.hostile and self.verb == "counters":
            found: Mapping[str, int] = self.misbehave()
            return found
        return {}


ERRORS = [KeyError, TimeoutError, StopIteration, asyncio.CancelledError]
LIES: dict[str, list[Any]] = {
    "read": [None, 7, [], [None] * 3, ["hit"] * 3, [ReadResult.HIT] * 100, {1: 2}, [ReadResult.HIT] * 3],
    "write": [None, 7, [], [None] * 3, ["stored"] * 3, [WriteResult.STORED] * 100, [[]] * 3],
    "scan": [None, 7, [None], [(1, 2)], [Stored(ChunkKey(b"", b""), (), -1, b"")], "abc"],
    "usage": [None, 7, (1, 2), Usage(-1, -1, -1), Usage(1, 1, "x")],  # type: ignore[arg-type]
    "counters": [None, 7, {1: None}],
}
PLAIN = ["usage", "counters"]
"""Methods that are no coroutines."""
VERBS = ["open", "close", "read", "write", "delete", "touch", "describe", "scan", "usage", "counters"]
CASES = [
    *[(verb, raises(error)) for verb in VERBS for error in ERRORS if verb not in PLAIN or issubclass(error, Exception)],
    *[(verb, gives(value)) for verb in LIES for value in LIES[verb]],
    *[(verb, how) for verb in VERBS if verb not in PLAIN for how in (hangs, stubborn)],
]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "OPEN_TIMEOUT", 0.2)
    monkeypatch.setattr(node, "CLOSE_TIMEOUT", 0.5)


@pytest.mark.parametrize(("verb", "misbehave"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_it_costs_misses_and_the_tier_recovers(verb: str, misbehave: Misbehaviour) -> None:
    backend = Hostile(verb, misbehave, abortable=misbehave is not stubborn)
    with an_engine(backend, tiers=[{"read_timeout": 0.1, "write_timeout": 0.1}], lease_timeout=0.1) as engine:
        before = Prompt(0, 3 * CHUNK_PAGES)
        assert until(lambda: engine.stored(before), 10)  # its deadline is short, the machine may be busy
        backend.hostile = True
        use(engine, before)
        backend.hostile = False
        assert until(lambda: engine.tier().up, 10), "the tier does not come back"
        # What it lied about is found out when it is read.
        assert until(lambda: engine.serves(Prompt(7, 3 * CHUNK_PAGES)), 10)


@pytest.mark.parametrize(
    ("verb", "misbehave"),
    [c for c in CASES if c[0] in ("open", "scan", "describe", "usage")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_at_the_start_as_well(verb: str, misbehave: Misbehaviour) -> None:
    backend = Hostile(verb, misbehave, abortable=misbehave is not stubborn)
    backend.hostile = True
    with an_engine(backend, tiers=[{"read_timeout": 0.1, "write_timeout": 0.1}], lease_timeout=0.1) as engine:
        use(engine, Prompt(0, 3 * CHUNK_PAGES))
        backend.hostile = False
        assert until(lambda: engine.tier().up, 10), "the tier does not come back"
        assert until(lambda: engine.serves(Prompt(7, 3 * CHUNK_PAGES)), 10)


@pytest.mark.parametrize("misbehave", [raises(error) for error in ERRORS], ids=lambda value: value.__name__)
def test_a_close_that_fails_when_the_tier_is_opened_again_is_tried_again(misbehave: Misbehaviour) -> None:
    backend = Hostile("close", misbehave)
    with an_engine(backend, lease_timeout=0.1) as engine:
        assert engine.stored(Prompt(0, 1))
        backend.hostile = backend.broken = True
        use(engine, Prompt(0, 1))
        assert until(lambda: not engine.tier().up, 10)
        backend.broken = backend.hostile = False
        assert until(lambda: engine.tier().up, 10), "the tier does not come back"
        assert engine.serves(Prompt(7, 3 * CHUNK_PAGES))


@pytest.mark.parametrize("misbehave", [raises(error) for error in ERRORS], ids=lambda value: value.__name__)
def test_a_close_that_fails_at_the_end_is_no_failure(misbehave: Misbehaviour) -> None:
    backend = Hostile("close", misbehave)
    with an_engine(backend) as engine:
        assert engine.stored(Prompt(0, 1))
        backend.hostile = True


class Asked(CpuBackend):
    """Cannot be listed, and answers as it likes."""

    misbehave: Misbehaviour | None = None

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if self.misbehave is None:
            return await super().contains(keys)
        found = self.misbehave()
        answer: list[bool] = await found if asyncio.iscoroutine(found) else found
        return answer


ANSWERS = [None, 7, [], [None], [True] * 100, ["yes"] * 3, [True] * 3]


@pytest.mark.parametrize(
    "misbehave",
    [*map(raises, ERRORS), *map(gives, ANSWERS), hangs],
    ids=lambda value: value.__name__,
)
def test_answers_to_contains_cost_misses(misbehave: Misbehaviour) -> None:
    backend = Asked(CpuOptions())
    with an_engine(backend, tiers=[{"read_timeout": 0.1}]) as engine:
        backend.misbehave = misbehave
        for number in range(4):
            prompt = Prompt(number, 3 * CHUNK_PAGES)
            assert until(lambda prompt=prompt: not engine.cache.lookup(prompt.tokens).pending, 5)  # type: ignore[misc]
            assert engine.retrieve(prompt) == 0
        backend.misbehave = None
        assert until(lambda: engine.tier().up, 10)
        assert until(lambda: engine.serves(Prompt(7, 3 * CHUNK_PAGES)), 10)


def use(engine: Engine, before: Prompt) -> None:
    """An engine at work: everything answers."""
    cache = engine.cache
    cache.clear(["cpu"])
    for number in range(1, 4):
        prompt = Prompt(number, 3 * CHUNK_PAGES)
        result = engine.store(prompt)
        assert result is not None
        result.wait(0.05)
        assert engine.retrieve(prompt) == prompt.pages, "it is in the pool"
        cache.clear(["cpu"])
        engine.lookup(prompt)
        engine.retrieve(prompt)
        engine.retrieve(before)
        cache.evict(prompt.tokens)
        cache.stats()
    cache.prefetch(before.tokens, timeout=0.1)
    cache.client.hold(cache._model, cache.prompt(before.tokens).keys)  # and forget it: the lease runs out
