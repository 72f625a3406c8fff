"""Compare any backend with a dict, over sequences of calls that hypothesis makes up and shortens when they fail.

The keys are few, so that sequences meet on them. What the dict cannot say is not asked: a FULL, of which nothing may be
left, is allowed at any time; the order of use counts only for keys that were not read since, as reading may renew.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import sys
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lmcache_core.protocols import Chunk, ChunkKey, RemembersUse, ReportsUsage, Scannable, Usage, WriteResult
from lmcache_core.testing.case import BackendFactory, assert_holds, assert_value, read_all, scan_all
from lmcache_core.testing.data import ALIGN, flip_bit, make_chunk, make_key, random_frame

__all__ = ["MODEL_SETTINGS", "BackendModel", "run_model"]

T = TypeVar("T")

MODEL_SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    stateful_step_count=30,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
"""The same examples in every run, a few seconds of them."""

KEYS = 8
SIZES = [ALIGN, 2 * ALIGN, 16 * ALIGN]
BALLAST_SIZE, BALLAST_MOST = 64 * 1024, 1024
BATCH = 16

key_numbers = st.integers(0, KEYS - 1)
some_keys = st.lists(key_numbers, min_size=1, max_size=4)
distinct_keys = st.lists(key_numbers, min_size=1, max_size=4, unique=True)


@functools.lru_cache(maxsize=256)
def ballast(number: int) -> memoryview:
    """The value of a chunk that is there to take room. Made once: there are many, in every example."""
    return random_frame(BALLAST_SIZE, number)


@dataclass
class Held:
    """What the dict knows of a key."""

    chunk: Chunk
    used: int
    """When it was written or touched last; 0 once that is forgotten."""


class BackendModel(RuleBasedStateMachine):
    """The backends of `factory` against a dict.

    All examples use one medium. Each clears up behind itself, but what is wrong may leave things behind: so each has a
    space of its own, that it can be repeated.
    """

    def __init__(self, factory: BackendFactory, *, persistent: bool, fill: bool = False, example: int = 0) -> None:
        super().__init__()
        self.space = hashlib.sha256(b"example %d" % example).digest()
        self.spaces = (self.space, flip_bit(self.space, 9))
        self.keys = [make_key(i // 2, space=self.spaces[i % 2]) for i in range(KEYS)]
        self.factory = factory
        self.persistent = persistent
        self.fill = fill
        self.held: dict[ChunkKey, Held] = {}
        self.read_since: set[ChunkKey] = set()
        self.clock = 0
        self.versions = 0
        self.loop = asyncio.Runner()
        self.backend = factory()
        self.run(self.backend.open())
        self.foreign = self.backend.usage() if isinstance(self.backend, ReportsUsage) else Usage(0, 0, None)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(asyncio.wait_for(call, timeout=60))

    @initialize()
    def take_all_room_but_a_little(self) -> None:
        for start in range(0, BALLAST_MOST if self.fill else 0, BATCH):
            batch = [
                make_chunk(make_key(-1 - number, space=self.space), ALIGN)._replace(data=ballast(number))
                for number in range(start, start + BATCH)
            ]
            if len(self.write(batch)) < BATCH:
                break
        spare = [key for key in self.held if key not in self.keys][-3:]
        self.run(self.backend.delete(spare))
        for key in spare:
            del self.held[key]

    def write(self, chunks: list[Chunk]) -> list[Chunk]:
        """Write in the backend and in the dict; what was stored."""
        results = self.run(self.backend.write(chunks))
        assert len(results) == len(chunks)
        self.clock += 1
        stored = [c for c, result in zip(chunks, results, strict=True) if result is WriteResult.STORED]
        assert all(result in (WriteResult.STORED, WriteResult.FULL) for result in results)
        assert self.fill or stored == chunks, "FULL, without a bound"
        for chunk in stored:
            self.held[chunk.key] = Held(chunk, self.clock)
            self.read_since.discard(chunk.key)
        return stored

    @rule(numbers=distinct_keys, size=st.sampled_from(SIZES), pages=st.integers(1, 4), parent=st.booleans())
    def write_some(self, numbers: list[int], size: int, pages: int, parent: bool) -> None:
        self.versions += 1
        before = make_key(99).page if parent else b""
        self.write([make_chunk(self.keys[i], size, version=self.versions, pages=pages, parent=before) for i in numbers])

    @rule(numbers=some_keys)
    def read(self, numbers: list[int]) -> None:
        keys = [self.keys[i] for i in numbers]
        sizes = [self.held[key].chunk.data.nbytes if key in self.held else ALIGN for key in keys]
        values = self.run(read_all(self.backend, keys, sizes))
        self.read_since.update(keys)
        for number, key, value in zip(numbers, keys, values, strict=True):
            if key in self.held:
                assert_value(value, self.held[key].chunk)
            else:
                assert not isinstance(value, bytes), f"{number} is not held, but read"

    @rule(number=key_numbers, size=st.sampled_from(SIZES))
    def read_with_any_size(self, number: int, size: int) -> None:
        (value,) = self.run(read_all(self.backend, [self.keys[number]], size))
        self.read_since.add(self.keys[number])
        if isinstance(value, bytes):
            assert self.keys[number] in self.held
            assert_value(value, self.held[self.keys[number]].chunk)

    @rule(numbers=some_keys)
    def contains(self, numbers: list[int]) -> None:
        keys = [self.keys[i] for i in numbers]
        assert self.run(self.backend.contains(keys)) == [key in self.held for key in keys]

    @rule(numbers=some_keys)
    def delete(self, numbers: list[int]) -> None:
        self.run(self.backend.delete([self.keys[i] for i in numbers]))
        for i in numbers:
            self.held.pop(self.keys[i], None)

    @rule(numbers=distinct_keys)
    def touch(self, numbers: list[int]) -> None:
        if not isinstance(self.backend, RemembersUse):
            return
        self.run(self.backend.touch([self.keys[i] for i in numbers]))
        for i in numbers:
            self.clock += 1
            self.read_since.discard(self.keys[i])
            if self.keys[i] in self.held:
                self.held[self.keys[i]].used = self.clock

    @rule()
    def reopen(self) -> None:
        self.run(self.backend.close())
        self.backend = self.factory()
        self.run(self.backend.open())
        if not self.persistent:
            found = self.run(self.backend.contains(list(self.held)))
            self.held = {key: self.held[key] for key, there in zip(self.held, found, strict=True) if there}
        if not isinstance(self.backend, RemembersUse):
            for held in self.held.values():
                held.used = 0

    @invariant()
    def scan_agrees(self) -> None:
        if not isinstance(self.backend, Scannable):
            return
        scanned = [stored for stored in self.run(scan_all(self.backend)) if stored.key.space in self.spaces]
        expected = [(h.chunk.key, h.chunk.pages, h.chunk.data.nbytes, h.chunk.parent) for h in self.held.values()]
        assert sorted(tuple(stored) for stored in scanned) == sorted(expected)
        used = [self.held[stored.key].used for stored in scanned if stored.key not in self.read_since]
        assert used == sorted(used), "a scan did not go from least to most recently used"

    @invariant()
    def usage_agrees(self) -> None:
        if isinstance(self.backend, ReportsUsage):
            usage = self.backend.usage()
            assert usage.chunks - self.foreign.chunks == len(self.held)
            assert usage.nbytes >= sum(h.chunk.data.nbytes for h in self.held.values())
            assert usage.capacity is None or usage.nbytes <= usage.capacity

    def teardown(self) -> None:
        failing = sys.exception() is not None
        with ExitStack() as stack:
            stack.callback(self.loop.close)
            if failing:  # what failed first is worth more than what fails because of it
                stack.enter_context(suppress(Exception))
            stack.callback(lambda: self.run(self.backend.close()))
            stack.callback(lambda: self.run(self.backend.delete([*self.keys, *self.held])))
            if not failing:
                held = [held.chunk for held in self.held.values()]
                for start in range(0, len(held), BATCH):
                    self.run(assert_holds(self.backend, held[start : start + BATCH]))


def run_model(
    factory: BackendFactory, *, persistent: bool = False, fill: bool = False, settings: settings = MODEL_SETTINGS
) -> None:
    """Run `BackendModel` as a test. `factory` makes backends, not opened yet, on one medium that is empty at first.

    With `persistent` a backend has to find what an earlier one stored. With `fill` the backends must be bounded: each
    example starts with nearly all room taken.
    """
    examples = itertools.count()

    def machine() -> BackendModel:
        return BackendModel(factory, persistent=persistent, fill=fill, example=next(examples))

    run_state_machine_as_test(cast(type[BackendModel], machine), settings=settings)  # it needs no more than a callable
