"""`lmcache-core bench`: how close memory and tiers come to what this machine can do, measured through `Cache`."""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lmcache_core.cache import Cache, Prompt
from lmcache_core.cli.disk_cache import can_be_inspected, look
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import Column, add_json_option, is_terminal, print_json, print_table
from lmcache_core.config import Config, TierConfig
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.frame import shape
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace, chunk_tokens_for, page_tokens_for
from lmcache_core.units import format_size, parse_size

GB = 1e9
# The KV of Llama 3 8B in bfloat16: 32 layers of 8 KV heads, 128 KiB a token.
LAYERS = 32
KV_HEADS = 8
HEAD_SIZE = 128
TOKEN_LAYER_BYTES = 2 * KV_HEADS * HEAD_SIZE * 2

REPEATS = 3
SECONDS = 30.0
"""About how long moving chunks to and from all tiers may take."""
LOOKUPS = 200
PREFAULT_SECONDS = 30.0
TIER_WAIT = 20.0


class Row(NamedTuple):
    """One measurement."""

    name: str
    value: float | None
    unit: str
    limit: float | None
    """What the machine does without a cache, in the same unit; None where nobody can tell."""
    ratio: float | None
    """`value / limit`"""
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    parser.add_argument(
        "--size",
        metavar="SIZE",
        default="512MiB",
        help="KV that is moved at a time (default: %(default)s); four times that in memory",
    )
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Measure. The exit code is 1 if a tier could not be."""
    try:
        size = parse_size(arguments.size)
    except ConfigError as error:
        arguments.usage_error(f"--size: {error}")
    config = load_usable(arguments.file).config
    rows = []
    for row in measure(config, size):
        rows.append(row)
        if not arguments.json and is_terminal(sys.stderr):
            print(f"measured {row.name}", file=sys.stderr)
    if arguments.json:
        print_json({"rows": [row._asdict() for row in rows]})
    else:
        columns = [Column("measured"), *(Column(name, right=True) for name in ("value", "unit", "limit", "ratio"))]
        print_table([*columns, Column("note")], [_cells(row) for row in rows])
    return 1 if any(row.value is None for row in rows) else 0


def _cells(row: Row) -> tuple[str, ...]:
    numbers = [("-" if number is None else f"{number:.3g}") for number in (row.value, row.limit)]
    return row.name, numbers[0], row.unit, numbers[1], "-" if row.ratio is None else f"{row.ratio:.2f}", row.note


def measure(config: Config, size: int) -> Iterator[Row]:
    """Rows for memory and for each tier. Chunks of a namespace of its own are written, and deleted again.

    Raises:
        ConfigError: `size` is less than one chunk, or more than the pool can hold.
        LMCacheError: The node cannot be had.
    """
    workload = Workload(config, size)
    limit = workload.nbytes / _best(workload.copy) / GB
    yield Row("memcpy", limit, "GB/s", limit, 1.0, "one thread")
    # Tiers come later and one by one: a tier that cannot be opened spoils no other's row.
    with _memory_only(config, workload) as cache:
        yield from _memory(cache, workload, limit)
    for tier in config.tiers:
        yield from _tier(config, tier, workload)


class Workload:
    """KV of prompts, and the view of an engine that would hold it: `[layer][page][bytes]`."""

    def __init__(self, config: Config, size: int) -> None:
        self.page_tokens = page_tokens_for([1], config.page_tokens)
        self.chunk_tokens = chunk_tokens_for(self.page_tokens, config.chunk_tokens)
        group = Group(
            kind=GroupKind.FULL,
            layers=tuple(range(LAYERS)),
            page_layer_bytes=self.page_tokens * TOKEN_LAYER_BYTES,
            dtype="bfloat16",
            kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
        )
        self.namespace = Namespace(
            weights="lmcache-core bench",
            model_name="lmcache-core bench",
            groups=(group,),
            page_tokens=self.page_tokens,
            encoding=Encoding(layout="canonical"),
        )
        self.chunk_bytes = self.chunk_tokens * TOKEN_LAYER_BYTES * LAYERS
        self.frame_bytes = shape(self.chunk_tokens // self.page_tokens, 1, group.page_bytes).nbytes
        self.chunks = size // self.chunk_bytes
        if not self.chunks:
            raise ConfigError(f"--size must be at least one chunk, {format_size(self.chunk_bytes)}")
        self.nbytes = self.chunks * self.chunk_bytes
        self.pool_bytes = 2 * (self.chunks + 1) * self.frame_bytes
        if self.pool_bytes > config.cpu.capacity:
            raise ConfigError(
                f"--size {format_size(self.nbytes)} needs a cpu.capacity of {format_size(self.pool_bytes)}, "
                f"it is {format_size(config.cpu.capacity)}; measure with a smaller --size"
            )
        pages = self.chunks * self.chunk_tokens // self.page_tokens
        words = np.random.default_rng(0).integers(0, 1 << 64, self.nbytes // 8, dtype=np.uint64)
        self.source = words.view(np.uint8).reshape(LAYERS, pages, group.page_layer_bytes)
        self.target = np.zeros_like(self.source)
        self._random = np.random.default_rng(secrets.randbits(64))

    def prompt(self, cache: Cache, chunks: int) -> Prompt:
        """A prompt of so many chunks that was never seen before."""
        return cache.prompt(self._random.integers(0, 1 << 31, chunks * self.chunk_tokens))

    def copy(self) -> None:
        """What a copy of all of it costs without a cache."""
        np.copyto(self.target, self.source)

    def arrived(self, tokens: int) -> bool:
        """Whether the target has the first tokens of the source."""
        pages = tokens // self.page_tokens
        return bool(np.array_equal(self.target[:, :pages], self.source[:, :pages]))


class _View:
    """An engine's KV in a numpy array."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self._array = array

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        """See `KVView`."""
        self._chunk(into, pages)[:] = self._array[:, first_page : first_page + pages].transpose(1, 0, 2)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """See `KVView`."""
        self._array[:, first_page : first_page + pages] = self._chunk(source, pages).transpose(1, 0, 2)

    def _chunk(self, buffer: memoryview, pages: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(buffer, np.uint8).reshape(pages, LAYERS, -1)


@contextlib.contextmanager
def _cache(config: Config, workload: Workload) -> Iterator[Cache]:
    """A cache whose pool is faulted in, and which leaves nothing on its tiers."""
    with Cache.open(config, workload.namespace) as cache:
        end = time.monotonic() + PREFAULT_SECONDS
        while (stats := cache.stats()).pool_usable < stats.pool_capacity and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield cache
        finally:
            cache.clear()
            cache.flush(TIER_WAIT)


def _memory_only(config: Config, workload: Workload) -> contextlib.AbstractContextManager[Cache]:
    return _cache(_with(config, workload, ()), workload)


def _with(config: Config, workload: Workload, tiers: tuple[TierConfig, ...]) -> Config:
    """The user's settings with a pool of the size needed, and only these tiers."""
    cpu = msgspec.structs.replace(config.cpu, capacity=workload.pool_bytes)
    metrics = msgspec.structs.replace(config.metrics, enabled=False)
    return msgspec.structs.replace(config, cpu=cpu, tiers=tiers, metrics=metrics)


# Memory


def _memory(cache: Cache, workload: Workload, limit: float) -> Iterator[Row]:
    stores, loads, lookups = [], [], []
    view, target = _View(workload.source), _View(workload.target)
    for _ in range(REPEATS):
        prompt = workload.prompt(cache, workload.chunks)
        stores.append(_seconds(partial(cache.store, prompt, view)))
        workload.target[:] = 0
        loads.append(_seconds(partial(cache.retrieve, prompt, target)))
        if not workload.arrived(prompt.tokens):
            raise LMCacheError("memory gave back other bytes than were stored; do not use this machine")
        lookups += [_seconds(partial(cache.lookup, prompt)) for _ in range(LOOKUPS)]
        cache.evict(prompt)
    for name, seconds in (("cpu.store", min(stores)), ("cpu.retrieve", min(loads))):
        value = workload.nbytes / seconds / GB
        yield Row(name, value, "GB/s", limit, value / limit)
    yield Row("cpu.lookup", min(lookups) * 1e6, "µs", None, None, f"of {prompt.tokens} tokens")


# Tiers


def _tier(config: Config, tier: TierConfig, workload: Workload) -> Iterator[Row]:
    names = (f"{tier.name}.store", f"{tier.name}.retrieve")
    try:
        _refuse_if_in_use(tier)
        if tier.write == "never":
            raise LMCacheError("it is only read (write: never)")
        # The user's policies say when a chunk is written. Here each one is, at once.
        open_tier = msgspec.structs.replace(tier, write="through", admit="always")
        with _cache(_with(config, workload, (open_tier,)), workload) as cache:
            chunks = _affordable(cache, tier, workload, SECONDS / len(config.tiers))
            written, read = _tier_rates(cache, tier, workload, chunks)
        limits = _file_limits(tier, workload, chunks)
    except (LMCacheError, OSError) as error:
        for name in names:
            yield Row(name, None, "GB/s", None, None, f"not measured: {error}")
        return
    note = f"{format_size(chunks * workload.chunk_bytes)} at a time"
    for name, value, limit in zip(names, (written, read), limits, strict=True):
        yield Row(name, value, "GB/s", limit, None if limit is None else value / limit, note)


def _refuse_if_in_use(tier: TierConfig) -> None:
    """A second owner halves what the first may hold, so that it would delete chunks."""
    if not can_be_inspected(tier.backend):
        return
    for path in map(Path, tier.options.paths()):
        if path.is_dir():
            for shard in look(path).shards:
                if shard.locked:
                    process = shard.owner.partition("-")[0] or "unknown"
                    raise LMCacheError(f"{path} is in use by process {process}, whose chunks would be evicted")


def _affordable(cache: Cache, tier: TierConfig, workload: Workload, seconds: float) -> int:
    """How many chunks a tier moves in about half that time, over all repeats, and without evicting anything."""
    (stats,) = cache.stats().tiers
    if not stats.up:
        raise LMCacheError("it cannot be opened")
    room = workload.chunks
    if stats.capacity is not None:
        room = min(room, (stats.capacity - stats.used) // workload.frame_bytes)
    if room < 1:
        raise LMCacheError("it is full: measuring would evict chunks")
    one = sum(_once(cache, tier, workload, 1))
    return max(1, min(room, int(seconds / 2 / REPEATS / one)))


def _tier_rates(cache: Cache, tier: TierConfig, workload: Workload, chunks: int) -> tuple[float, float]:
    """GB/s of storing and of retrieving."""
    times = [_once(cache, tier, workload, chunks) for _ in range(REPEATS)]
    nbytes = chunks * workload.chunk_bytes
    return nbytes / min(store for store, _ in times) / GB, nbytes / min(load for _, load in times) / GB


def _once(cache: Cache, tier: TierConfig, workload: Workload, chunks: int) -> tuple[float, float]:
    """Seconds until a prompt is on the tier, and until it is back from there."""
    prompt = workload.prompt(cache, chunks)
    pages = prompt.tokens // workload.page_tokens
    view, target = _View(workload.source[:, :pages]), _View(workload.target[:, :pages])
    try:
        started = time.perf_counter()
        if not cache.store(prompt, view).wait(TIER_WAIT):
            raise LMCacheError(f"it did not take {format_size(chunks * workload.chunk_bytes)}; see the log")
        stored = time.perf_counter() - started
        cache.evict(prompt, ["cpu"])
        workload.target[:, :pages] = 0
        started = time.perf_counter()
        found = cache.retrieve(prompt, target, source=[tier.name], timeout=TIER_WAIT)
        loaded = time.perf_counter() - started
        if found.tokens < prompt.tokens or found.tiers.get(tier.name) != prompt.tokens:
            raise LMCacheError(f"it gave back {found.tokens} of {prompt.tokens} tokens; see the log")
        if not workload.arrived(prompt.tokens):
            raise LMCacheError("it gave back other bytes than were stored; do not use it")
        return stored, loaded
    finally:
        cache.evict(prompt)
        cache.flush(TIER_WAIT)


def _file_limits(tier: TierConfig, workload: Workload, chunks: int) -> tuple[float | None, float | None]:
    """GB/s of writing and reading a plain file beside a disk tier's own, as many chunks at once as it does."""
    if not can_be_inspected(tier.backend):
        return None, None
    plain = PlainFile(Path(tier.options.paths()[0]), workload.frame_bytes, chunks, tier.options.threads)
    with plain:
        nbytes = chunks * workload.frame_bytes
        return nbytes / _best(plain.write) / GB, nbytes / _best(plain.read) / GB


class PlainFile:
    """A file without a name, written and read past the page cache where the file system can."""

    def __init__(self, directory: Path, block: int, blocks: int, threads: int) -> None:
        self._block = block
        self._blocks = blocks
        self._buffer = mmap.mmap(-1, block * min(blocks, threads))
        self._view = memoryview(self._buffer)
        self._buffer[:] = secrets.token_bytes(4096) * (len(self._buffer) // 4096)
        self._fd = _temporary(directory)
        self._threads = ThreadPoolExecutor(min(blocks, threads))

    def __enter__(self) -> PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._view.release()
        self._buffer.close()

    def write(self) -> None:
        """Write all of it."""
        self._each(os.pwritev)

    def read(self) -> None:
        """Read all of it."""
        self._each(os.preadv)

    def _each(self, move: Callable[[int, list[memoryview], int], int]) -> None:
        slots = len(self._buffer) // self._block

        def one(number: int) -> None:
            start = number % slots * self._block
            done = 0
            while done < self._block:
                part = self._view[start + done : start + self._block]
                count = move(self._fd, [part], number * self._block + done)
                if not count:
                    raise OSError("a plain file ended too early")
                done += count

        list(self._threads.map(one, range(self._blocks)))


def _temporary(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        with contextlib.suppress(OSError):
            return os.open(directory, flags | more, 0o600)
    fd, name = tempfile.mkstemp(dir=directory, prefix=".bench-")  # as on NFS
    try:
        with contextlib.suppress(OSError):
            direct = os.open(name, flags | os.O_DIRECT)
            os.close(fd)
            return direct
        return fd
    finally:
        os.unlink(name)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _best(call: Callable[[], object]) -> float:
    return min(_seconds(call) for _ in range(REPEATS))
