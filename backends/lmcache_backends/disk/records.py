"""The log's records: their bytes, and how they are found again in a file that may be damaged.

A log begins with 16 bytes that say which format it has:
    "KVLOG\r\n\0", format, crc of both                          8 + 4 + 4 bytes
and goes on with records:
    magic, crc of all that follows, length of the whole         4 + 4 + 4 bytes
    kind, flags, count, segment, offset, nbytes, epoch, check   1 + 1 + 2 + 4 + 8 + 8 + 8 + 4
    put:    space, parent (if flagged), `count` pages           32 each
    evict:  space, last page                                    32 each
    touch:  `count` places (segment, offset / 4096)             4 + 4 each

All numbers little-endian. `epoch` is when a chunk was last used: microseconds since 1970, made to increase strictly.
`check` is the crc of the value's first 4096 bytes, by which a value is known to be the one that was put there, even if
later records are lost: the frames that are stored begin with their keys and checksums.
A record's crc starts from a number that is another in each log, so a copied or forged piece of log is not taken for
one. Another format has another magic, so where the beginning of a log is damaged its records are still told apart.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "EVICT",
    "FORMAT",
    "HEAD",
    "KEY",
    "LARGEST_TOUCH",
    "MOST_PAGES",
    "PARENT",
    "PUT",
    "TOUCH",
    "Reader",
    "evict",
    "format_of",
    "put",
    "put_size",
    "touch",
    "touched",
]

FORMAT = 1
"""Raise it with every change of the records that an older reader would take for something else."""
MAGIC = b"KVL%d" % FORMAT
_HEAD = struct.Struct("<8sII")
_LOG = b"KVLOG\r\n\0"
HEAD = _HEAD.pack(_LOG, FORMAT, zlib.crc32(_LOG + FORMAT.to_bytes(4, "little")))
"""What a log begins with."""
HEADER = struct.Struct("<4sIIBBHIQQQI")
PLACE = struct.Struct("<II")
PUT, EVICT, TOUCH = 1, 2, 3
PARENT = 1
"""Flag of a put: it has a parent."""
KEY = 32
LARGEST_TOUCH = 8192
MOST_PAGES = 0xFFFF
_LARGEST = HEADER.size + KEY * (2 + MOST_PAGES)
_WINDOW = 8 << 20

Record = tuple[int, int, int, int, int, int, int, int, bytes]
"""kind, flags, count, segment, offset, nbytes, epoch, check, what follows the header."""


def _sealed(
    seed: int,
    kind: int,
    flags: int,
    count: int,
    segment: int,
    offset: int,
    nbytes: int,
    epoch: int,
    check: int,
    body: bytes,
) -> bytes:
    header = HEADER.pack(MAGIC, 0, HEADER.size + len(body), kind, flags, count, segment, offset, nbytes, epoch, check)
    checked = header[8:] + body
    return b"".join((MAGIC, zlib.crc32(checked, seed).to_bytes(4, "little"), checked))


def put(
    seed: int,
    segment: int,
    offset: int,
    nbytes: int,
    epoch: int,
    check: int,
    space: bytes,
    chain: bytes,
    rooted: bool,
) -> bytes:
    """A chunk has its value at a place. `chain` is parent and pages one after another, without parent if `rooted`."""
    count = len(chain) // KEY - (not rooted)
    flags = 0 if rooted else PARENT
    return _sealed(seed, PUT, flags, count, segment, offset, nbytes, epoch, check, space + chain)


def put_size(chain: bytes) -> int:
    """Bytes of a put record."""
    return HEADER.size + KEY + len(chain)


def evict(seed: int, segment: int, offset: int, space: bytes, page: bytes) -> bytes:
    """A chunk is gone, and its place is free."""
    return _sealed(seed, EVICT, 0, 0, segment, offset, 0, 0, 0, space + page)


def touch(seed: int, epoch: int, places: Sequence[tuple[int, int]]) -> bytes:
    """The chunks at `places` (segment, unit) were used, at `epoch`, `epoch + 1` and so on; at most LARGEST_TOUCH."""
    body = b"".join([PLACE.pack(*place) for place in places])
    return _sealed(seed, TOUCH, 0, len(places), 0, 0, 0, epoch, 0, body)


def format_of(fd: int) -> int:
    """The format that a log says it has; our own if it says none, as when it is empty or damaged.

    Raises:
        OSError: It cannot be read.
    """
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) == _HEAD.size:
        magic, version, crc = _HEAD.unpack(head)
        if magic == _LOG and zlib.crc32(head[:-4]) == crc:
            return int(version)
    return FORMAT


def touched(body: bytes) -> Iterable[tuple[int, int]]:
    """The places of a touch record."""
    return PLACE.iter_unpack(body)


class Reader:
    """Iterates over the good records of a log file, in order. After a damaged one it goes on at the next good one."""

    def __init__(self, fd: int, seed: int) -> None:
        self._fd = fd
        self._seed = seed
        self.end = 0
        """Offset behind the last good record so far."""
        self.gaps = 0
        """Damaged places with good records behind them."""
        self.torn = False
        """There is something that is no record behind the last good one."""

    def __iter__(self) -> Iterator[Record]:
        """Raises `OSError` if the file cannot be read."""
        unpack, crc32, seed, header = HEADER.unpack_from, zlib.crc32, self._seed, HEADER.size
        gap = dirty = False
        base = self.end = len(HEAD) if os.pread(self._fd, len(HEAD), 0) == HEAD else 0
        while True:
            window = os.pread(self._fd, _WINDOW, base)
            size = len(window)
            last = size < _WINDOW
            at = 0
            while at + header <= size:
                magic, crc, length, kind, flags, count, segment, offset, nbytes, epoch, check = unpack(window, at)
                end = at + length
                if magic == MAGIC and header <= length <= _LARGEST:
                    if end > size and not last:
                        break  # the rest of it is in the next window
                    if end <= size and crc32(window[at + 8 : end], seed) == crc:
                        self.gaps += gap
                        gap = dirty = False
                        self.end = base + end
                        yield kind, flags, count, segment, offset, nbytes, epoch, check, window[at + header : end]
                        at = end
                        continue
                following = window.find(MAGIC, at + 1)
                if following < 0:
                    following = size if last else size - len(MAGIC) + 1
                dirty = dirty or bool(window[at:following].strip(b"\0"))
                gap = True
                at = following
            if last:
                self.torn = dirty or bool(window[at:].strip(b"\0"))
                return
            base += at
            if gap:  # by now so large a one that it may be a hole, and the file be longer than any drive
                following = self._data(base)
                if following < 0:
                    self.torn = dirty
                    return
                base = following

    def _data(self, base: int) -> int:
        """Where bytes follow that may be others than zero; -1 if nowhere."""
        try:
            return os.lseek(self._fd, base, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return -1
            if error.errno == errno.EINVAL:  # the file system cannot tell
                return base
            raise
