"""`lmcache-core bench tier`: what a tier's backend moves in and out, without a node, beside what the machine can do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_core.cli.alone import (
    CLOSE_TIMEOUT,
    Alone,
    Pattern,
    beside,
    owner_of,
    percentile,
    shown_time,
    the_tier,
    together,
    told_by_loggers,
)
from lmcache_core.cli.bench_limits import limit_of
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import Column, is_terminal, print_note, print_table
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from lmcache_core.frame import ALIGN
from lmcache_core.iothreads import IoThreads
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, ReportsUsage, WriteResult
from lmcache_core.units import format_size, parse_duration, parse_size

GB = 1e9
MOST_BYTES = 512 << 20
"""What is on a tier at a time."""
LIMIT = 30.0
"""Seconds that one operation may take."""
_BATCH = 64

Tick = Callable[[str, float], None]
"""Told what is done, and how many more seconds of it are over."""


class Row(NamedTuple):
    """One measurement: chunks of one size, so many at once, in one direction."""

    tier: str
    verb: str
    """`put` or `get`."""
    size: int
    concurrency: int
    gbs: float | None
    cpu_s_per_gb: float | None
    """Of this process."""
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    operations: int
    limit_gbs: float | None
    limit: str
    """What has this limit."""
    ratio: float | None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    parser.add_argument("--tier", metavar="TIER", action="append", help="only this tier; may be given more than once")
    parser.add_argument(
        "--sizes", metavar="SIZES", default="1MiB,8MiB,32MiB", help="sizes of chunks (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", metavar="NUMBERS", default="1,4,8", help="chunks under way at once (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", metavar="TIME", default="5", help="how long each is measured (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE, - for standard output alone")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Measure. The exit code is 1 if a tier could not be."""
    plan = _plan(arguments)
    loaded = load_usable(arguments.config)
    tiers = list(loaded.config.tiers)
    if arguments.tier is not None:
        tiers = [the_tier(loaded.config, name, loaded.provenance.name) for name in arguments.tier]
    if not tiers:
        raise ConfigError(f"{loaded.provenance.name} has no tiers to measure; memory is measured by lmcache-core bench")
    rows: list[Row] = []
    steps = len(tiers) * len(plan.sizes) * len(plan.concurrency) * 2
    with told_by_loggers(), _progress(steps * plan.seconds) as tick:
        for tier in tiers:
            rows += measure(tier, plan, tick)
    if arguments.json != "-":
        _print(rows)
    if arguments.json is not None:
        text = json.dumps({"rows": [row._asdict() for row in rows]}, indent=2) + "\n"
        if arguments.json == "-":
            print(text, end="")
        else:
            Path(arguments.json).write_text(text, encoding="utf-8")
    return 1 if any(row.gbs is None for row in rows) else 0


class Plan(NamedTuple):
    """What is measured."""

    sizes: Sequence[int]
    concurrency: Sequence[int]
    seconds: float


def _plan(arguments: argparse.Namespace) -> Plan:
    try:
        sizes = [parse_size(each.strip()) for each in arguments.sizes.split(",")]
    except ConfigError as error:
        arguments.usage_error(f"--sizes: {error}")
    if bad := [size for size in sizes if size % ALIGN or size < 2 * ALIGN]:
        arguments.usage_error(f"--sizes: {bad[0]} bytes are no multiple of 4096, or less than 8192")
    try:
        concurrency = [int(each) for each in arguments.concurrency.split(",")]
    except ValueError:
        concurrency = [0]
    if min(concurrency) < 1 or max(concurrency) > 1024:
        arguments.usage_error("--concurrency: write numbers from 1 to 1024, as in 1,4,8")
    try:
        seconds = parse_duration(arguments.seconds)
    except ConfigError as error:
        arguments.usage_error(f"--seconds: {error}")
    if seconds <= 0:
        arguments.usage_error("--seconds: must be more than 0")
    return Plan(sizes, concurrency, seconds)


