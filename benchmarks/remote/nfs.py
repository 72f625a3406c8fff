"""The tier on a shared file system, beside plain files of the same kind: on a local directory, and on GlusterFS.

Plain files are the limit: as many threads, which write to a file beside its place, past the page cache, and rename it;
and read with nothing but `open`, `preadv` and `close`. On GlusterFS what one mount wrote is read by another one, as by
another host. The server runs on the same machine; its CPU time is not counted.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.disks import scratch
from benchmarks.harness import Row, Scale
from benchmarks.remote.moving import MIB, Contestant, Values, Work, names_of, ours, take_turns
from lmcache_backends.nfs import NfsBackend, NfsOptions
from tests.servers import gluster

__all__ = ["ROWS", "nfs_rows"]

SIZES = (1, 8, 32)
THREADS = 8
"""As the backend has by default."""
DIRECTORIES = 64
ROWS = [name for tier in ("nfs.directory", "nfs.gluster") for name in names_of(tier, SIZES, [])]


def nfs_rows(scale: Scale) -> Iterator[Row]:
    """Rows `nfs.*`."""
    with scratch(scale.directory) as directory:
        for size in SIZES:
            yield from asyncio.run(_measured("nfs.directory", directory, directory, size, scale.rounds))
    if lacking := gluster.lacking():
        raise SystemExit(lacking)
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as made, gluster.volume(Path(made) / "volume") as volume:
        for size in SIZES:
            yield from asyncio.run(_measured("nfs.gluster", volume.one.path, volume.two.path, size, scale.rounds))


async def _measured(tier: str, writes: Path, reads: Path, size: int, rounds: int) -> list[Row]:
    values = Values(size * MIB)
    async with AsyncExitStack() as stack:
        contestants = [await make(writes, reads, values, stack) for make in (_ours, _files)]
        return await take_turns(tier, contestants, values, rounds)


async def _ours(writes: Path, reads: Path, values: Values, stack: AsyncExitStack) -> Contestant:
    name = f"ours{values.size}"
    writer, reader = (
        NfsBackend(NfsOptions(path=str(each / name), threads=THREADS, must_be_mounted=False))
        for each in (writes, reads)
    )
    return await ours(values, stack, writer, reader)


async def _files(writes: Path, reads: Path, values: Values, stack: AsyncExitStack) -> Contestant:
    threads = stack.enter_context(ThreadPoolExecutor(THREADS))
    name = f"files{values.size}"
    for number in range(len(values.keys)):  # as ours: directories are not what they wait for
        (writes / name / str(number % DIRECTORIES)).mkdir(parents=True, exist_ok=True)

    def work(move: Callable[[int], None]) -> Work:
        async def all_of_them() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(threads, move, number) for number in range(len(values.keys))))

        return all_of_them

    def put(number: int) -> None:
        place = f"{writes}/{name}/{number % DIRECTORIES}/{number}"
        beside = f"{place}.new"
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        done = 0
        while done < values.size:
            done += os.pwritev(file, [values.chunks[number].data[done:]], done)
        os.close(file)
        os.rename(beside, place)

    def get(number: int) -> None:
        file = os.open(f"{reads}/{name}/{number % DIRECTORIES}/{number}", os.O_RDONLY | os.O_DIRECT)
        done = 0
        while done < values.size:
            done += os.preadv(file, [values.slots[number][done:]], done)
        os.close(file)

    return Contestant("files", work(put), work(get))
