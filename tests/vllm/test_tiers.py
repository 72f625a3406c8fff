"""vLLM's own scheduler over a tier: what of it is lost, late, refused or given up costs computing and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.request import RequestStatus

from lmcache_core.config import BreakerConfig, Config, CpuConfig, TierConfig
from lmcache_core.connectors.vllm import nodes
from lmcache_core.connectors.vllm.rates import Rates
from lmcache_core.node import Node
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, StorageBackend, WriteResult
from lmcache_core.wrappers import Corrupting, Faulty, Slow, Wrapper, nth
from tests.node.kv import until
from tests.node.shelf import Shelf
from tests.vllm.conftest import Models
from tests.vllm.engine import prompt
from tests.vllm.scheduled import BLOCK, Scheduled, answers

CHUNK = 64
CHUNK_BLOCKS = CHUNK // BLOCK
FIRST, SECOND = prompt(21, 600), prompt(22, 333)
PROMPTS = {"first": FIRST, "second": SECOND, "fork": FIRST[:400] + prompt(23, 90)}
THERE = 600 // BLOCK * BLOCK

Make = Callable[..., Scheduled]


class Losing(Wrapper):
    """Has lost what a test says, and learns of it when that is read."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.lost: set[bytes] = set()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        read = await super().read(keys, into)
        return [ReadResult.MISS if key.page in self.lost else result for key, result in zip(keys, read, strict=True)]


class Asked:
    """A tier that cannot list what it holds, and has to be asked."""

    def __init__(self) -> None:
        self._shelf = Shelf()

    async def open(self) -> None:
        await self._shelf.open()

    async def close(self) -> None:
        await self._shelf.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._shelf.contains(keys)

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return await self._shelf.read(keys, into)

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        return await self._shelf.write(chunks)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._shelf.delete(keys)


