"""What the tests share: options for a directory, frames, and what a device's memory can do."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lmcache_backends.gds import GdsBackend, GdsOptions
from lmcache_core.frame import FrameShape, seal, shape
from lmcache_core.names import object_name
from lmcache_core.protocols import Chunk, ChunkKey, DirectChunk, DirectRead, DirectWrite, ReadResult
from lmcache_core.testing import aligned_buffer

KIB, MIB = 2**10, 2**20
DRIVER = "GDS_TESTS_DRIVER"
"""Variable with the driver that this process is to use, which may be a fake."""


class Device(Protocol):
    """A device's memory."""

    def allocate(self, nbytes: int) -> int: ...

    def put(self, address: int, content: bytes | memoryview) -> None: ...

    def get(self, address: int, nbytes: int) -> bytes: ...

    def copy_back(self, address: int, into: memoryview) -> None: ...


class Gpu:
    """The first GPU's memory, by its driver."""

    def __init__(self, driver: str) -> None:
        self._cuda: Any = ctypes.CDLL(driver)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise OSError(f"{name} failed with {code}")

    def _inside(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._inside("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def put(self, address: int, content: bytes | memoryview) -> None:
        place = content if isinstance(content, bytes) else ctypes.byref(ctypes.c_char.from_buffer(content))
        self._inside("cuMemcpyHtoD_v2", ctypes.c_uint64(address), place, ctypes.c_size_t(len(content)))

    def get(self, address: int, nbytes: int) -> bytes:
        into = bytearray(nbytes)
        self.copy_back(address, memoryview(into))
        return bytes(into)

    def copy_back(self, address: int, into: memoryview) -> None:
        place = ctypes.byref(ctypes.c_char.from_buffer(into))
        self._inside("cuMemcpyDtoH_v2", place, ctypes.c_uint64(address), ctypes.c_size_t(len(into)))


def options(path: Path, **changes: Any) -> GdsOptions:
    return GdsOptions(path=str(path), **changes)


@asynccontextmanager
async def opened(path: Path, **changes: Any) -> AsyncIterator[GdsBackend]:
    backend = GdsBackend(options(path, **changes))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def value(backend: GdsBackend, key: ChunkKey, nbytes: int) -> object:
    """The bytes if it is a hit, else the result."""
    into = aligned_buffer(nbytes)
    (result,) = await backend.read([key], [into])
    return bytes(into) if result is ReadResult.HIT else result


def file_of(path: Path, key: ChunkKey) -> Path:
    return path / object_name(key)


def files(path: Path) -> list[str]:
    """Names of all files below, without those of sweeps."""
    found = [str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()]
    return sorted(name for name in found if not name.startswith("sweeps/"))


class Framed(NamedTuple):
    """A chunk as it lies on tiers."""

    chunk: DirectChunk
    form: FrameShape
    frame: memoryview

    @property
    def payload(self) -> memoryview:
        return self.frame[self.form.header_bytes :][: self.form.payload_bytes]

    def of_shard(self, shard: int) -> bytes:
        return bytes(self.payload[shard * self.form.shard_bytes :][: self.form.shard_bytes])

    def plain(self) -> Chunk:
        return Chunk(self.chunk.key, self.frame.toreadonly(), self.chunk.pages, self.chunk.parent)

    def pages(self, shard: int, first: int, pages: int, address: int) -> DirectRead:
        return DirectRead(self.chunk, shard, first, pages, address)

    def on(self, device: Device) -> DirectWrite:
        """A write of it from a device, where its shards are put."""
        addresses = tuple(device.allocate(self.form.shard_bytes) for _ in range(self.form.shards))
        for shard, address in enumerate(addresses):
            device.put(address, self.of_shard(shard))
        return DirectWrite(self.chunk, addresses)


def framed(number: int = 1, *, pages: int = 4, shards: int = 2, page_bytes: int = 16 * KIB, version: int = 0) -> Framed:
    """A chunk of random KV; another `version` has other bytes under the same key."""
    keys = tuple(hashlib.sha256(b"page %d of %d" % (page, number)).digest() for page in range(pages))
    space = hashlib.sha256(b"space").digest()
    parent = hashlib.sha256(b"in front of %d" % number).digest()
    form = shape(pages, shards, page_bytes)
    frame = aligned_buffer(form.nbytes)
    content = random.Random(f"{number} {version}").randbytes(form.payload_bytes)
    frame[form.header_bytes : form.header_bytes + form.payload_bytes] = content
    seal(frame, form, space, parent, keys)
    return Framed(DirectChunk(ChunkKey(space, keys[-1]), keys, parent, shards, page_bytes), form, frame)
