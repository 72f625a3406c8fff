"""What a user may write beside `backend: nfs`."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.units import ByteSize, Duration

__all__ = ["NfsOptions", "Settings"]


class Settings(Protocol):
    """What all of this package needs to know, whichever backend is made of it."""

    @property
    def name(self) -> str:
        """Name of the backend, for errors and threads."""
        ...

    @property
    def capacity(self) -> int | None: ...

    @property
    def ttl(self) -> float | None: ...

    @property
    def sweep_interval(self) -> float: ...

    @property
    def touch_interval(self) -> float: ...

    @property
    def fsync(self) -> bool: ...

    @property
    def direct(self) -> Literal["auto", "always", "never"]: ...

    @property
    def threads(self) -> int: ...

    @property
    def must_be_mounted(self) -> bool: ...

    def directory(self) -> str:
        """The path, absolute."""
        ...


class NfsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a file system that hosts share.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    name: ClassVar[str] = "nfs"

    path: str
    """Directory for the cache on a shared file system, the same one for all hosts. Made if it is not there."""
    capacity: ByteSize | None = None
    """Bytes that all hosts together keep there, about: what was used longest ago is removed when there is more. Write
    the same for all hosts, and less than quota and file system hold. Without it nothing is removed for want of room."""
    ttl: Duration | None = None
    """Time since its last use after which a chunk is removed. Without it age alone removes nothing."""
    sweep_interval: Duration = 300.0
    """Time between two sweeps for `capacity` and `ttl`. Hosts share this work, and sweep sooner where much is
    written."""
    touch_interval: Duration = 3600.0
    """At most once in this time a host notes at a chunk that it was used: the coarser, the less it costs."""
    fsync: bool = False
    """Wait with each write until the data is on the server's stable storage. Slower; without it a server that loses
    power may lose chunks."""
    direct: Literal["auto", "always", "never"] = "auto"
    """Go past the page cache (`O_DIRECT`). `auto` does wherever the file system can, `always` fails where not."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Files that are read, written or looked for at the same time."""
    must_be_mounted: bool = True
    """Refuse `path` while it lies on a file system of this machine alone. So it does when the shared one is not
    mounted, and all would go to the empty mount point. `false` for a local directory."""

    def __post_init__(self) -> None:
        self.directory()
        for name, example in (("ttl", "7d"), ("sweep_interval", "5m"), ("touch_interval", "1h")):
            seconds = getattr(self, name)
            if seconds is not None and seconds < 1:
                leave_out = "leave it out, or " if name == "ttl" else ""
                problem = f"{self.name}: {name} must be 1s or more; {leave_out}write {example}"
                raise InvalidSetting((name,), problem)

    def directory(self) -> str:
        """The path, absolute."""
        name = self.name
        if not self.path:
            raise InvalidSetting(("path",), f"{name}: path is empty; write the directory that shall hold the cache")
        try:
            possible = b"\0" not in os.fsencode(self.path)
        except UnicodeEncodeError:
            possible = False
        if not possible:
            problem = f"{name}: path {self.path!r} has a character that no name of a file can have; write it without"
            raise InvalidSetting(("path",), problem)
        expanded = os.path.expanduser(self.path)
        if ":/" in self.path and not os.path.isabs(expanded):
            problem = (
                f"{name}: path {self.path!r} is an export; mount it, and write the directory that it is mounted at"
            )
            raise InvalidSetting(("path",), problem)
        if not os.path.isabs(expanded):
            raise InvalidSetting(("path",), f"{name}: path {self.path!r} must be absolute; write it from / on")
        directory = os.path.normpath(expanded)
        if directory.strip("/") == "":
            raise InvalidSetting(("path",), f"{name}: path is /; write a directory for the cache alone, as in /mnt/kv")
        return directory

    def paths(self) -> list[str]:
        """The directory, for the check that no two tiers share one."""
        return [self.directory()]
