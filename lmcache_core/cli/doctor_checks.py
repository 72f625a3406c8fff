"""What `lmcache-core doctor` does to a tier: open it, write, read, compare and delete probe chunks, with a watch."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import msgspec

from lmcache_core.cli.alone import CLOSE_TIMEOUT, Alone, Pattern, beside, buffer, owner_of, told_by_loggers
from lmcache_core.cli.disk_cache import can_be_inspected
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from lmcache_core.iothreads import IoThreads
from lmcache_core.protocols import (
    Advises,
    Chunk,
    ChunkKey,
    ReadResult,
    ReportsUsage,
    Scannable,
    Stored,
    WriteResult,
)
from lmcache_core.units import format_size

__all__ = ["Checked", "check_tier", "check_together"]

T = TypeVar("T")

SMALL = 8192
LARGE = 8 << 20
SMALL_ROUNDS = 8
LARGE_ROUNDS = 3
GB = 1e9
_SCRATCH = ".doctor-"


@dataclass
class Checked:
    """What was found of one tier. Times are medians in seconds, None where nothing was measured."""

    name: str
    backend: str
    state: str = "down"
    """`up`, `read only`, `full` (of chunks, as it should be), or `down`."""
    open_s: float | None = None
    contains_s: float | None = None
    read_s: float | None = None
    """Of a small chunk."""
    write_s: float | None = None
    chunk_read_s: float | None = None
    """Of a chunk of 8 MiB."""
    chunk_write_s: float | None = None
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    drive: int | None = None
    """The device that its directory is on, if it has one."""

    def plain(self) -> dict[str, Any]:
        """For programs."""
        told = asdict(self) | {"read_gbs": self.read_gbs, "write_gbs": self.write_gbs}
        del told["drive"]
        return told

    @property
    def read_gbs(self) -> float | None:
        """GB/s, one chunk at a time."""
        return LARGE / self.chunk_read_s / GB if self.chunk_read_s else None

    @property
    def write_gbs(self) -> float | None:
        """GB/s, one chunk at a time."""
        return LARGE / self.chunk_write_s / GB if self.chunk_write_s else None


def check_tier(tier: TierConfig, limit: float, step: Callable[[str], None]) -> Checked:
    """Try one tier. Each step ends within `limit` seconds, and so does all of it in some multiple of that, whatever
    hangs. What goes wrong is told in the result."""
    checked = Checked(tier.name, tier.backend)
    with told_by_loggers() as said:
        try:
            beside(lambda: _Check(tier, limit, checked, step).run(), most=4 * limit + 2 * CLOSE_TIMEOUT, grace=0.0)
        except TimeoutError:
            checked.state = "down"
            checked.problems.append(f"it blocks: nothing has ended within {4 * limit:g} s")
        except (LMCacheError, OSError) as error:
            checked.state = "down"
            checked.problems.append(_refused(error) if isinstance(error, PermissionError) else str(error))
    alone = set(checked.problems)
    checked.advice += [text for text in dict.fromkeys(map(_line, said)) if text not in alone]
    return checked


def check_together(tiers: Sequence[TierConfig], checked: Sequence[Checked], limit: float) -> None:
    """Open tiers of the same backend side by side, as a node does: one may ask of the process what another forbids.
    Those whose owners share a capacity are left alone: they would take it from each other."""
    well = [
        (tier, found)
        for tier, found in zip(tiers, checked, strict=True)
        if not found.problems and not can_be_inspected(tier.backend)
    ]
    for backend in dict.fromkeys(tier.backend for tier, _ in well):
        same = [each for each in well if each[0].backend == backend]
        if len(same) > 1:
            with told_by_loggers(), suppress(TimeoutError):
                most = (limit + CLOSE_TIMEOUT) * len(same)
                beside(lambda same=same: _open_all(same, limit), most=most, grace=0.0)  # type: ignore[misc]


async def _open_all(tiers: Sequence[tuple[TierConfig, Checked]], limit: float) -> None:
    opened: list[Alone] = []
    try:
        for tier, found in tiers:
            alone = Alone(tier, limit)
            beside_these = ", ".join(each.tier.name for each in opened)
            opened.append(alone)
            try:
                await alone.open()
            except (BackendError, ConfigError) as error:
                found.state = "down"
                found.problems.append(f"it works alone, but not beside {beside_these}: {error}")
    finally:
        for alone in reversed(opened):
            await alone.close()


def _refused(error: PermissionError) -> str:
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; let this user in there, or run this as the user that the engine runs as"


def _line(text: str) -> str:
    return "; ".join(text.splitlines())


class _Check:
    def __init__(self, tier: TierConfig, limit: float, checked: Checked, step: Callable[[str], None]) -> None:
        self.tier = tier
        self.limit = limit
        self.checked = checked
        self.step = step
        self.written: dict[ChunkKey, None] = {}
        self._threads = IoThreads("lmcache-doctor", 1)

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._threads.close()

    async def _run(self) -> None:
        async with self._options() as options:
            alone = Alone(self.tier, self.limit, options)
            self.step("open")
            started = time.perf_counter()
            try:
                await alone.open()
                self.checked.open_s = time.perf_counter() - started
                self.checked.drive = await self._threads.run(_drive, self.tier.options)
                await self._opened(alone)
            finally:
                await alone.close()

    @asynccontextmanager
    async def _options(self) -> AsyncIterator[Any]:
        """The tier's options; of a disk tier in use those of a folder beside its chunks, since another owner at its
        path would take a part of the capacity."""
        read_only = self.tier.write == "never"
        if not can_be_inspected(self.tier.backend):
            yield None
            return
        owner = await self._threads.run(owner_of, self.tier)
        paths = list(map(Path, self.tier.options.paths()))
        if read_only and (absent := [path for path in paths if not await self._threads.run(path.is_dir)]):
            raise BackendError(f"{absent[0]} is no directory; fill it, or see to it that it is mounted")
        if owner is None:
            yield None
            return
        self.checked.advice.append(
            f"process {owner} has it open, so a folder beside its chunks was tried; `lmcache-core status` asks its node"
        )
        scratch: list[str] = []
        try:
            for path in paths:
                scratch.append(await self._threads.run(mkdtemp, prefix=_SCRATCH, dir=path))
            room = 4 * LARGE * len(paths)
            yield msgspec.structs.replace(self.tier.options, path=scratch, capacity=room, segment=None)
        finally:
            for each in scratch:
                await self._threads.run(shutil.rmtree, each, ignore_errors=True)

    async def _opened(self, alone: Alone) -> None:
        checked = self.checked
        checked.state = "read only" if self.tier.write == "never" else "up"
        try:
            self.step("look up")
            absent = Pattern(SMALL)
            key = absent.chunk(absent.memory()).key
            checked.contains_s = await _median(SMALL_ROUNDS, lambda: alone.contains([key]))
            if self.tier.write == "never":
                await self._read_what_is_there(alone)
            else:
                await self._round_trips(alone)
        finally:
            self._ask_for_advice(alone)

    def _ask_for_advice(self, alone: Alone) -> None:
        if isinstance(alone.backend, Advises):
            try:
                self.checked.advice += [alone.masked(str(text)) for text in alone.backend.advice()]
            except Exception as error:  # noqa: BLE001  a plugin may raise anything: that must not hide what was found
                self.checked.advice.append(alone.masked(f"it cannot tell what to improve: {error}"))

    # Writing

    async def _round_trips(self, alone: Alone) -> None:
        try:
            self.step("write and read small chunks")
            small = await self._round_trip(alone, SMALL, SMALL_ROUNDS)
            if small is not None:
                self.checked.write_s, self.checked.read_s = small
                self.step("write and read chunks of 8 MiB")
                large = await self._round_trip(alone, LARGE, LARGE_ROUNDS)
                if large is not None:
                    self.checked.chunk_write_s, self.checked.chunk_read_s = large
        finally:
            await self._tidy(alone)

    async def _tidy(self, alone: Alone) -> None:
        """Delete what a failure has left."""
        if self.written:
            self.step("delete")
            await alone.settled(1.0)
            try:
                await alone.delete(self.written)
            except LMCacheError as error:
                self.checked.problems.append(f"{len(self.written)} probe chunks may be left there: {error}")

    async def _round_trip(self, alone: Alone, nbytes: int, rounds: int) -> tuple[float, float] | None:
        """Median seconds of writing and of reading; None if there is no room."""
        pattern = Pattern(nbytes)
        memory, into = pattern.memory(), buffer(nbytes)
        writes, reads = [], []
        for _ in range(rounds):
            chunk = pattern.seal(memory)
            self.written[chunk.key] = None
            started = time.perf_counter()
            (result,) = await alone.write([chunk])
            writes.append(time.perf_counter() - started)
            if result is WriteResult.FULL:
                del self.written[chunk.key]
                self._no_room(alone, nbytes)
                return None
            into[:] = bytes(nbytes)
            started = time.perf_counter()
            (found,) = await alone.read([chunk.key], [into])
            reads.append(time.perf_counter() - started)
            self._compare(chunk, found, into)
            if await alone.contains([chunk.key]) != [True]:
                raise BackendError("it says that it does not have a chunk that it has just given back")
            await alone.delete([chunk.key])
            del self.written[chunk.key]
            if await alone.contains([chunk.key]) != [False]:
                raise BackendError("it says that it still has a chunk that was deleted; may this user delete there?")
        return statistics.median(writes), statistics.median(reads)

    def _compare(self, chunk: Chunk, found: ReadResult, into: memoryview) -> None:
        if found is ReadResult.MISS:
            raise BackendError("a chunk that it has just stored is not there")
        if found is not ReadResult.HIT or into != chunk.data:
            raise BackendError("it gave back other bytes than were stored; do not use it")

    def _no_room(self, alone: Alone, nbytes: int) -> None:
        """Tell a tier that is full of chunks, as one that is used is, from a medium that has no room for any."""
        usage = alone.backend.usage() if isinstance(alone.backend, ReportsUsage) else None
        if usage is not None and usage.capacity is not None and usage.nbytes + nbytes > usage.capacity and usage.chunks:
            self.checked.state = "full"
            self.checked.advice.append(
                f"it is full of chunks ({format_size(usage.nbytes)}), and writing a probe would evict some: "
                "it was not written to"
            )
            return
        what = f"for a chunk of {format_size(nbytes)}"
        held = "" if usage is None else f" though it holds only {format_size(usage.nbytes)}"
        raise BackendError(f"there is no room {what}{held}: its medium is full, or its capacity is too small")

    # Reading only

    async def _read_what_is_there(self, alone: Alone) -> None:
        self.step("read")
        stored = await self._first(alone)
        if stored is None:
            pattern = Pattern(SMALL)
            key, into = pattern.chunk(pattern.memory()).key, buffer(SMALL)
            started = time.perf_counter()
            (found,) = await alone.read([key], [into])
            self.checked.read_s = time.perf_counter() - started
            if found is not ReadResult.MISS:
                raise BackendError("it says that it has a chunk that nobody has written; do not use it")
            return
        into = buffer(stored.nbytes)
        seconds = []
        for _ in range(LARGE_ROUNDS):
            started = time.perf_counter()
            (found,) = await alone.read([stored.key], [into])
            seconds.append(time.perf_counter() - started)
            if found is not ReadResult.HIT:
                raise BackendError("it does not give back a chunk that it says it has: see `lmcache-core inspect`")
        median = statistics.median(seconds)
        self.checked.read_s = median
        self.checked.chunk_read_s = median * LARGE / stored.nbytes if stored.nbytes >= LARGE // 8 else None

    async def _first(self, alone: Alone) -> Stored | None:
        """One of its chunks, the largest of a few, if it can list them."""
        if not isinstance(alone.backend, Scannable):
            return None
        few: Sequence[Stored] = ()
        async with asyncio.timeout(self.limit):
            async for batch in alone.backend.scan():
                few = batch[:64]
                break
        if not few:
            self.checked.advice.append("it holds no chunk; nobody has filled it yet")
            return None
        return max(few, key=lambda each: each.nbytes)


def _drive(options: Any) -> int | None:
    path = getattr(options, "path", None)
    first = path[0] if isinstance(path, list) and path else path
    if not isinstance(first, str) or not first:
        return None
    with suppress(OSError):
        return os.stat(Path(first).expanduser()).st_dev
    return None


async def _median(rounds: int, call: Callable[[], Awaitable[object]]) -> float:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
