"""The framed form of a chunk: what every tier keeps and every reader checks.

A frame is a header of n x 4 KiB and the payload, padded with zeros to 4 KiB, so that a slot of the host pool (which
has room for the header in front) can be written to `O_DIRECT` files and registered memory as it lies.

Header, little endian, all of it covered by the checksum in it::

    0    8  magic "LMCKVFR\\n"
    8    2  format version        10  1  codec        11  1  flags (1: encrypted)
    12   4  header bytes          16  8  payload bytes, uncoded, padding not included
    24   4  shards                28  4  pages
    32   8  bytes of one page of one shard, uncoded
    40  16  xxh3-128 of the header with these 16 bytes zero
    56   8  zero
    64  32  space: digest of namespace and group
    96  32  key of the page in front of the first; zero bytes if there is none
    128 16  id of the key that it is encrypted with; zero bytes if it is not
    144 32  salt of its own key; zero bytes if it is not encrypted
    176 16  zero
    192     page keys, 32 bytes each
    ...     for each shard, for each page: 8 bytes length as stored, 16 bytes xxh3-128 of the stored bytes, or the tag
            of AES-256-GCM
    ...     zero up to the header's end

The payload is `[shard][page][layer][bytes]`; the first k pages of a shard are a prefix of it. In a coded frame the
stored bytes of its pages follow each other in that order. A page is never stored in more bytes than it has, and one
that has as many is stored uncoded; so a coded frame is never larger than the plain one. A compressed page is its blocks
of 256 KiB, each compressed by itself or, where it does not shrink, as it is, one behind the other, and then their
lengths, 4 bytes each. The header's size is the same for all codings.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import xxhash

from lmcache_core.errors import FrameError, LayoutError

ALIGN = 4096
MAGIC = b"LMCKVFR\n"
VERSION = 2
MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 36
KEY_ID = 16
SALT = 32
TAG = 16

_FIXED = struct.Struct("<8sHBBIQIIQ16s8s32s32s16s32s16s")
_ENTRY = struct.Struct("<Q16s")
_KEY = 32
_SUM_AT = 40
_NO_SUM = bytes(16)
_PARENT_AT = 96
_NO_PARENT = bytes(_KEY)
_ENCRYPTED = 1
_ZEROS = bytes(ALIGN)


class Codec(enum.IntEnum):
    """How the bytes of a page are compressed. The names are those of the configuration."""

    NONE = 0
    LZ4 = 1
    """Blocks of LZ4, without their sizes."""
    ZSTD = 2
    """Frames of Zstandard, with their sizes."""


class Coding(NamedTuple):
    """How the payload of a frame is stored."""

    codec: Codec = Codec.NONE
    key_id: bytes = b""
    """Which key it is encrypted with; empty if it is not."""
    salt: bytes = b""
    """What the frame's own key is derived with; empty if it is not encrypted."""

    @property
    def encrypted(self) -> bool:
        """Whether it is encrypted."""
        return bool(self.key_id)


PLAIN = Coding()


class Page(NamedTuple):
    """One page of one shard as it is stored."""

    nbytes: int
    check: bytes
    """xxh3-128 of the stored bytes, or the tag of AES-256-GCM."""


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
    """Write the header and zero the padding of a plain frame whose payload is in place.

    Reads the whole payload once. `frame` has `form.nbytes` bytes; `pages` are `form.pages` keys of 32 bytes.

    Raises:
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages)
    header = form.header_bytes
    end = header + form.payload_bytes
    size = form.page_bytes
    digest = xxhash.xxh3_128_digest
    table = [Page(size, digest(frame[at : at + size])) for at in range(header, end, size)]
    finish(frame, form, space, parent, pages, PLAIN, table)


def finish(
    frame: memoryview,
    form: FrameShape,
    space: bytes,
    parent: bytes,
    pages: Sequence[bytes],
    coding: Coding,
    table: Sequence[Page],
) -> int:
    """Write the header and zero the padding of a frame whose payload is stored in place. Returns its bytes as stored.

    Raises:
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages)
    if len(table) != form.pages * form.shards or any(not 0 < page.nbytes <= form.page_bytes for page in table):
        raise LayoutError("a page is stored in at least one byte, and in no more bytes than it has")
    header = form.header_bytes
    end = header + sum(page.nbytes for page in table)
    nbytes = aligned(end)
    frame[end:nbytes] = _ZEROS[: nbytes - end]
    head = bytearray(header)
    _FIXED.pack_into(head, 0, *_fixed(form, space, parent, coding))
    keys_end = _FIXED.size + _KEY * form.pages
    head[_FIXED.size : keys_end] = b"".join(pages)
    entries = b"".join(_ENTRY.pack(*page) for page in table)
    head[keys_end : keys_end + len(entries)] = entries
    head[_SUM_AT : _SUM_AT + 16] = xxhash.xxh3_128_digest(head)
    frame[:header] = head
    return nbytes


