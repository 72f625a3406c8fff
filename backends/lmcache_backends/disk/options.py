"""What a user may write beside `backend: disk`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.units import ByteSize, format_size

__all__ = ["UNIT", "DiskOptions"]

UNIT = 4096
"""Bytes: places in a segment start at and are as long as multiples of this, as `O_DIRECT` wants it."""

_SEGMENT = 2**30
_MOST_SEGMENTS = 256
_FEWEST_SEGMENTS = 16


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the local disk.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    path: str | list[str]
    """Directory for the cache, best on a local NVMe drive. Several directories, each on a drive of its own, share the
    chunks between them."""
    capacity: ByteSize
    """Most bytes that all processes of this host together may take there; spread evenly if there are several paths."""
    segment: ByteSize | None = None
    """Size of the files that space is taken and given back in. Default: 1GiB, more or less where the capacity is
    large or small."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """Reads and writes at the same time."""
    fsync: bool = False
    """Survive a power cut, not only a crash of the process: each write waits for the drive. Slower."""
    direct: Literal["auto", "always", "never"] = "auto"
    """Go past the page cache (`O_DIRECT`). `auto` does wherever the file system can, `always` fails where not."""
    min_free: ByteSize | str = "5%"
    """Leave this much of the file system free, in bytes or as a percentage of its size."""

    def __post_init__(self) -> None:
        self.segment_size()
        self.keep_free(0)

    def paths(self) -> list[str]:
        """Absolute paths in order."""
        written = [self.path] if isinstance(self.path, str) else list(self.path)
        if not written or not all(written):
            raise InvalidSetting(("path",), "disk: path is empty; write the directory that shall hold the cache")
        found = [os.path.normpath(os.path.join(os.sep, os.path.expanduser(path))) for path in written]
        for path in written:
            try:
                possible = b"\0" not in os.fsencode(path)
            except UnicodeEncodeError:
                possible = False
            if not possible:
                problem = f"disk: path {path!r} has a character that no name of a file can have; write it without"
                raise InvalidSetting(("path",), problem)
            if not os.path.isabs(os.path.expanduser(path)):
                raise InvalidSetting(("path",), f"disk: path {path!r} must be absolute; write it from / on")
        if len(set(found)) < len(found):
            raise InvalidSetting(("path",), f"disk: path names a directory twice: {', '.join(written)}")
        return found

    def share(self) -> int:
        """Bytes of `capacity` for each path, a multiple of `UNIT`."""
        share = self.capacity // len(self.paths()) // UNIT * UNIT
        if share < UNIT:
            size, least = format_size(self.capacity), format_size(UNIT * len(self.paths()))
            raise InvalidSetting(
                ("capacity",),
                f"disk: capacity {size} holds nothing; the least is {least}, and of use are some GiB, as in 500GiB",
            )
        return share

    def segment_size(self, share: int | None = None) -> int:
        """Usual bytes of a segment, a multiple of `UNIT`: few enough files to keep them all open. `share` is what of a
        path's bytes there can be at most, by default what is configured."""
        share = self.share() if share is None else max(UNIT, share)
        fewest = -(-share // (_MOST_SEGMENTS * UNIT)) * UNIT
        if self.segment is not None:
            wanted = self.segment
            if wanted < UNIT:
                size = format_size(wanted)
                raise InvalidSetting(("segment",), f"disk: segment {size} is too small; leave it out, or write 1GiB")
        else:
            wanted = min(_SEGMENT, share // _FEWEST_SEGMENTS)
            wanted = max(wanted, fewest)
        return max(UNIT, wanted // UNIT * UNIT)

    def keep_free(self, total: int) -> int:
        """Bytes to leave free on a file system of `total` bytes."""
        if isinstance(self.min_free, int):
            return self.min_free
        text = self.min_free.strip()
        try:
            percent = float(text.removesuffix("%"))
        except ValueError:
            percent = -1.0
        if not text.endswith("%") or not 0 <= percent < 100:
            raise InvalidSetting(("min_free",), f"disk: min_free {self.min_free!r} is not possible; write 20GiB or 5%")
        return int(total * percent / 100)
