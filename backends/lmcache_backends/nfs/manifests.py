"""Readable descriptions of spaces, a small JSON file each, for people. Blocks, and raises `OSError`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat

from lmcache_backends.nfs.directory import FILE_MODE, make_below, open_below
from lmcache_backends.nfs.naming import MANIFESTS, Maker

__all__ = ["read_manifests", "write_manifest"]

_NAME = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)
_LARGEST = 1 << 20
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ODD = frozenset({errno.ENOENT, errno.ESTALE, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO})
"""Errors of a file that has gone, or that is none of ours: it is passed over."""


def write_manifest(root: int, maker: Maker, space: bytes, manifest: bytes) -> None:
    """Keep `manifest` for `space`. Every host says the same of a space: it is written once."""
    name = f"{MANIFESTS}/{space.hex()}.json"
    with contextlib.suppress(OSError):
        if _read(root, name) == manifest:
            return
    make_below(root, MANIFESTS)
    temporary = maker.temporary(name)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, FILE_MODE, dir_fd=root)
        with os.fdopen(fd, "wb") as file:
            file.write(manifest)
        os.rename(temporary, name, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=root)
        raise


def read_manifests(root: int) -> dict[bytes, bytes]:
    """All descriptions."""
    try:
        fd = open_below(root, MANIFESTS)
    except FileNotFoundError:
        return {}
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    found: dict[bytes, bytes] = {}
    for name in sorted(names):
        if match := _NAME.fullmatch(name):
            try:
                content = _read(root, f"{MANIFESTS}/{name}")
            except OSError as error:
                if error.errno not in _ODD:
                    raise
                continue
            if len(content) <= _LARGEST:
                found[bytes.fromhex(match[1])] = content
    return found


def _read(root: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=root)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with os.fdopen(fd, "rb") as file:
        return file.read(_LARGEST + 1)