def measure(tier: TierConfig, plan: Plan, tick: Tick) -> list[Row]:
    """The rows of a tier. What cannot be measured has a note why. What is written is deleted, also on Ctrl-C."""
    rows: list[Row] = []
    try:
        if tier.write == "never":
            raise LMCacheError("it is only read (write: never)")
        if (owner := owner_of(tier)) is not None:
            raise LMCacheError(f"it is in use by process {owner}, whose chunks would be evicted")
        beside(lambda: _measure(tier, plan, tick, rows), grace=LIMIT)
    except (LMCacheError, OSError) as error:
        done = {(row.size, row.concurrency, row.verb) for row in rows}
        rows += [
            _unmeasured(tier, size, concurrency, verb, str(error))
            for size in plan.sizes
            for concurrency in plan.concurrency
            for verb in ("put", "get")
            if (size, concurrency, verb) not in done
        ]
    return rows


def _unmeasured(tier: TierConfig, size: int, concurrency: int, verb: str, why: str) -> Row:
    note = f"not measured: {why}"
    return Row(tier.name, verb, size, concurrency, None, None, None, None, None, 0, None, "", None, note)


async def _measure(tier: TierConfig, plan: Plan, tick: Tick, rows: list[Row]) -> None:
    alone = Alone(tier, LIMIT)
    threads = IoThreads("lmcache-bench", 1)
    try:
        await alone.open()
        for size in plan.sizes:
            pattern = Pattern(size)
            for concurrency in plan.concurrency:
                run = _Run(alone, pattern, concurrency, plan.seconds, tick)
                try:
                    room = run.room()
                    if room < concurrency:
                        raise BackendError("there is no room: measuring would evict chunks")
                    limit = await threads.run(limit_of, tier, size, concurrency)
                    put = await run.put(room)
                    rows.append(_row(tier, "put", pattern, concurrency, put, limit.put, limit.what))
                    get = await run.get()
                    rows.append(_row(tier, "get", pattern, concurrency, get, limit.get, limit.what))
                except BackendError as error:
                    there = {row.verb for row in rows if (row.size, row.concurrency) == (size, concurrency)}
                    left = [verb for verb in ("put", "get") if verb not in there]
                    rows += [_unmeasured(tier, size, concurrency, verb, str(error)) for verb in left]
                finally:
                    await run.tidy()
    finally:
        threads.close()
        await alone.close()


@dataclass
class _Told:
    """What a measurement has seen."""

    seconds: float = 0.0
    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)


def _row(tier: TierConfig, verb: str, pattern: Pattern, concurrency: int, told: _Told, limit: float, what: str) -> Row:
    gigabytes = len(told.latencies) * pattern.nbytes / GB
    rate = gigabytes / told.seconds
    latencies = sorted(told.latencies)
    p50, p90, p99 = (percentile(latencies, percent) for percent in (50, 90, 99))
    return Row(
        tier.name,
        verb,
        pattern.nbytes,
        concurrency,
        rate,
        told.cpu / gigabytes,
        p50,
        p90,
        p99,
        len(latencies),
        limit,
        what,
        rate / limit,
    )