def identity(form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes], coding: Coding) -> bytes:
    """Digest of all that a header says but its checksum and what differs from page to page: what frame it is, and how
    it is coded."""
    fixed = _FIXED.pack(*_fixed(form, space, parent, coding))
    return hashlib.sha256(fixed + b"".join(pages)).digest()


def verify(frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]) -> None:
    """Check that a plain frame is whole and is exactly the chunk that was asked for: every byte of header, payload and
    padding counts.

    Raises:
        FrameError: It is not; the message says what differs.
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages)
    coding, table = verify_header(frame, form, space, parent, pages)
    if coding != PLAIN:
        raise FrameError("the frame is coded")
    _check_pages(frame, form, table)


def verify_stored(frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]) -> Coding:
    """Check what can be checked of a frame of any coding without decoding it: of an encrypted one the header and the
    sizes, of others all. Returns how it is coded.

    Raises:
        FrameError: It is damaged, or not the chunk that was asked for; the message says what differs.
        LayoutError: Sizes of the arguments contradict each other.
    """
    coding, table = verify_header(frame, form, space, parent, pages)
    if coding.encrypted:
        check_size(frame, form, table)
    else:
        _check_pages(frame, form, table)
    return coding


def verify_header(
    frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes]
) -> tuple[Coding, list[Page]]:
    """Check that the header in front of a frame is whole and is that of the chunk that was asked for, in any coding.
    `frame` may be shorter than a plain one. Returns the coding, and what is said of each page of each shard.

    Raises:
        FrameError: It is not; the message says what differs.
        LayoutError: Sizes of the arguments contradict each other.
    """
    _check_arguments(frame, form, space, parent, pages, most=form.nbytes)
    header = form.header_bytes
    head = bytearray(frame[:header])
    if len(head) != header:
        raise FrameError("the frame is cut off")
    found_sum = bytes(head[_SUM_AT : _SUM_AT + 16])
    head[_SUM_AT : _SUM_AT + 16] = _NO_SUM
    if xxhash.xxh3_128_digest(head) != found_sum:
        raise FrameError("the header is damaged")
    found = _FIXED.unpack_from(head)
    coding = _coding(found) or PLAIN
    wanted = _fixed(form, space, parent_of(head, parent), coding)
    if found != wanted:
        raise FrameError(_difference(found, wanted))
    keys_end = _FIXED.size + _KEY * form.pages
    if head[_FIXED.size : keys_end] != b"".join(pages):
        raise FrameError("the frame holds other pages than its key says")
    return coding, _table(head, form, coding)


def parent_of(frame: bytes | bytearray | memoryview, parent: bytes) -> bytes:
    """The parent of the chunk in a frame, of which that one is expected: what the header says where one of both is
    empty. A page's key stands for all pages in front of it, so who stores or asks for a run of pages may leave out what
    is in front of them and means the same chunk."""
    said = bytes(frame[_PARENT_AT : _PARENT_AT + _KEY])
    said = b"" if said == _NO_PARENT or len(said) != _KEY else said
    return parent if said and parent else said


def check_size(frame: memoryview, form: FrameShape, table: Iterable[Page]) -> None:
    """Check that a frame has the bytes that its header says, and zeros behind them.

    Raises:
        FrameError: It has not.
    """
    end = form.header_bytes + sum(page.nbytes for page in table)
    if len(frame) != aligned(end):
        raise FrameError("the frame is cut off" if len(frame) < aligned(end) else "the frame is longer than it says")
    if frame[end:] != _ZEROS[: len(frame) - end]:
        raise FrameError("the padding is damaged")


def damaged(form: FrameShape, number: int) -> FrameError:
    """The error for a page, by its number in the table."""
    shard, page = divmod(number, form.pages)
    return FrameError(f"page {page} of shard {shard} is damaged")


def _check_pages(frame: memoryview, form: FrameShape, table: Sequence[Page]) -> None:
    check_size(frame, form, table)
    at = form.header_bytes
    digest = xxhash.xxh3_128_digest
    for number, (nbytes, page_sum) in enumerate(table):
        if digest(frame[at : at + nbytes]) != page_sum:
            raise damaged(form, number)
        at += nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, checked against its own checksum and bounds only."""

    form: FrameShape
    space: bytes
    parent: bytes
    pages: tuple[bytes, ...]
    coding: Coding = PLAIN
    nbytes: int = 0
    """Bytes of the frame as it is stored."""


