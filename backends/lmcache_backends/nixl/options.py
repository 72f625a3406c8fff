"""What a user may write beside `backend: nixl`."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

import msgspec

from lmcache_core.config import InvalidSetting

__all__ = ["NixlOptions"]

_PLUGIN = re.compile(r"[A-Z][A-Z0-9_]{0,31}", re.ASCII)


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of files that NIXL moves.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    path: str
    """Directory for the cache, the same one for all hosts that share it. Made if it is not there."""
    plugin: str = "POSIX"
    """Plugin of NIXL that moves the bytes: one that can do files and host memory, such as `POSIX` or `GDS_MT`."""
    parameters: dict[str, str] = {}
    """Parameters of the plugin, such as `{use_uring: "true"}`."""
    direct: Literal["auto", "never"] = "auto"
    """Go past the page cache (`O_DIRECT`), wherever the file system can."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Files that are read, written or looked for at the same time."""

    def __post_init__(self) -> None:
        self.directory()
        if not _PLUGIN.fullmatch(self.plugin):
            problem = f"nixl: plugin {self.plugin!r} is no name of a plugin; write it as in POSIX"
            raise InvalidSetting(("plugin",), problem)

    def directory(self) -> str:
        """The path, absolute."""
        if not self.path or "\0" in self.path:
            raise InvalidSetting(("path",), f"nixl: path {self.path!r} is no directory; write one for the cache alone")
        expanded = os.path.expanduser(self.path)
        if not os.path.isabs(expanded):
            raise InvalidSetting(("path",), f"nixl: path {self.path!r} must be absolute; write it from / on")
        directory = os.path.normpath(expanded)
        if not directory.strip("/"):
            raise InvalidSetting(("path",), "nixl: path is /; write a directory for the cache alone, as in /mnt/kv")
        return directory

    def paths(self) -> list[str]:
        """The directory, for the check that no two tiers share one."""
        return [self.directory()]
