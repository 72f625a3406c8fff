"""The framed form of a chunk: what every tier keeps and every reader checks.

A frame is a header of n x 4 KiB and the payload, padded with zeros to 4 KiB, so that a slot of the host pool (which
has room for the header in front) can be written to `O_DIRECT` files and registered memory as it lies.

Header, little endian, all of it covered by the checksum in it::

    0    8  magic "LMCKVFR\\n"
    8    2  format version        10  2  codec (0: none)
    12   4  header bytes          16  8  payload bytes, padding not included
    24   4  shards                28  4  pages
    32   8  bytes of one page of one shard, uncoded
    40  16  xxh3-128 of the header with these 16 bytes zero
    56   8  zero
    64  32  space: digest of namespace and group
    96  32  key of the page in front of the first; zero bytes if there is none
    128     page keys, 32 bytes each
    ...     for each shard, for each page: 8 bytes length, 16 bytes xxh3-128
    ...     zero up to the header's end

The payload is `[shard][page][layer][bytes]`; the first k pages of a shard are a prefix of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash

from lmcache_core.errors import FrameError, LayoutError

ALIGN = 4096
MAGIC = b"LMCKVFR\n"
VERSION = 1
CODEC_NONE = 0
MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 36

_FIXED = struct.Struct("<8sHHIQIIQ16s8x32s32s")
_ENTRY = struct.Struct("<Q16s")
_KEY = 32
_SUM_AT = 40
_NO_SUM = bytes(16)
_NO_PARENT = bytes(_KEY)
_ZEROS = bytes(ALIGN)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4096."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Sizes of a frame in bytes: `pages` pages of `page_bytes` in each of `shards` shards."""

    pages: int
    shards: int
    page_bytes: int
    header_bytes: int = field(init=False, compare=False)
    """Size of the header, a multiple of 4096."""
    shard_bytes: int = field(init=False, compare=False)
    """Size of one shard of the payload."""
    payload_bytes: int = field(init=False, compare=False)
    """Size of the payload without its padding."""
    nbytes: int = field(init=False, compare=False)
    """Size of the whole frame, a multiple of 4096."""

    def __post_init__(self) -> None:
        header = aligned(_FIXED.size + self.pages * (_KEY + _ENTRY.size * self.shards))
        payload = self.shards * self.pages * self.page_bytes
        put = object.__setattr__
        put(self, "header_bytes", header)
        put(self, "shard_bytes", self.pages * self.page_bytes)
        put(self, "payload_bytes", payload)
        put(self, "nbytes", header + aligned(payload))


@lru_cache(maxsize=1024)
def shape(pages: int, shards: int, page_bytes: int) -> FrameShape:
    """The `FrameShape` of those numbers.

    Raises:
        LayoutError: A number is not positive, or the frame would be too large to be handled.
    """
    if min(pages, shards, page_bytes) < 1:
        raise LayoutError(f"a frame needs positive sizes, not pages={pages}, shards={shards}, page_bytes={page_bytes}")
    made = FrameShape(pages, shards, page_bytes)
    if made.header_bytes > MAX_HEADER or made.payload_bytes > MAX_PAYLOAD:
        raise LayoutError(
            f"a chunk of {pages} pages, {shards} shards and {page_bytes} bytes a page is too large: its header may "
            f"have {MAX_HEADER} bytes (has {made.header_bytes}), its payload {MAX_PAYLOAD} (has {made.payload_bytes}); "
            "use a smaller chunk_tokens"
        )
    return made


