"""What the tests share: options for a directory, files past the code under test, and what is there."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_backends.nfs import NfsBackend, NfsOptions
from lmcache_core.names import object_name
from lmcache_core.protocols import ChunkKey, ReadResult
from lmcache_core.testing import aligned_buffer

KIB, MIB = 2**10, 2**20
HOUR = 3600.0


class Two(NamedTuple):
    """One directory by the mounts of two hosts, and by one that is never behind."""

    one: Path
    two: Path
    true: Path


def options(path: Path, **changes: Any) -> NfsOptions:
    """Options of a cache in a directory, which may be a local one."""
    return NfsOptions(path=str(path), **{"must_be_mounted": False} | changes)


@asynccontextmanager
async def opened(path: Path, **changes: Any) -> AsyncIterator[NfsBackend]:
    backend = NfsBackend(options(path, **changes))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def value(backend: NfsBackend, key: ChunkKey, nbytes: int) -> object:
    """The bytes if it is a hit, else the result."""
    into = aligned_buffer(nbytes)
    (result,) = await backend.read([key], [into])
    return bytes(into) if result is ReadResult.HIT else result


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that a thread or another host brings about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  polling: nobody tells
            await asyncio.sleep(0.02)


def file_of(path: Path, key: ChunkKey) -> Path:
    return path / object_name(key)


def files(path: Path) -> list[str]:
    """Names of all files below, without those of sweeps."""
    found = [str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()]
    return sorted(name for name in found if not name.startswith("sweeps/"))


def unfinished(path: Path) -> list[str]:
    return [name for name in files(path) if name.rpartition("/")[2].startswith(".")]


def descriptors(below: Path) -> list[str]:
    """What this process has open there."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


def system(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@contextmanager
def mounted(path: Path, *command: object) -> Iterator[Path]:
    """`path` with something mounted at it by `command`."""
    path.mkdir(exist_ok=True)
    system("mount", *command, path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
