"""Memory, keys and values as a node hands them to a backend.

Everything follows from the arguments, so that a failure can be repeated.
"""

from __future__ import annotations

import hashlib
import mmap
import random

from lmcache_core.protocols import Chunk, ChunkKey

__all__ = [
    "ALIGN",
    "SPACE",
    "GuardedBuffer",
    "aligned_buffer",
    "flip_bit",
    "make_chunk",
    "make_key",
    "random_frame",
]

ALIGN = 4096
SPACE = hashlib.sha256(b"space of the conformance kit").digest()
_CANARY = bytes(range(1, 129)) * (ALIGN // 128)


def aligned_buffer(nbytes: int) -> memoryview:
    """Writable zeros that start at a multiple of 4096 in memory. `nbytes` must be a multiple of 4096 too."""
    if nbytes <= 0 or nbytes % ALIGN:
        raise ValueError(f"{nbytes} is not a positive multiple of {ALIGN}")
    return memoryview(mmap.mmap(-1, nbytes))


def random_frame(nbytes: int, seed: object) -> memoryview:
    """Read-only random bytes in page-aligned memory: to a backend any bytes are as good as a chunk's."""
    buffer = aligned_buffer(nbytes)
    buffer[:] = random.Random(f"{seed!r} of {nbytes}").randbytes(nbytes)
    return buffer.toreadonly()


def make_key(number: int, *, space: bytes = SPACE) -> ChunkKey:
    """The key with that number."""
    return ChunkKey(space, hashlib.sha256(b"page %d" % number).digest())


def make_chunk(
    key: ChunkKey, nbytes: int = 4 * ALIGN, *, version: int = 0, pages: int = 4, parent: bytes = b""
) -> Chunk:
    """A chunk of random bytes; another `version` has other bytes under the same key."""
    inner = tuple(hashlib.sha256(key.page + b" before %d" % i).digest() for i in range(1, pages))
    return Chunk(key, random_frame(nbytes, (key, version)), (*inner, key.page), parent)


def flip_bit(digest: bytes, bit: int) -> bytes:
    """`digest` with one bit changed."""
    return (int.from_bytes(digest, "little") ^ 1 << bit).to_bytes(len(digest), "little")


class GuardedBuffer:
    """A buffer between two pages that nobody may touch."""

    def __init__(self, nbytes: int) -> None:
        self._memory = aligned_buffer(nbytes + 2 * ALIGN)
        self._memory[:ALIGN] = self._memory[-ALIGN:] = _CANARY
        self.view = self._memory[ALIGN:-ALIGN]

    def assert_intact(self) -> None:
        """Fail if a byte in front of or behind the buffer has changed."""
        assert self._memory[:ALIGN] == _CANARY, "the bytes in front of the buffer were written to"
        assert self._memory[-ALIGN:] == _CANARY, "the bytes behind the buffer were written to"
