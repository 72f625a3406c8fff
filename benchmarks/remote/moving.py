"""What the measurements of remote tiers share: values, slots, and contestants that take turns."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.harness import Row, plain, rate
from lmcache_core.protocols import Chunk, ReadResult, StorageBackend, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key

__all__ = ["MIB", "Contestant", "Values", "Work", "names_of", "ours", "take_turns"]

MIB = 2**20
TOTAL = 256 * MIB
_LOOKS = 3
"""Times that a value is read before it counts as lost: of a file that has just been replaced, another mount may see
neither the old nor the new one for a moment. The time of all of them counts."""

Work = Callable[[], Awaitable[object]]


class Values:
    """What is moved: chunks of one size, and slots to read them into."""

    def __init__(self, size: int, total: int = TOTAL) -> None:
        self.size = size
        self.chunks: list[Chunk] = [make_chunk(make_key(number), size) for number in range(total // size)]
        self.keys = [chunk.key for chunk in self.chunks]
        self.slots = [aligned_buffer(size) for _ in self.chunks]
        self.nbytes = size * len(self.chunks)

    def forget(self) -> None:
        """Nothing read before passes for what is read next."""
        for slot in self.slots:
            slot[:: self.size // 16] = bytes(16)

    def check(self) -> None:
        """All slots hold what was written."""
        for slot, chunk in zip(self.slots, self.chunks, strict=True):
            assert slot[:: self.size // 16] == chunk.data[:: self.size // 16]
            assert slot[-1] == chunk.data[-1]


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who moves values: all that are written, then all that are read."""

    name: str
    put: Work
    get: Work


async def ours(
    values: Values, stack: AsyncExitStack, writer: StorageBackend, reader: StorageBackend | None = None
) -> Contestant:
    """A backend of ours, or two on one medium; they are closed with `stack`."""
    reader = writer if reader is None else reader
    for each in {id(each): each for each in (writer, reader)}.values():
        await each.open()
        stack.push_async_callback(each.close)

    async def put() -> None:
        assert await writer.write(values.chunks) == [WriteResult.STORED] * len(values.keys)

    async def get() -> None:
        left = list(zip(values.keys, values.slots, strict=True))
        for _ in range(_LOOKS):
            results = await reader.read([key for key, _ in left], [slot for _, slot in left])
            left = [each for each, result in zip(left, results, strict=True) if result is not ReadResult.HIT]
            if not left:
                return
        raise SystemExit(f"{len(left)} of {len(values.keys)} values could not be read in {_LOOKS} times")

    return Contestant("ours", put, get)


def names_of(tier: str, sizes: Sequence[int], peers: Sequence[str]) -> list[str]:
    """Names of the rows: `redis.get.8` in GB/s beside the limit, `peer.redis.get.8.NAME` of somebody else beside ours,
    and CPU seconds per GB."""
    found = []
    for size in sizes:
        for verb in ("put", "get"):
            row = f"{tier}.{verb}.{size}"
            found += [row, f"{row}.cpu", f"limit.{row}.cpu"]
            found += [f"peer.{row}.{peer}{kind}" for peer in peers for kind in ("", ".cpu")]
    return found


async def take_turns(tier: str, contestants: Sequence[Contestant], values: Values, rounds: int) -> list[Row]:
    """Rows of ours, which is the first, beside the limit, which is the second, and of the peers beside ours. In each
    round all of them do the same, one right after the other."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    used: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for each in contestants:
            for verb, work in (("put", each.put), ("get", each.get)):
                values.forget()
                before, start = _cpu(), time.perf_counter()
                await work()
                if number:  # the first takes memory and connections
                    took[verb, each.name].append(time.perf_counter() - start)
                    used[verb, each.name].append(_cpu() - before)
                if verb == "get":
                    values.check()
    ours, limit, *peers = [each.name for each in contestants]
    rows = []
    for verb in ("put", "get"):
        row = f"{tier}.{verb}.{values.size // MIB}"

        def cpu(who: str, verb: str = verb) -> float:
            return min(used[verb, who]) / (values.nbytes / 1e9)

        rows.append(rate(row, values.nbytes, took[verb, ours], took[verb, limit]))
        rows.append(plain(f"{row}.cpu", cpu(ours), "CPU-s/GB"))
        rows.append(plain(f"limit.{row}.cpu", cpu(limit), "CPU-s/GB"))
        for peer in peers:
            rows.append(rate(f"peer.{row}.{peer}", values.nbytes, took[verb, peer], took[verb, ours]))
            rows.append(plain(f"peer.{row}.{peer}.cpu", cpu(peer), "CPU-s/GB"))
    return rows


def _cpu() -> float:
    times = os.times()
    return times.user + times.system