class _Run:
    """Chunks of one size, so many at once. What it has written is known until it is deleted."""

    def __init__(self, alone: Alone, pattern: Pattern, concurrency: int, seconds: float, tick: Tick) -> None:
        self._alone = alone
        self._pattern = pattern
        self._memories = [pattern.memory() for _ in range(concurrency)]
        self._seconds = seconds
        self._tick = tick
        self._label = f"{alone.tier.name}, {format_size(pattern.nbytes)} x {concurrency}"
        self._written: dict[ChunkKey, None] = {}

    def room(self) -> int:
        """Chunks that can be there at a time, evicting none."""
        room = MOST_BYTES
        backend = self._alone.backend
        if isinstance(backend, ReportsUsage):
            usage = backend.usage()
            if usage.capacity is not None:
                room = min(room, usage.capacity - usage.nbytes)
        return max(room // self._pattern.nbytes, len(self._memories) if room == MOST_BYTES else 0)

    async def put(self, room: int) -> _Told:
        """Write chunks that were never there before, and delete them, off the clock, whenever there is no room."""
        told = _Told()
        while told.seconds < self._seconds:
            await self.tidy()
            left = iter(range(room))
            await self._timed(told, "put", lambda memory, left=left: self._write(memory, left, told))  # type: ignore[misc]
        return told

    async def _write(self, memory: memoryview, left: Any, told: _Told) -> bool:
        if next(left, None) is None:
            return False
        chunk: Chunk = self._pattern.chunk(memory)
        self._written[chunk.key] = None
        started = time.perf_counter()
        (result,) = await self._alone.write([chunk])
        told.latencies.append(time.perf_counter() - started)
        if result is WriteResult.FULL:
            raise BackendError("there is no room for what is measured; try smaller --sizes or less --concurrency")
        return True

    async def get(self) -> _Told:
        """Read what `put` has left, again and again."""
        told = _Told()
        keys = list(self._written)
        turn = iter(range(sys.maxsize))
        await self._timed(told, "get", lambda memory: self._read(memory, keys[next(turn) % len(keys)], told))
        return told

    async def _read(self, memory: memoryview, key: ChunkKey, told: _Told) -> bool:
        started = time.perf_counter()
        (result,) = await self._alone.read([key], [memory])
        told.latencies.append(time.perf_counter() - started)
        if result is not ReadResult.HIT:
            raise BackendError("it does not give back what was written to it; does it evict?")
        return True

    async def _timed(self, told: _Told, verb: str, once: Callable[[memoryview], Awaitable[bool]]) -> None:
        started, cpu = time.perf_counter(), time.process_time()
        until = started + self._seconds - told.seconds
        ticked = started

        async def work(memory: memoryview) -> None:
            nonlocal ticked
            while await once(memory):
                now = time.perf_counter()
                self._tick(f"{self._label}: {verb}", now - ticked)
                ticked = now
                if now >= until:
                    return

        await together([work(memory) for memory in self._memories])
        told.seconds += time.perf_counter() - started
        told.cpu += time.process_time() - cpu

    async def tidy(self) -> None:
        """Delete what is there."""
        if not self._written:
            return
        await self._alone.settled(CLOSE_TIMEOUT)
        keys = list(self._written)
        for start in range(0, len(keys), _BATCH):
            await self._alone.delete(keys[start : start + _BATCH])
        self._written.clear()


class _progress(AbstractContextManager["Tick"]):
    """A progress bar over so many seconds, on standard error, if somebody looks."""

    def __init__(self, seconds: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        hidden = not is_terminal(sys.stderr)
        columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
        self._bar = Progress(*columns, console=Console(file=sys.stderr), disable=hidden, transient=True)
        self._task = self._bar.add_task("", total=seconds)

    def __enter__(self) -> Tick:
        self._bar.start()
        return lambda what, seconds: self._bar.update(self._task, description=what, advance=seconds)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


_COLUMNS = [
    Column("tier"),
    Column("verb"),
    *(Column(name, right=True) for name in ("size", "at once", "GB/s", "limit", "ratio", "CPU s/GB")),
    *(Column(name, right=True) for name in ("p50", "p90", "p99")),
    Column("limit of"),
]


def _print(rows: Sequence[Row]) -> None:
    measured = [row for row in rows if row.gbs is not None]
    if measured:
        print_table(_COLUMNS, [_cells(row) for row in measured])
    for note in dict.fromkeys(f"{row.tier}: {row.note}" for row in rows if row.gbs is None):
        print_note(note)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = [f"{number:.3g}" for number in (row.gbs, row.limit_gbs) if number is not None]
    times = [shown_time(seconds) for seconds in (row.p50_s, row.p90_s, row.p99_s) if seconds is not None]
    ratio, cpu = f"{row.ratio:.2f}", f"{row.cpu_s_per_gb:.2f}"
    size = format_size(row.size)
    return (row.tier, row.verb, size, str(row.concurrency), *numbers, ratio, cpu, *times, row.limit)