@pytest.fixture
def make(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines over a tier of the test's own."""
    made: list[Scheduled] = []

    # Loads here pay always: how long one may take does not depend on how fast this machine computes.
    monkeypatch.setattr(Rates, "prefill_seconds", lambda self, start, end: None)

    def build(backend: StorageBackend, memory: int = 64 << 20, **options: Any) -> Scheduled:
        tier = TierConfig(backend="test", name="shelf", breaker=BreakerConfig(failures=100))
        config = Config(chunk_tokens=CHUNK, page_tokens=BLOCK, tiers=(tier,))
        less = msgspec.structs.replace(config, cpu=CpuConfig(capacity=memory))  # than a user may write
        monkeypatch.setattr(nodes, "build_node", lambda config: Node(less, [backend]))
        made.append(Scheduled(models("llama"), config, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module", params=[False, True], ids=["one group", "two groups"])
def windows(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def right(models: Models, windows: bool) -> dict[str, list[int]]:
    return answers(models("llama"), PROMPTS, windows=windows)


@pytest.fixture(scope="module")
def right_of_one_group(models: Models) -> dict[str, list[int]]:
    return answers(models("llama"), PROMPTS)


def side_of(engine: Scheduled) -> Any:
    return engine.connector._scheduler


def at_rest(engine: Scheduled) -> None:
    """Nothing is held, nothing is under way, every slot of host memory is a chunk's."""
    engine.forget()
    side = side_of(engine)
    assert side.client.flush(10)
    assert (side.idle, side._requests) == (True, {})
    assert engine.free_blocks == engine.blocks - 1
    stats = side.client.stats()
    assert (stats.leases, stats.staged, stats.pinned) == (0, 0, 0)
    assert stats.slots == stats.chunks
    assert engine.connector.faults == engine.worker.faults == 0


def on_the_tier_only(engine: Scheduled, *names: str) -> None:
    """Compute prompts and leave them on the tier alone; the engine forgets them."""
    for name in names:
        engine.ask(f"warm {name}", PROMPTS[name])
    engine.run()
    client = side_of(engine).client
    assert client.flush(10)
    client.clear(places=["cpu"])
    engine.forget()


def abort(engine: Scheduled, name: str) -> None:
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("first_lost", [0, 5, 8])
def test_of_what_is_evicted_between_lookup_and_load_just_the_missing_blocks_are_computed(
    make: Make, right_of_one_group: dict[str, list[int]], first_lost: int
) -> None:
    """Also where chunks behind the one that is lost are there: KV has no holes."""
    tier = Losing(Shelf())
    engine = make(tier)
    on_the_tier_only(engine, "first")
    invalid: list[set[int]] = []
    errors = engine.worker.get_block_ids_with_load_errors

    def seen() -> set[int]:
        invalid.append(errors())
        return invalid[-1]

    engine.worker.get_block_ids_with_load_errors = seen
    request = engine.ask("again", FIRST)
    tier.lost = {side_of(engine)._requests["again"].keys[(first_lost + 1) * CHUNK_BLOCKS - 1]}
    engine.step()  # it is promised here, and read later
    blocks = list(engine.scheduler.kv_cache_manager.get_block_ids("again")[0])
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    got = engine.run()
    there = first_lost * CHUNK_BLOCKS
    assert [each for each in invalid if each] == [set(blocks[there : THERE // BLOCK])]
    assert got["again"] == right_of_one_group["first"]
    counts = side_of(engine).counts
    assert counts["loaded_tokens", "shelf"] + counts["loaded_tokens", "cpu"] == there * BLOCK
    assert counts["failed_tokens", ""] == THERE - there * BLOCK
    at_rest(engine)
    engine.ask("once more", FIRST)
    assert engine.run()["once more"] == right_of_one_group["first"]
    assert counts["failed_tokens", ""] == THERE - there * BLOCK  # the same load is not tried, and lost, for ever
    at_rest(engine)


def test_lost_blocks_that_vllm_shares_and_keeps_spread_nothing(
    models: Models, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request shares blocks that another one loses, and that one is aborted before it has computed them anew: what
    comes of it may be nonsense by vLLM's doing, but is nobody else's."""
    longer = FIRST + prompt(29, 100)
    expected = answers(models("llama"), {"longer": longer, "first": FIRST})
    engine = make(Shelf())
    engine.ask("warm", FIRST)
    engine.run()
    engine.forget()
    with monkeypatch.context() as context:
        context.setattr(engine.worker._door.client(), "join_hold", lambda number: None)
        engine.ask("doomed", FIRST)
        engine.ask("sharing", longer)
        engine.step()
    assert side_of(engine).counts["failed_tokens", ""] == THERE
    abort(engine, "doomed")
    engine.run()
    for name, tokens in {"longer": longer, "first": FIRST}.items():
        engine.forget()
        engine.ask(name, tokens)
        assert engine.run()[name] == expected[name]
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", ["flip", "truncate", "stale", "swap", "raises"])
def test_a_read_that_ends_early_or_brings_other_bytes_is_a_miss(
    make: Make, right: dict[str, list[int]], windows: bool, in_flight: int, kind: Any
) -> None:
    """Whatever lies in the buffers by then: nothing is computed behind it."""
    kinds = [kind, "flip"]  # where it is not possible
    tier: Any = Faulty(Shelf(), {"read": nth(2, 3, 5)}) if kind == "raises" else Corrupting(Shelf(), kinds)
    tier.active = False
    engine = make(tier, windows=windows, in_flight=in_flight)
    on_the_tier_only(engine, *PROMPTS)
    tier.active = True
    for name, tokens in PROMPTS.items():
        engine.ask(name, tokens)
    got = engine.run()
    assert tier.raised["read"] if kind == "raises" else tier.corrupted
    tier.active = False
    assert {name: got[name] for name in right} == right
    assert side_of(engine).counts["failed_tokens", ""] > 0
    engine.forget()
    for name, tokens in PROMPTS.items():
        engine.ask(f"again {name}", tokens)
    got = engine.run()
    assert {name: got[f"again {name}"] for name in right} == right
    at_rest(engine)


def test_more_is_promised_than_there_is_room_for_in_host_memory(
    make: Make, right: dict[str, list[int]], windows: bool
) -> None:
    """All of it lies on the tier, and the pool has fewer slots than a prompt has chunks."""
    engine = make(Shelf(), 40 << 10, windows=windows)
    on_the_tier_only(engine, "first")
    on_the_tier_only(engine, "second")
    for turn in range(3):
        for name, tokens in PROMPTS.items():
            engine.ask(f"{turn} {name}", tokens)
        got = engine.run()
        assert {name: got[f"{turn} {name}"] for name in right} == right
        engine.forget()
    assert side_of(engine).counts["failed_tokens", ""] > 0
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_tier_that_does_not_say_what_it_holds_is_waited_for_until_a_deadline(
    make: Make, right: dict[str, list[int]], windows: bool, in_flight: int
) -> None:
    """Others go on meanwhile, and once it answers it is used."""
    asked = Asked()
    engine = make(asked, windows=windows)
    on_the_tier_only(engine, *PROMPTS)
    engine.close()
    tier = Slow(asked)
    engine = make(tier, windows=windows, in_flight=in_flight, lookup_timeout=0.3)
    engine.ask("local", prompt(24, 200))
    engine.run()
    tier.hang("contains")
    engine.ask("first", FIRST)
    engine.ask("short", prompt(25, 10))
    while len(engine.answers["short"]) < 4:
        engine.step()
    assert engine.answers["first"] == []
    got = engine.run()
    assert tier.hanging > 0
    assert got["first"] == right["first"]
    assert sum(side_of(engine).counts[name] for name in side_of(engine).counts if name[0] == "loaded_tokens") == 0
    tier.release()
    at_rest(engine)
    side_of(engine).client.clear(places=["cpu"])
    until(lambda: not tier.hanging)
    engine.ask("again", FIRST)
    assert engine.run()["again"] == right["first"]
    assert side_of(engine).counts["loaded_tokens", "shelf"] >= THERE - CHUNK
    at_rest(engine)


@pytest.mark.parametrize("over", ["aborted", "computed"])
def test_a_hit_that_is_never_loaded_leaves_no_lease(
    make: Make, right_of_one_group: dict[str, list[int]], over: str
) -> None:
    """A request that waits for blocks is held what it hit, and is then aborted, or told to compute."""
    engine = make(Shelf(), blocks=45)
    on_the_tier_only(engine, "first")
    other = prompt(26, 400)
    engine.ask("other", other, 40)
    engine.step()
    engine.ask("again", FIRST)
    for _ in range(3):
        engine.step()
    assert side_of(engine).client.stats().leases == 1
    assert engine.scheduler.requests["again"].status == RequestStatus.WAITING
    if over == "aborted":
        abort(engine, "again")
    else:
        side_of(engine).reset()
    assert side_of(engine).client.stats().leases == 0
    got = engine.run()
    assert len(got["other"]) == 40
    assert got["again"] == ([] if over == "aborted" else right_of_one_group["first"])
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("let_go", [True, False], ids=["answers later", "never answers"])
def test_blocks_of_an_aborted_load_are_nobodys_until_it_has_ended_and_then_come_back(
    make: Make, right: dict[str, list[int]], windows: bool, in_flight: int, let_go: bool
) -> None:
    tier = Slow(Shelf())
    engine = make(tier, windows=windows, in_flight=in_flight, load_timeout=10.0 if let_go else 0.2)
    on_the_tier_only(engine, "first", "second")
    tier.hang("read")
    engine.ask("doomed", FIRST)
    for _ in range(in_flight + 1):
        engine.step()
    assert tier.wait_until_hanging()
    taken = engine.blocks - 1 - engine.free_blocks
    assert taken >= THERE // BLOCK
    abort(engine, "doomed")
    if let_go:
        engine.ask("meanwhile", prompt(27, 100))
        while len(engine.answers["meanwhile"]) < 4:
            engine.step()
        # What is read there is read into these blocks: nobody else gets them.
        assert engine.blocks - 1 - engine.free_blocks >= taken
        tier.release()
    engine.ask("second", SECOND)
    got = engine.run()
    assert got["second"] == right["second"]
    assert "doomed" not in engine.scheduler.requests
    assert engine.free_blocks == engine.blocks - 1 or engine.scheduler.reset_prefix_cache()
    tier.release()
    until(lambda: not tier.hanging)
    at_rest(engine)
    engine.ask("again", FIRST)
    assert engine.run()["again"] == right["first"]
    at_rest(engine)


@pytest.mark.parametrize("group", ["full", "window"])
def test_a_hit_ends_where_one_of_the_cache_groups_has_nothing(models: Models, make: Make, group: str) -> None:
    """A model of two groups whose tier has lost chunks of one of them: the prompt is restored to where both can be."""
    expected = answers(models("llama"), PROMPTS, windows=True)
    shelf = Shelf()
    engine = make(shelf, windows=True)
    on_the_tier_only(engine, "first")
    side = side_of(engine)
    space = side._model.spaces[["full", "window"].index(group)].digest
    engine.ask("keys", FIRST)
    gone = set(side._requests["keys"].keys[6 * CHUNK_BLOCKS :])
    abort(engine, "keys")
    engine.close()
    shelf.values = {key: value for key, value in shelf.values.items() if (key.space, key.page in gone) != (space, True)}
    engine = make(shelf, windows=True)
    engine.ask("first fact", prompt(28, 20))
    engine.run()
    engine.ask("again", FIRST)
    assert engine.run()["again"] == expected["first"]
    counts = side_of(engine).counts
    cached = counts["loaded_tokens", "shelf"]
    assert cached == 256  # where a step ended, and so a window was stored
    assert counts["failed_tokens", ""] == 0
    at_rest(engine)


def test_events_tell_of_tiers_what_the_engine_would_call_it(make: Make) -> None:
    """The same hashes, parents and tokens as in the engine's own events; on which tier, and when it has gone there."""
    engine = make(Shelf(), events=True)
    own: list[Any] = []
    take = engine.scheduler.kv_cache_manager.take_events

    def seen() -> Any:
        own.extend(events := take())
        return events

    engine.scheduler.kv_cache_manager.take_events = seen
    client = side_of(engine).client
    where: dict[str, dict[Any, Any]] = {"cpu": {}, "shelf": {}}

    def follow() -> None:
        assert client.flush(10)
        engine.ask(f"nothing {engine.steps}", prompt(engine.steps, 5))
        engine.run()
        for event in engine.events:
            assert event.medium == {"cpu": "CPU", "shelf": "STORAGE"}[event.ownership]
            there = where[event.ownership]
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for number, name in enumerate(event.block_hashes):
                    assert name not in there
                    there[name] = (parent, tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK]))
                    parent = name
            else:
                for name in event.block_hashes:
                    del there[name]
        engine.events.clear()

    engine.ask("first", FIRST)
    engine.run()
    follow()
    named: dict[Any, Any] = {}
    for event in own:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for number, name in enumerate(event.block_hashes):
                named[name] = (parent, tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK]))
                parent = name
    assert where["cpu"] == where["shelf"]
    assert len(where["cpu"]) == THERE // BLOCK
    assert {name: named[name] for name in where["cpu"]} == where["cpu"]
    client.clear(places=["cpu"])
    follow()
    assert (where["cpu"], len(where["shelf"])) == ({}, THERE // BLOCK)
    engine.forget()
    engine.ask("again", FIRST)
    engine.run()
    follow()
    assert where["cpu"] == where["shelf"]
    client.clear()
    follow()
    assert where == {"cpu": {}, "shelf": {}}
