"""What the disk tests share: stores as blocking objects, and how to fill, read and copy them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_backends.disk.options import DiskOptions
from lmcache_backends.disk.store import Store
from lmcache_backends.disk.tally import Tally
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key

KIB, MIB = 2**10, 2**20
SIZE = 16 * KIB


def options(*paths: Path, **changes: Any) -> DiskOptions:
    """Options of a small cache on a file system that may be nearly full."""
    return DiskOptions(path=[str(path) for path in paths], **{"capacity": 16 * MIB, "min_free": 0} | changes)


class OpenStore(Store):
    """A store with its counters."""

    def __init__(self, options: DiskOptions) -> None:
        self.tally = Tally()
        super().__init__(options, self.tally)
        self.open()

    def count(self, name: str) -> int:
        return self.tally.counts()[name]


@contextmanager
def opened(*paths: Path, **changes: Any) -> Iterator[OpenStore]:
    """A store between its opening and its end. Closing writes nothing, so the end is as good as a crash."""
    store = OpenStore(options(*paths, **changes))
    try:
        yield store
    finally:
        store.close()


def chunk(number: int, nbytes: int = SIZE, **changes: Any) -> Chunk:
    return make_chunk(make_key(number), nbytes, **changes)


def put(store: Store, *chunks: Chunk) -> list[WriteResult]:
    first = store.epochs(len(chunks))
    return [store.write(chunk, first + later) for later, chunk in enumerate(chunks)]


def fill(store: Store, *chunks: Chunk) -> None:
    assert put(store, *chunks) == [WriteResult.STORED] * len(chunks)


def get(store: Store, key: ChunkKey, nbytes: int = SIZE) -> bytes | ReadResult:
    into = aligned_buffer(nbytes)
    result = store.read(key, into)
    return bytes(into) if result is ReadResult.HIT else result


def assert_holds(store: Store, *chunks: Chunk) -> None:
    for wanted in chunks:
        found = get(store, wanted.key, wanted.data.nbytes)
        assert isinstance(found, bytes), f"{wanted.key.page.hex()[:8]}: {found}"
        assert found == wanted.data, f"{wanted.key.page.hex()[:8]} has other bytes"


def assert_lacks(store: Store, *chunks: Chunk) -> None:
    assert [get(store, gone.key, gone.data.nbytes) for gone in chunks] == [ReadResult.MISS] * len(chunks)


def order(store: Store) -> list[ChunkKey]:
    """What is stored, least recently used first."""
    return [entry.stored().key for entry in store.entries()]


def shard_in(path: Path) -> Path:
    """The only shard below a path."""
    (shard,) = [found for found in path.iterdir() if len(found.name) == 16]
    return shard


def taken(path: Path) -> int:
    """Bytes of all segments below a path."""
    return sum(segment.stat().st_size for segment in path.glob("*/segment-*"))


def use_up(file: Path) -> None:
    """Write until the file system is full."""
    with open(file, "wb", buffering=0) as others:
        while True:
            others.write(bytes(4 * KIB))


def copy_of(path: Path, to: Path) -> Path:
    """What a crash at this moment would leave; its locks are nobody's."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path, to)
    return to


def tree(path: Path) -> dict[str, tuple[int, int, int]]:
    """All files below a path, with what a change of them would change."""
    found = {}
    for directory, _, names in os.walk(path):
        for name in names:
            status = os.stat(os.path.join(directory, name))
            found[os.path.join(directory, name)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found
