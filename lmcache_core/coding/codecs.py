"""Codecs for blocks of pages. Each lets other threads run while it works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from lmcache_core.frame import Codec

__all__ = ["PageCodec", "load_codec"]

ZSTD_LEVEL = 1
"""KV has no repetitions: all that is found are frequent bytes, which higher levels find no better."""


class PageCodec(Protocol):
    """Compresses blocks. An instance is used by one thread at a time."""

    def compress(self, block: memoryview) -> bytes:
        """The block, compressed; may be longer than it."""
        ...

    def decompress(self, packed: memoryview, nbytes: int) -> bytes:
        """The block of `nbytes` bytes that was compressed. Never takes memory for more than that.

        Raises:
            ValueError: It is no such block.
        """
        ...


@functools.cache
def load_codec(codec: Codec) -> Callable[[], PageCodec]:
    """What makes instances of a codec.

    Raises:
        ImportError: Its package is not installed.
    """
    return {Codec.LZ4: _lz4, Codec.ZSTD: _zstd}[codec]()


def _lz4() -> Callable[[], PageCodec]:
    from lz4 import block as lz4

    class Lz4:
        def compress(self, block: memoryview) -> bytes:
            packed: bytes = lz4.compress(block, store_size=False)
            return packed

        def decompress(self, packed: memoryview, nbytes: int) -> bytes:
            try:
                found: bytes = lz4.decompress(packed, uncompressed_size=nbytes)
            except lz4.LZ4BlockError as error:
                raise ValueError(str(error)) from None
            return _exact(found, nbytes)

    return Lz4


def _zstd() -> Callable[[], PageCodec]:
    import zstandard

    class Zstd:
        def __init__(self) -> None:
            self._compress = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
            self._decompress = zstandard.ZstdDecompressor().decompress

        def compress(self, block: memoryview) -> bytes:
            return self._compress(block)

        def decompress(self, packed: memoryview, nbytes: int) -> bytes:
            try:
                # It takes as much memory as the value itself asks for.
                if zstandard.frame_content_size(packed) != nbytes:
                    raise ValueError("it is of another size")
                return _exact(self._decompress(packed, allow_extra_data=False), nbytes)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from None

    return Zstd


def _exact(block: bytes, nbytes: int) -> bytes:
    if len(block) != nbytes:
        raise ValueError(f"{len(block)} bytes instead of {nbytes}")
    return block
