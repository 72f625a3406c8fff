"""Wrappers forward everything and claim nothing; each does its one thing, repeatably."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, cast

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core import protocols
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, Scannable, StorageBackend, WriteResult
from lmcache_core.testing import BackendFactory, StorageBackendTests, aligned_buffer, make_chunk, make_key, opened
from lmcache_core.wrappers import (
    DATA_VERBS,
    Corrupted,
    Corrupting,
    Faulty,
    Kind,
    Slow,
    Wrapper,
    always,
    every,
    first,
    nth,
    randomly,
)
from tests.testing.reference import Medium, ReferenceBackend

HIT, MISS, STORED = ReadResult.HIT, ReadResult.MISS, WriteResult.STORED

CAPABILITIES: dict[Any, Any] = {
    protocols.ReadsShorter: "read_any",
    protocols.Scannable: "scan",
    protocols.Lists: "listing",
    protocols.RemembersUse: "touch",
    protocols.ReportsUsage: "usage",
    protocols.CountsEvents: "counters",
    protocols.Advises: "advice",
    protocols.Describes: "describe manifests",
    protocols.Abortable: "abortable",
    protocols.CostlyProbes: "costly_probes",
}


def cpu() -> CpuBackend:
    return CpuBackend(CpuOptions())


def wrap_often(inner: StorageBackend) -> StorageBackend:
    faulty = Faulty(inner, nth())
    return Wrapper(Slow(Corrupting(faulty, probability=0.0), delay=0.0))


class TestWrapped(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def backend_factory(self) -> BackendFactory:
        medium = Medium()
        return lambda: wrap_often(ReferenceBackend(medium))

    @pytest.fixture
    def bounded_factory(self) -> BackendFactory:
        medium = Medium(capacity=1 << 20)
        return lambda: wrap_often(ReferenceBackend(medium))


def test_every_capability_of_the_contract_is_known_here() -> None:
    found = {
        value
        for value in vars(protocols).values()
        if inspect.isclass(value) and getattr(value, "_is_runtime_protocol", False)
    }
    not_of_backends = {"StorageBackend", "KVView", "Transfer"}
    not_of_backends |= {"DeviceDirect", "ReadsBeside"}  # for who has the backend itself: nothing of a node is around it
    assert {value for value in found if value.__name__ not in not_of_backends} == set(CAPABILITIES)


def subsets(items: Iterable[Any]) -> list[tuple[Any, ...]]:
    items = list(items)
    return [subset for size in range(len(items) + 1) for subset in combinations(items, size)]


@pytest.mark.parametrize("wrap", [Wrapper, Slow, Faulty, Corrupting, wrap_often])
def test_a_wrapper_has_exactly_the_capabilities_of_what_it_wraps(wrap: Callable[[Any], StorageBackend]) -> None:
    for capabilities in subsets(CAPABILITIES):
        attributes = {
            name: getattr(ReferenceBackend, name)
            for capability in capabilities
            for name in CAPABILITIES[capability].split()
        }
        verbs = {
            name: getattr(ReferenceBackend, name) for name in ("open", "close", "contains", "read", "write", "delete")
        }
        inner = cast(Any, type("Some", (), verbs | attributes))()
        wrapped = wrap(inner)
        assert isinstance(wrapped, StorageBackend)
        assert [c for c in CAPABILITIES if isinstance(wrapped, c)] == [c for c in CAPABILITIES if c in capabilities]
        assert [c for c in CAPABILITIES if isinstance(inner, c)] == [c for c in CAPABILITIES if c in capabilities]


def test_a_wrapper_is_still_what_it_was_made_as() -> None:
    slow = Slow(ReferenceBackend(Medium()), delay=1.5)
    assert isinstance(slow, Slow)
    assert type(slow).__name__ == "Slow"
    assert repr(slow).startswith("Slow(<")
    assert (slow.delay, slow.bytes_per_second) == (1.5, math.inf)
    assert type(Slow(ReferenceBackend(Medium()))) is type(slow)


async def test_answers_that_need_no_waiting_are_the_inner_ones() -> None:
    inner = ReferenceBackend(Medium(capacity=77))
    wrapped: Any = wrap_often(inner)
    async with opened(wrapped):
        assert await wrapped.write([make_chunk(make_key(1), 4096)]) == [WriteResult.FULL]
        inner.medium.capacity = None
        assert await wrapped.write([make_chunk(make_key(1), 4096)]) == [STORED]
        assert wrapped.usage() == inner.usage() == (1, 4096, None)
        assert wrapped.counters() == {"writes": 1}
        assert wrapped.advice() == ["reference: it forgets when the process ends; use a medium that does not"]
        assert wrapped.abortable is True
        inner.abortable = False
        assert wrapped.abortable is False


class TestFaulty:
    async def outcomes(self, backend: StorageBackend, calls: int) -> list[bool]:
        """Whether each of some calls of `contains` failed."""

        async def fails() -> bool:
            try:
                await backend.contains([])
            except BackendError:
                return True
            return False

        async with opened(backend):
            return [await fails() for _ in range(calls)]

    @pytest.mark.parametrize(
        ("schedule", "failing"),
        [(always, {1, 2, 3, 4, 5, 6}), (nth(2, 5), {2, 5}), (first(2), {1, 2}), (every(3), {3, 6}), (nth(), set())],
    )
    async def test_schedules(self, schedule: Any, failing: set[int]) -> None:
        faulty = Faulty(cpu(), schedule)
        assert await self.outcomes(faulty, 6) == [call in failing for call in range(1, 7)]
        assert faulty.calls == {"open": 1, "contains": 6, "close": 1}
        assert faulty.raised["contains"] == len(failing)

    async def test_random_faults_follow_from_the_seed(self) -> None:
        one, same, other = [await self.outcomes(Faulty(cpu(), randomly(0.3, seed)), 300) for seed in (1, 1, 2)]
        assert one == same != other
        assert 60 < sum(one) < 120

    async def test_each_verb_has_its_own_schedule_and_count(self) -> None:
        faulty = Faulty(ReferenceBackend(Medium()), {"write": nth(2), "open": first(1), "touch": always})
        with pytest.raises(BackendError, match="call 1 of open"):
            await faulty.open()
        await faulty.open()
        for _ in range(3):
            assert await faulty.read([make_key(1)], [aligned_buffer(4096)]) == [MISS]
        assert await faulty.write([]) == []
        with pytest.raises(BackendError, match="call 2 of write"):
            await faulty.write([])
        assert isinstance(faulty, protocols.RemembersUse)
        with pytest.raises(BackendError, match="call 1 of touch"):
            await faulty.touch([])

    async def test_by_default_every_verb_but_open_and_close_fails(self) -> None:
        faulty: Any = Faulty(ReferenceBackend(Medium()))
        await faulty.open()
        calls: dict[str, Callable[[], Any]] = {
            "contains": lambda: faulty.contains([]),
            "read": lambda: faulty.read([], []),
            "read_any": lambda: faulty.read_any([], []),
            "write": lambda: faulty.write([]),
            "delete": lambda: faulty.delete([]),
            "scan": lambda: anext(faulty.scan()),
            "touch": lambda: faulty.touch([]),
            "describe": lambda: faulty.describe(b"", b""),
            "manifests": lambda: faulty.manifests(),
        }
        assert set(calls) == DATA_VERBS
        for call in calls.values():
            with pytest.raises(BackendError):
                await call()
        await faulty.close()

    async def test_before_or_after_the_inner_call(self) -> None:
        chunk = make_chunk(make_key(1))
        for when, there in (("before", False), ("after", True)):
            inner = cpu()
            faulty = Faulty(inner, {"write": always}, when=when)  # type: ignore[arg-type]
            async with opened(faulty):
                with pytest.raises(BackendError):
                    await faulty.write([chunk])
                assert await inner.contains([chunk.key]) == [there]

    async def test_other_errors_and_switching_off(self) -> None:
        faulty = Faulty(cpu(), error=OSError)
        async with opened(faulty):
            with pytest.raises(OSError, match="call 1 of contains"):
                await faulty.contains([])
            faulty.active = False
            assert await faulty.contains([]) == []
            faulty.active = True
            with pytest.raises(OSError, match="call 2 of contains"):
                await faulty.contains([])


class TestSlow:
    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Seconds that were slept, without sleeping them."""
        waits: list[float] = []

        async def note(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", note)
        return waits

    async def test_waits_for_delay_and_bytes(self, waits: list[float]) -> None:
        slow = Slow(cpu(), delay=0.5, bytes_per_second=4096)
        async with opened(slow):
            assert await slow.write([make_chunk(make_key(i), 8192) for i in range(3)]) == [STORED] * 3
            assert await slow.read([make_key(1)], [aligned_buffer(8192)]) == [HIT]
            assert await slow.contains([make_key(1)]) == [True]
            slow.active = False
            await slow.contains([make_key(1)])
            slow.active, slow.verbs = True, {"read"}
            await slow.delete([make_key(1)])
        assert waits == [6.5, 2.5, 0.5]

    async def test_jitter_follows_from_the_seed(self, waits: list[float]) -> None:
        for seed in (1, 1, 2):
            async with opened(Slow(cpu(), delay=1.0, jitter=0.5, seed=seed)) as slow:
                for _ in range(20):
                    await slow.contains([])
        assert waits[:20] == waits[20:40] != waits[40:]
        assert all(1.0 <= wait < 1.5 for wait in waits)
        assert len(set(waits)) == 40

    async def test_hangs_until_released(self) -> None:
        slow = Slow(cpu())
        async with opened(slow):
            slow.hang("read")
            assert await slow.contains([make_key(1)]) == [False]
            reads = [asyncio.ensure_future(slow.read([make_key(1)], [aligned_buffer(4096)])) for _ in range(3)]
            assert await asyncio.to_thread(slow.wait_until_hanging, 3)
            assert slow.hanging == 3
            assert not any(read.done() for read in reads)
            await asyncio.to_thread(slow.release)
            assert await asyncio.gather(*reads) == [[MISS]] * 3
            assert slow.hanging == 0
            assert await slow.read([make_key(1)], [aligned_buffer(4096)]) == [MISS]

    async def test_what_hangs_can_be_cancelled(self) -> None:
        slow = Slow(cpu())
        async with opened(slow):
            slow.hang()
            call = asyncio.ensure_future(slow.contains([]))
            assert await asyncio.to_thread(slow.wait_until_hanging)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            assert slow.hanging == 0
            assert not await asyncio.to_thread(slow.wait_until_hanging, 1, 0.001)

    def test_a_loop_that_is_gone_is_no_obstacle(self) -> None:
        slow = Slow(cpu())
        slow.hang()
        loop = asyncio.new_event_loop()
        call = loop.create_task(slow.contains([]))
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        assert slow.hanging == 1
        slow.release()
        assert not call.done()
        call._log_destroy_pending = False  # type: ignore[attr-defined]


class TestCorrupting:
    CHUNKS = [make_chunk(make_key(i), 8192) for i in range(6)] + [make_chunk(make_key(9), 4096)]

    async def read(self, corrupting: Corrupting, rounds: int = 1) -> list[list[bytes]]:
        keys = [chunk.key for chunk in self.CHUNKS]
        async with opened(corrupting):
            assert set(await corrupting.write(self.CHUNKS)) == {STORED}
            read = []
            for _ in range(rounds):
                buffers = [aligned_buffer(chunk.data.nbytes) for chunk in self.CHUNKS]
                assert set(await corrupting.read(keys, buffers)) == {HIT}
                read.append([bytes(buffer) for buffer in buffers])
            return read

    async def test_a_flip_is_one_bit(self) -> None:
        (values,) = await self.read(Corrupting(cpu(), ["flip"]))
        for value, chunk in zip(values, self.CHUNKS, strict=True):
            difference = int.from_bytes(value, "big") ^ int.from_bytes(chunk.data, "big")
            assert difference.bit_count() == 1

    async def test_a_truncation_leaves_what_was_in_the_buffer(self) -> None:
        (values,) = await self.read(Corrupting(cpu(), ["truncate"]))
        for value, chunk in zip(values, self.CHUNKS, strict=True):
            end = next(i for i in range(len(value)) if not any(value[i:]))
            assert value[:end] == chunk.data[:end]
            assert any(chunk.data[end:])

    async def test_a_stale_value_is_another_keys(self) -> None:
        corrupting = Corrupting(cpu(), ["stale"])
        (values,) = await self.read(corrupting)
        written = [bytes(chunk.data) for chunk in self.CHUNKS]
        for i in range(6):
            assert written.index(values[i]) not in (i, 6)
        assert values[6] == written[6], "there is no other value of its size"
        assert corrupting.corrupted == [Corrupted(make_key(i), "stale") for i in range(6)]

    async def test_swapped_values_are_all_there(self) -> None:
        corrupting = Corrupting(cpu(), ["swap"])
        (values,) = await self.read(corrupting)
        written = [bytes(chunk.data) for chunk in self.CHUNKS]
        assert sorted(values) == sorted(written)
        assert [value == good for value, good in zip(values, written, strict=True)] == [False] * 6 + [True]
        assert sorted(corrupting.corrupted) == sorted(Corrupted(make_key(i), "swap") for i in range(6))

    @pytest.mark.parametrize("kinds", [("flip", "truncate", "stale", "swap"), ("flip",), ("stale", "swap")])
    async def test_the_list_is_the_truth_and_follows_from_the_seed(self, kinds: tuple[Kind, ...]) -> None:
        wrappers = [Corrupting(cpu(), kinds, probability=0.5, seed=seed) for seed in (1, 1, 2)]
        one, same, other = [await self.read(corrupting, rounds=20) for corrupting in wrappers]
        assert one == same != other
        assert wrappers[0].corrupted == wrappers[1].corrupted
        wrong = [
            chunk.key for values in one for value, chunk in zip(values, self.CHUNKS, strict=True) if value != chunk.data
        ]
        assert sorted(c.key for c in wrappers[0].corrupted) == sorted(wrong)
        assert 40 < len(wrong) < 100
        assert {c.kind for c in wrappers[0].corrupted} == set(kinds)

    async def test_misses_and_what_is_switched_off_are_left_alone(self) -> None:
        corrupting = Corrupting(cpu())
        corrupting.active = False
        (values,) = await self.read(corrupting)
        assert values == [bytes(chunk.data) for chunk in self.CHUNKS]
        corrupting.active = True
        async with opened(corrupting):
            assert await corrupting.read([make_key(1)], [aligned_buffer(8192)]) == [MISS]
        assert corrupting.corrupted == []
        assert not isinstance(corrupting, Scannable)
