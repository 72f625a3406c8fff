"""Frames whose payload goes between a file and a device's memory, past the host's. Blocks.

Headers are made and checked on the host. Checksums of pages are those of what is in the device's memory, copied back.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import xxhash

from lmcache_backends.gds.moving import CuFiles, DeviceMemory
from lmcache_backends.gds.tally import Tally
from lmcache_backends.nfs.chunks import ChunkFiles
from lmcache_backends.nfs.moving import PlainMover
from lmcache_core.errors import BackendError, FrameError, UsageError
from lmcache_core.frame import PLAIN, FrameShape, Page, finish, shape, verify_header
from lmcache_core.protocols import CopyBack, DirectChunk, DirectRead, DirectWrite, ReadResult, WriteResult

__all__ = ["DirectFiles", "Scratch", "check_read", "check_write"]

_PIECE = 2 << 20
"""Bytes of host memory, for each thread, in which pages are compared piece by piece."""
_SUM = 16
_KEY = 32
_ADDRESSES = 1 << 64
_WORD = 8
_PAGE = 4096


def check_read(read: DirectRead) -> None:
    """See that there can be such pages.

    Raises:
        UsageError: There cannot.
    """
    form = _form(read.chunk)
    if not 0 <= read.shard < form.shards or read.first < 0 or read.pages < 1 or read.first + read.pages > form.pages:
        raise UsageError(
            f"pages {read.first} to {read.first + read.pages - 1} of shard {read.shard} are not in a chunk of "
            f"{form.pages} pages and {form.shards} shards"
        )
    if not _fits(read.address, read.pages * form.page_bytes):
        raise UsageError(f"{read.address} is no address of a device's memory")


def check_write(write: DirectWrite) -> None:
    """See that there can be such a chunk.

    Raises:
        UsageError: There cannot.
    """
    form = _form(write.chunk)
    if len(write.addresses) != form.shards or not all(_fits(each, form.shard_bytes) for each in write.addresses):
        raise UsageError(f"a chunk of {form.shards} shards is written from as many addresses, not {write.addresses}")
    if write.sums and [len(each) for each in write.sums] != [_SUM] * (form.shards * form.pages):
        raise UsageError(f"a chunk of {form.shards * form.pages} pages in all its shards has as many sums of 16 bytes")


def _form(chunk: DirectChunk) -> FrameShape:
    if not chunk.pages or chunk.pages[-1] != chunk.key.page:
        raise UsageError("a chunk's key is that of its last page")
    if any(len(key) != _KEY for key in (chunk.key.space, *chunk.pages)) or len(chunk.parent) not in (0, _KEY):
        raise UsageError("keys of a chunk's space and pages have 32 bytes, its parent has as many or none")
    return shape(len(chunk.pages), chunk.shards, chunk.page_bytes)


def _fits(address: int, nbytes: int) -> bool:
    return 0 < address <= _ADDRESSES - nbytes


class Scratch(threading.local):
    """Host memory of each thread: fresh memory at each call would cost more than what is done in it."""

    def __init__(self) -> None:
        self.memory = _host_memory(_PIECE)
        self._words = self.memory.cast("Q")
        self._mark = os.urandom(_WORD)
        """Nobody has bytes like these by chance."""
        self._marks = memoryview(self._mark * (_PIECE // _PAGE)).cast("Q")

    def spoiled(self, nbytes: int) -> memoryview:
        """So many bytes of it, changed in each 4096 of them and at the end. What was copied there before may be the
        very page that is asked for now: who then leaves it as it is must not seem to have copied it."""
        self._words[: -(-nbytes // _WORD) : _PAGE // _WORD] = self._marks[: -(-nbytes // _PAGE)]
        piece = self.memory[:nbytes]
        end = piece[-_WORD:]
        end[:] = self._mark[: len(end)]
        return piece


class DirectFiles:
    """Payloads between the chunks of a directory and a device. All methods raise `BackendError`."""

    def __init__(
        self, chunks: ChunkFiles, files: CuFiles, tally: Tally, scratch: Scratch, *, trust: bool, payload_first: bool
    ) -> None:
        """`payload_first`: a header is written once what it is believed to say of the payload is on the medium."""
        self._chunks = chunks
        self._files = files
        self._tally = tally
        self._trust = trust
        self._payload_first = payload_first
        self._plain = PlainMover()
        self._scratch = scratch

    def read(self, read: DirectRead, back: CopyBack) -> ReadResult:
        """Read pages of one shard, if the chunk is there and is what it shall be."""
        form = _form(read.chunk)
        key = read.chunk.key
        result = self._chunks.visit(key, lambda fd, size: self._read(fd, size, form, read, back), form.nbytes)
        if result is ReadResult.HIT:
            self._tally.add("direct_bytes_read", read.pages * form.page_bytes)
        elif result is ReadResult.CORRUPT:
            self._tally.add("direct_corrupt")
        return result

    def _read(self, fd: int, size: int, form: FrameShape, read: DirectRead, back: CopyBack) -> ReadResult:
        chunk = read.chunk
        header = _host_memory(form.header_bytes)
        if not self._plain.read(fd, header):
            return ReadResult.CORRUPT
        try:
            coding, table = verify_header(header, form, chunk.key.space, chunk.parent, chunk.pages)
        except FrameError:
            return ReadResult.CORRUPT
        if coding != PLAIN:
            self._tally.add("direct_coded")
            return ReadResult.MISS
        if size != form.nbytes:
            return ReadResult.CORRUPT
        first = read.shard * form.pages + read.first
        nbytes = read.pages * form.page_bytes
        offset = form.header_bytes + first * form.page_bytes
        if not self._files.read_at(fd, DeviceMemory(read.address, nbytes), nbytes, offset):
            return ReadResult.CORRUPT
        wanted = [page.check for page in table[first : first + read.pages]]
        if not self._trust and self._sums_on_device(read.address, read.pages, form.page_bytes, back) != wanted:
            return ReadResult.CORRUPT
        return ReadResult.HIT

    def write(self, write: DirectWrite, back: CopyBack) -> WriteResult:
        """Store a chunk, if there is room."""
        form = _form(write.chunk)
        result = self._chunks.put(write.chunk.key, lambda fd: self._fill(fd, form, write, back), form.nbytes)
        if result is WriteResult.STORED:
            self._tally.add("direct_bytes_written", form.payload_bytes)
        return result

    def _fill(self, fd: int, form: FrameShape, write: DirectWrite, back: CopyBack) -> None:
        os.ftruncate(fd, form.nbytes)  # the padding is zeros
        for shard, address in enumerate(write.addresses):
            offset = form.header_bytes + shard * form.shard_bytes
            self._files.write_at(fd, DeviceMemory(address, form.shard_bytes), form.shard_bytes, offset)
        sums = list(write.sums)
        if not sums:
            for address in write.addresses:
                sums += self._sums_on_device(address, form.pages, form.page_bytes, back)
        if not self._trust and list(self._sums_in_file(fd, form)) != sums:
            where = write.chunk.key.page.hex()
            raise BackendError(f"gds: chunk {where} is not on the medium as it was on the device; look in dmesg")
        if self._payload_first:
            os.fdatasync(fd)
        self._plain.write(fd, _header(form, write.chunk, sums))

    def _sums_on_device(self, address: int, pages: int, page_bytes: int, back: CopyBack) -> list[bytes]:
        sums = []
        for start in range(address, address + pages * page_bytes, page_bytes):
            digest = xxhash.xxh3_128()
            for done in range(0, page_bytes, _PIECE):
                piece = self._scratch.spoiled(min(_PIECE, page_bytes - done))
                try:
                    back(start + done, piece)
                except Exception as error:  # it is the caller's, and may raise anything
                    raise BackendError(f"gds: a device's memory cannot be copied back: {error}") from error
                digest.update(piece)
            sums.append(digest.digest())
        self._tally.add("direct_verified_bytes", pages * page_bytes)
        return sums

    def _sums_in_file(self, fd: int, form: FrameShape) -> Iterator[bytes]:
        """Of each page of each shard, in the order in which they lie there. Fewer if the file ends before that."""
        digest, lacking = xxhash.xxh3_128(), form.page_bytes
        scratch = self._scratch.memory
        left = form.payload_bytes
        for offset in range(form.header_bytes, form.nbytes, _PIECE):
            piece = scratch[: min(_PIECE, form.nbytes - offset)]
            if not self._plain.read(fd, piece, offset):
                return
            piece = piece[:left]
            left -= len(piece)
            while len(piece):
                digest.update(piece[:lacking])
                piece, lacking = piece[lacking:], lacking - min(lacking, len(piece))
                if not lacking:
                    yield digest.digest()
                    digest, lacking = xxhash.xxh3_128(), form.page_bytes
        self._tally.add("direct_verified_bytes", form.payload_bytes)


def _header(form: FrameShape, chunk: DirectChunk, sums: Sequence[bytes]) -> memoryview:
    frame = _host_memory(form.nbytes)  # of which only the pages of the header and the last one ever exist
    table = [Page(form.page_bytes, check) for check in sums]
    finish(frame, form, chunk.key.space, chunk.parent, chunk.pages, PLAIN, table)
    return frame[: form.header_bytes]


def _host_memory(nbytes: int) -> memoryview:
    """At a multiple of 4096, as files that go past the page cache need it."""
    return memoryview(mmap.mmap(-1, nbytes))