def seal(frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]) -> None:
    """Write the header and zero the padding of a frame whose payload is in place.

    Reads the whole payload once. `frame` has `form.nbytes` bytes; `pages` are `form.pages` keys of 32 bytes.

    Raises:
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages)
    header = form.header_bytes
    end = header + form.payload_bytes
    frame[end:] = _ZEROS[: form.nbytes - end]
    size = form.page_bytes
    digest = xxhash.xxh3_128_digest
    pack = _ENTRY.pack
    table = b"".join(pack(size, digest(frame[at : at + size])) for at in range(header, end, size))
    head = bytearray(header)
    _FIXED.pack_into(head, 0, *_fixed(form, space, parent, _NO_SUM))
    keys_end = _FIXED.size + _KEY * form.pages
    head[_FIXED.size : keys_end] = b"".join(pages)
    head[keys_end : keys_end + len(table)] = table
    head[_SUM_AT : _SUM_AT + 16] = digest(head)
    frame[:header] = head


def verify(frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]) -> None:
    """Check that a frame is whole and is exactly the chunk that was asked for: every byte of header, payload and
    padding counts.

    Raises:
        FrameError: It is not; the message says what differs.
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages)
    header = form.header_bytes
    head = bytearray(frame[:header])
    found_sum = bytes(head[_SUM_AT : _SUM_AT + 16])
    head[_SUM_AT : _SUM_AT + 16] = _NO_SUM
    digest = xxhash.xxh3_128_digest
    if digest(head) != found_sum:
        raise FrameError("the header is damaged")
    found = _FIXED.unpack_from(head)
    wanted = _fixed(form, space, parent, _NO_SUM)
    if found != wanted:
        raise FrameError(_difference(found, wanted))
    keys_end = _FIXED.size + _KEY * form.pages
    if head[_FIXED.size : keys_end] != b"".join(pages):
        raise FrameError("the frame holds other pages than its key says")
    size = form.page_bytes
    end = header + form.payload_bytes
    table = memoryview(head)[keys_end : keys_end + _ENTRY.size * form.pages * form.shards]
    for number, (length, page_sum) in enumerate(_ENTRY.iter_unpack(table)):
        at = header + number * size
        if length != size or digest(frame[at : at + size]) != page_sum:
            shard, page = divmod(number, form.pages)
            raise FrameError(f"page {page} of shard {shard} is damaged")
    if frame[end:] != _ZEROS[: form.nbytes - end]:
        raise FrameError("the padding is damaged")


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, checked against its own checksum and bounds only."""

    form: FrameShape
    space: bytes
    parent: bytes
    pages: tuple[bytes, ...]


def read_header(frame: memoryview | bytes) -> Header:
    """Read the header of a frame of which nothing is known. `frame` may be cut off behind the header.

    Raises:
        FrameError: It is not a header, is damaged, or is of another version.
    """
    if len(frame) < _FIXED.size:
        raise FrameError(f"a frame has at least {ALIGN} bytes, these are {len(frame)}")
    magic, version, codec, header, payload, shards, pages, size, found_sum, space, parent = _FIXED.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError("not a frame: the magic number is missing")
    if version != VERSION or codec != CODEC_NONE:
        raise FrameError(f"format version {version}, codec {codec} cannot be read by this release")
    if not 0 < header <= min(MAX_HEADER, len(frame)) or min(pages, shards, size) < 1:
        raise FrameError("the header is damaged or cut off")
    form = FrameShape(pages, shards, size)
    if form.header_bytes != header or form.payload_bytes != payload or payload > MAX_PAYLOAD:
        raise FrameError("the header contradicts itself")
    head = bytearray(frame[:header])
    head[_SUM_AT : _SUM_AT + 16] = _NO_SUM
    if xxhash.xxh3_128_digest(head) != found_sum:
        raise FrameError("the header is damaged")
    keys = tuple(bytes(head[at : at + _KEY]) for at in range(_FIXED.size, _FIXED.size + _KEY * pages, _KEY))
    return Header(form, space, b"" if parent == _NO_PARENT else parent, keys)


def _fixed(form: FrameShape, space: bytes, parent: bytes, checksum: bytes) -> tuple[object, ...]:
    return (
        MAGIC,
        VERSION,
        CODEC_NONE,
        form.header_bytes,
        form.payload_bytes,
        form.shards,
        form.pages,
        form.page_bytes,
        checksum,
        space,
        parent or _NO_PARENT,
    )


_FIELDS = (
    "magic number",
    "format version",
    "codec",
    "header size",
    "payload size",
    "number of shards",
    "number of pages",
    "page size",
    "checksum",
    "namespace",
    "parent",
)


def _difference(found: tuple[object, ...], wanted: tuple[object, ...]) -> str:
    names = [name for name, a, b in zip(_FIELDS, found, wanted, strict=True) if a != b]
    return f"the frame is of another {' and '.join(names)} than its key says"


def _check_arguments(frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]) -> None:
    if len(frame) != form.nbytes:
        raise LayoutError(f"the frame's buffer has {len(frame)} bytes, its shape asks for {form.nbytes}")
    if len(space) != _KEY or len(parent) not in (0, _KEY) or len(pages) != form.pages:
        raise LayoutError("a frame needs a space of 32 bytes, a parent of 0 or 32, and one key for each of its pages")