def read_header(frame: memoryview | bytes) -> Header:
    """Read the header of a frame of which nothing is known. `frame` may be cut off behind the header.

    Raises:
        FrameError: It is not a header, is damaged, or is of another version.
    """
    if len(frame) < _FIXED.size:
        raise FrameError(f"a frame has at least {ALIGN} bytes, these are {len(frame)}")
    found = _FIXED.unpack_from(frame)
    magic, version, codec, flags, header, payload, shards, pages, size, found_sum, _, space, parent, *_ = found
    if magic != MAGIC:
        raise FrameError("not a frame: the magic number is missing")
    coding = _coding(found)
    if version != VERSION or coding is None:
        raise FrameError(f"format version {version}, codec {codec}, flags {flags} cannot be read by this release")
    if not 0 < header <= min(MAX_HEADER, len(frame)) or min(pages, shards, size) < 1:
        raise FrameError("the header is damaged or cut off")
    form = FrameShape(pages, shards, size)
    if form.header_bytes != header or form.payload_bytes != payload or payload > MAX_PAYLOAD:
        raise FrameError("the header contradicts itself")
    head = bytearray(frame[:header])
    head[_SUM_AT : _SUM_AT + 16] = _NO_SUM
    if xxhash.xxh3_128_digest(head) != found_sum:
        raise FrameError("the header is damaged")
    parent = b"" if parent == _NO_PARENT else parent
    if _FIXED.unpack_from(head) != _fixed(form, space, parent, coding):
        raise FrameError("the header contradicts itself")
    keys = tuple(bytes(head[at : at + _KEY]) for at in range(_FIXED.size, _FIXED.size + _KEY * pages, _KEY))
    nbytes = aligned(header + sum(page.nbytes for page in _table(head, form, coding)))
    return Header(form, space, parent, keys, coding, nbytes)


def _table(head: bytearray, form: FrameShape, coding: Coding) -> list[Page]:
    start = _FIXED.size + _KEY * form.pages
    end = start + _ENTRY.size * form.pages * form.shards
    table = [Page(*entry) for entry in _ENTRY.iter_unpack(memoryview(head)[start:end])]
    size = form.page_bytes
    shortest = 1 if coding.codec else size
    for number, page in enumerate(table):
        if not shortest <= page.nbytes <= size:
            raise damaged(form, number)
    if head.count(0, end) != len(head) - end:
        raise FrameError("the header has something behind its end")
    return table


def _coding(found: tuple[object, ...]) -> Coding | None:
    """The coding that the fixed fields of a header tell; None if there is no such."""
    codec, flags, key_id, salt = found[2], found[3], found[13], found[14]
    if codec not in tuple(Codec) or flags not in (0, _ENCRYPTED):
        return None
    encrypted = flags == _ENCRYPTED
    if encrypted != any(key_id) or encrypted < any(salt):  # type: ignore[arg-type]
        return None
    return Coding(Codec(codec), key_id, salt) if encrypted else Coding(Codec(codec))  # type: ignore[arg-type]


def _fixed(form: FrameShape, space: bytes, parent: bytes, coding: Coding) -> tuple[object, ...]:
    return (
        MAGIC,
        VERSION,
        coding.codec,
        _ENCRYPTED if coding.encrypted else 0,
        form.header_bytes,
        form.payload_bytes,
        form.shards,
        form.pages,
        form.page_bytes,
        _NO_SUM,
        _ZEROS[:8],
        space,
        parent or _NO_PARENT,
        coding.key_id or _ZEROS[:KEY_ID],
        coding.salt or _ZEROS[:SALT],
        _ZEROS[:16],
    )


_FIELDS = (
    "magic number",
    "format version",
    "codec",
    "coding",
    "header size",
    "payload size",
    "number of shards",
    "number of pages",
    "page size",
    "checksum",
    "reserved field",
    "namespace",
    "parent",
    "key",
    "salt",
    "reserved field",
)


def _difference(found: tuple[object, ...], wanted: tuple[object, ...]) -> str:
    names = [name for name, a, b in zip(_FIELDS, found, wanted, strict=True) if a != b]
    return f"the frame is of another {' and '.join(names)} than its key says"


def _check_arguments(
    frame: memoryview, form: FrameShape, space: bytes, parent: bytes, pages: Sequence[bytes], most: int = 0
) -> None:
    if len(frame) > most if most else len(frame) != form.nbytes:
        raise LayoutError(f"the frame's buffer has {len(frame)} bytes, its shape asks for {form.nbytes}")
    if len(space) != _KEY or len(parent) not in (0, _KEY) or len(pages) != form.pages:
        raise LayoutError("a frame needs a space of 32 bytes, a parent of 0 or 32, and one key for each of its pages")
