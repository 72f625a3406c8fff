"""What several modules do with files: lengthen them, make their names durable, close them."""

from __future__ import annotations

import contextlib
import errno
import os

__all__ = ["close_quietly", "lengthen", "sync_directory"]

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL, errno.ENOSYS})


def lengthen(fd: int, size: int, target: int) -> None:
    """Give a file of `size` bytes zeros up to `target`, with room of their own where the file system can. Raises
    `OSError`."""
    try:
        os.posix_fallocate(fd, size, target - size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, target)


def sync_directory(path: str) -> None:
    """Wait until the drive knows the names in a directory. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def close_quietly(fd: int) -> None:
    """Close a file if it is open. A drive that fails may say so here: that must not keep what else is to be closed."""
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)
