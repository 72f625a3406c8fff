"""Encoding and decoding of whole frames. Heavy calls are made per page, or block of one, and let other threads run."""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from lmcache_core import frame
from lmcache_core.coding.codecs import PageCodec, load_codec
from lmcache_core.coding.worth import LEAST_SAVING
from lmcache_core.errors import FrameError
from lmcache_core.frame import Codec, Coding, FrameShape, Page

if TYPE_CHECKING:
    from lmcache_core.coding.cipher import Key, Keyring

__all__ = ["BLOCK", "Encoded", "Subject", "Unreadable", "decode", "encode"]


BLOCK = 256 << 10
"""Bytes that are compressed at once. Results come in memory of their own: from a MiB on that would be fresh memory each
time, whose pages cost more than the codec, and copying it would keep the GIL for long."""
_LENGTH = 4


class Subject(NamedTuple):
    """What chunk a frame is of."""

    form: FrameShape
    space: bytes
    parent: bytes
    pages: Sequence[bytes]


class Encoded(NamedTuple):
    """What came of encoding a frame."""

    nbytes: int
    """Bytes to store; 0 if it is to be stored plain, from where it lies."""
    saving: float | None = None
    """Part of the payload that compressing would save; None if that wasn't tried."""


class Unreadable(enum.Enum):
    """Why a frame that may be whole cannot be read here. The values are names of counters."""

    UNKNOWN_KEY = "unknown_key_chunks"
    NOT_ENCRYPTED = "unencrypted_chunks"
    UNKNOWN_CODEC = "unknown_codec_chunks"
    OTHER_PAGES = "other_chunks"


def encode(plain: memoryview, into: memoryview, subject: Subject, codec: Codec, key: Key | None) -> Encoded:
    """Encode a frame, of which the payload alone must be in place, into a buffer of the same size. What saves less
    than `LEAST_SAVING` is not compressed."""
    form = subject.form
    payload = plain[form.header_bytes : form.header_bytes + form.payload_bytes]
    lengths = [form.page_bytes] * (form.pages * form.shards)
    saving = None
    if codec:
        packed = _compress(payload, into[form.header_bytes :], form.page_bytes, load_codec(codec)())
        saving = 1 - sum(packed) / form.payload_bytes
        if saving >= LEAST_SAVING:
            lengths, payload = packed, into[form.header_bytes :]
        else:
            codec = Codec.NONE
    if key is None and not codec:
        return Encoded(0, saving)
    if key is None:
        coding = Coding(codec)
        table = _digests(payload, lengths)
    else:
        coding = Coding(codec, key.id, os.urandom(frame.SALT))
        cipher = key.frame(coding.salt, frame.identity(*subject, coding))
        table = []
        start = 0
        for number, nbytes in enumerate(lengths):
            stored = into[form.header_bytes + start : form.header_bytes + start + nbytes]
            tag = cipher.encrypt(*divmod(number, form.pages), payload[start : start + nbytes], stored)
            table.append(Page(nbytes, tag))
            start += nbytes
    return Encoded(frame.finish(into, *subject, coding, table), saving)


def _is_another(stored: memoryview, subject: Subject) -> bool:
    """Whether it is a chunk of the same space that ends with the same page, and holds others besides."""
    try:
        header = frame.read_header(stored)
    except FrameError:
        return False
    same = header.space == subject.space and header.pages[-1] == subject.pages[-1]
    return same and len(header.pages) != len(subject.pages)


