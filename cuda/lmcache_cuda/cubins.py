"""Compiled kernels on the disk, so that a process starts without compiling.

Several processes may use one directory: an entry appears as a whole or not at all, and two that write the same entry
write the same bytes. An entry that is not what it should be is a miss and is written anew. What lies there runs on the
GPU, so a directory that others may write to is not used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["CubinCache", "default_directory"]

_MAGIC = b"lmcubin1"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
_MAX_ENTRY = 16 << 20
_TARGET = re.compile(r"sm_\d{2,3}[a-z]?", re.ASCII)
_log = logging.getLogger(__name__)


def default_directory() -> Path | None:
    """Where entries are kept for this user; None without a home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "lmcache-core" / "cubins"
    try:
        return Path.home() / ".cache" / "lmcache-core" / "cubins"
    except RuntimeError:  # no such user
        return None


class CubinCache:
    """Entries in one directory, or nothing if the directory cannot be used. Never raises for what is on the disk."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory if directory and _usable(directory) else None

    def get(self, target: str, parts: Iterable[str]) -> bytes | None:
        """The cubin for a target, made from these parts (source, options, versions); None if it is not there."""
        if self._directory is None:
            return None
        path = self._path(self._directory, target, parts)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                entry = file.read(_MAX_ENTRY + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        except FileNotFoundError:
            return None
        except OSError as failure:
            _log.warning("compiled kernels %s cannot be read and are compiled again: %s", path, failure)
            return None
        cubin = entry[_HEAD:]
        if len(entry) > _MAX_ENTRY or not cubin or entry[:_HEAD] != _MAGIC + hashlib.sha256(cubin).digest():
            _log.warning("compiled kernels %s are damaged and are compiled again", path)
            return None
        return cubin

    def put(self, target: str, parts: Iterable[str], cubin: bytes) -> None:
        """Keep a cubin. One that cannot be kept is compiled again by the next process."""
        if self._directory is None or not cubin or len(cubin) > _MAX_ENTRY - _HEAD:
            return
        path = self._path(self._directory, target, parts)
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=self._directory)
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            os.replace(temporary, path)
        except OSError as failure:
            _log.warning("compiled kernels cannot be kept as %s: %s", path, failure)
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)

    @staticmethod
    def _path(directory: Path, target: str, parts: Iterable[str]) -> Path:
        if not _TARGET.fullmatch(target):
            raise ValueError(f"{target!r} is not an architecture such as 'sm_90'")
        digest = hashlib.sha256()
        for part in (target, *parts):
            text = part.encode()
            digest.update(len(text).to_bytes(8, "little") + text)
        return directory / f"{target}-{digest.hexdigest()}.cubin"


def _usable(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as failure:
        _log.warning("compiled kernels are not kept: %s", failure)
        return False
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _log.warning("compiled kernels are not kept in %s, which others may write to; chmod go-w it", directory)
        return False
    return True
