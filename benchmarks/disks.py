"""The disk tier, beside a plain loop of `pwritev` and `preadv` on the same file system. Both go past the page cache."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.harness import Row, Scale, rate, seconds
from benchmarks.workload import Engine, Nothing, opened
from lmcache_core.cache import Cache
from lmcache_core.direct import DirectClient

__all__ = ["ROWS", "disk", "scratch"]

THREADS = 4
"""As the backend has by default."""
ROWS = ["disk.write", "disk.read", "disk.write.slots", "disk.prefetch"]
KEPT = 1.5
"""Prompts on the tier: a store finds it full and replaces what is oldest, as it is after a day."""


def disk(scale: Scale) -> Iterator[Row]:
    """Rows `disk.*`. A write is timed from the engine's blocks to the tier's word that the chunk survives a crash of
    the process; a read from an empty host pool to the engine's blocks, each byte of it verified. The last two rows
    leave the engine's blocks out: from and to the host pool."""
    engine = Engine(scale.layers, scale.chunks, 16)
    took: dict[str, list[float]] = defaultdict(list)
    limits: dict[str, list[float]] = defaultdict(list)

    def write() -> None:
        assert cache.store(tokens, engine.view()).wait()

    def write_slots() -> None:
        assert cache.store(engine.prompt(), Nothing()).wait()

    def read() -> None:
        assert cache.retrieve(tokens, engine.view()).tiers == {"disk": engine.tokens}

    def prefetch() -> None:
        assert cache.prefetch(tokens) == engine.tokens

    with scratch(scale.directory) as directory:
        capacity = int(KEPT * scale.chunks) * engine.frame_bytes
        tier = {"backend": "disk", "path": str(directory / "tier"), "capacity": capacity, "direct": "always"}
        tier |= {"segment": capacity, "threads": THREADS, "min_free": 0}
        with (
            opened(engine.namespace, 2 * scale.chunks * engine.frame_bytes, (tier,)) as cache,
            RawFile(directory / "raw", engine.frame_bytes, scale.chunks, _pool(cache)) as raw,
        ):
            engine.check(cache, "disk")
            for number in range(scale.rounds + 2):
                tokens = engine.prompt()
                for name, work, limit in (
                    ("disk.write.slots", write_slots, raw.write),
                    ("disk.write", write, raw.write),
                    ("disk.read", read, raw.read),
                    ("disk.prefetch", prefetch, raw.read),
                ):
                    cache.clear(["cpu"])
                    limits[name].append(seconds(limit))
                    took[name].append(seconds(work))
                if number < 2:  # places are written for the first time
                    limits.clear()
                    took.clear()
    for name in ROWS:
        yield rate(name, engine.nbytes, took[name], limits[name])


def _pool(cache: Cache) -> memoryview:
    assert isinstance(cache.client, DirectClient)
    return cache.client.node.pool.memory


class RawFile:
    """A file whose places have been written before, and the same frames as the tier's, as many threads at them.

    `memory` is that of the cache, when nothing is in it: how fast a disk is depends on how the pages of memory happen
    to lie, by a quarter.
    """

    def __init__(self, path: Path, frame: int, frames: int, memory: memoryview) -> None:
        self._frame = frame
        self._frames = frames
        self._memory = memory
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC)
        os.posix_fallocate(self._file, 0, frame * frames)
        self._threads = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()
        os.close(self._file)

    def write(self) -> None:
        """Write all of it."""
        list(self._threads.map(partial(self._move, os.pwritev), range(self._frames)))

    def read(self) -> None:
        """Read all of it."""
        list(self._threads.map(partial(self._move, os.preadv), range(self._frames)))

    def _move(self, call: Callable[[int, Sequence[memoryview], int], int], number: int) -> None:
        at, end = number * self._frame, (number + 1) * self._frame
        while at < end:
            at += call(self._file, [self._memory[at:end]], at)


@contextmanager
def scratch(wanted: Path | None) -> Iterator[Path]:
    """A directory on a disk, deleted afterwards."""
    places = [wanted] if wanted else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    place = next((place for place in places if place.is_dir() and _takes_direct(place)), None)
    if place is None:
        raise SystemExit(
            f"no place past whose page cache one can write: {', '.join(map(str, places))}; use --directory"
        )
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=place) as made:
        yield Path(made)


def _takes_direct(place: Path) -> bool:
    if _file_system(place) in ("tmpfs", "ramfs"):
        return False
    try:
        os.close(os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def _file_system(place: Path) -> str:
    device = place.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""