def decode(buffer: memoryview, nbytes: int, subject: Subject, keys: Keyring | None) -> Unreadable | str:
    """Check a frame of which `nbytes` bytes were read into a buffer of the plain frame's size, and make a plain frame
    of it where it lies. Returns the tenant whose key it was encrypted with, empty for none; or why it cannot be done,
    though the frame may be right.

    Every byte counts. If it is not done the buffer may hold anything.

    Args:
        buffer: The frame.
        nbytes: How much of it.
        subject: What it must be.
        keys: Keys that it may be encrypted with; None if it need not be encrypted.

    Raises:
        FrameError: It is damaged or something else.
    """
    form = subject.form
    stored = buffer[:nbytes]
    try:
        coding, table = frame.verify_header(stored, *subject)
    except FrameError:
        if _is_another(stored, subject):
            return Unreadable.OTHER_PAGES
        raise
    subject = subject._replace(parent=frame.parent_of(stored, subject.parent))
    if keys is not None and not coding.encrypted:
        return Unreadable.NOT_ENCRYPTED
    key = keys.find(coding.key_id) if keys is not None else None
    if coding.encrypted and key is None:
        return Unreadable.UNKNOWN_KEY
    try:
        codec = load_codec(coding.codec)() if coding.codec else None
    except ImportError:
        return Unreadable.UNKNOWN_CODEC
    frame.check_size(stored, form, table)
    cipher = None if key is None else key.frame(coding.salt, frame.identity(*subject, coding))
    end = form.header_bytes + sum(page.nbytes for page in table)
    # From the last page to the first: a page is never stored behind its place, so that none is overwritten unread.
    for number in range(len(table) - 1, -1, -1):
        length, check = table[number]
        place = buffer[end - length : end]
        end -= length
        shard, page = divmod(number, form.pages)
        if not (cipher.decrypt(shard, page, place, check) if cipher else xxhash.xxh3_128_digest(place) == check):
            raise frame.damaged(form, number)
        if codec is not None:
            start = form.header_bytes + number * form.page_bytes
            try:
                _unpack(place, buffer[start : start + form.page_bytes], codec)
            except ValueError:
                raise frame.damaged(form, number) from None
    if coding != frame.PLAIN:
        frame.seal(buffer, *subject)
    return "" if key is None else key.tenant


def _compress(payload: memoryview, into: memoryview, size: int, codec: PageCodec) -> list[int]:
    """Put pages, compressed, behind each other; those that don't shrink as they are. Returns their lengths."""
    lengths = []
    at = 0
    for start in range(0, payload.nbytes, size):
        lengths.append(_pack(payload[start : start + size], into[at:], codec))
        at += lengths[-1]
    return lengths


def _pack(page: memoryview, into: memoryview, codec: PageCodec) -> int:
    size = page.nbytes
    room = size - _LENGTH * -(-size // BLOCK)
    lengths: list[int] = []
    at = 0
    for start in range(0, size, BLOCK):
        block = page[start : start + BLOCK]
        packed: bytes | memoryview = codec.compress(block)
        if len(packed) >= block.nbytes:
            packed = block
        if at + len(packed) >= room:
            _copy(into[:size], page)
            return size
        _copy(into[at : at + len(packed)], packed)
        at += len(packed)
        lengths.append(len(packed))
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    into[at : at + len(table)] = table
    return at + len(table)


def _unpack(place: memoryview, into: memoryview, codec: PageCodec) -> None:
    """Put the page that is stored at a place where it belongs, which may begin at the same byte or behind it.

    Raises:
        ValueError: It is none.
    """
    if place.nbytes == into.nbytes:
        _copy(into, place)
        return
    count = -(-into.nbytes // BLOCK)
    end = place.nbytes - _LENGTH * count
    if end < count:
        raise ValueError("it has no room for its table")
    lengths = struct.unpack(f"<{count}I", place[end:])
    if sum(lengths) != end:
        raise ValueError("its table contradicts its length")
    for number in range(count - 1, -1, -1):  # no block is stored behind its place either
        block = into[number * BLOCK : (number + 1) * BLOCK]
        length = lengths[number]
        if not 0 < length <= block.nbytes:
            raise ValueError("a block is longer than it can be")
        packed = place[end - length : end]
        end -= length
        _copy(block, packed if length == block.nbytes else codec.decompress(packed, block.nbytes))


def _digests(payload: memoryview, lengths: Sequence[int]) -> list[Page]:
    table = []
    start = 0
    for nbytes in lengths:
        table.append(Page(nbytes, xxhash.xxh3_128_digest(payload[start : start + nbytes])))
        start += nbytes
    return table


def _copy(into: memoryview, source: bytes | memoryview) -> None:
    """Copy, also where the two overlap. Unlike an assignment to a slice it lets other threads run."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
