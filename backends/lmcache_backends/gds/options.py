"""What a user may write beside `backend: gds`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lmcache_backends.nfs.options import NfsOptions

__all__ = ["Compat", "GdsOptions"]

Compat = Literal["auto", "always", "never"]


class GdsOptions(NfsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of files that KvikIO moves.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    name: ClassVar[str] = "gds"
    one_per_process: ClassVar[tuple[str, ...]] = ("compat",)

    path: str
    """Directory for the cache on a local drive or a shared file system, the same one for all hosts that share it. Made
    if it is not there."""
    must_be_mounted: bool = False
    """Refuse `path` while it lies on a file system of this machine alone, as it does when a shared one is not mounted.
    For shared file systems."""
    compat: Compat = "auto"
    """KvikIO's compatibility mode, in which bytes of a device pass through host memory. `auto` does without wherever
    cuFile works, `never` refuses to start where it does not, `always` leaves cuFile alone."""
    host_memory: Literal["plain", "kvikio"] = "plain"
    """What moves bytes between files and host memory: plain reads and writes on threads of this tier, or KvikIO on
    its own, which all of the process share."""
    trust: bool = False
    """Believe what went between a file and a device's memory. Without it each page is copied back to host memory and
    its checksum compared."""
