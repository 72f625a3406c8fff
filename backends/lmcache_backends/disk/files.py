"""What several modules do with files: open and lengthen them, make their names durable, close them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

__all__ = ["close_quietly", "file_system", "lengthen", "open_file", "sync_directory"]

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL, errno.ENOSYS})


def open_file(path: str, flags: int) -> int:
    """Open a file; anything else that somebody put there (a directory, a link, a FIFO) is refused and not waited for.
    Raises `OSError`."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, "is no file", path)
    return fd


def file_system(path: str) -> str:
    """Kind of the file system that `path` is on, or would be made on; empty if this system does not tell."""
    while True:
        try:
            device = os.stat(path).st_dev
            break
        except OSError:
            path, below = os.path.dirname(path), path
            if path == below:
                return ""
    wanted = f"{os.major(device)}:{os.minor(device)}".encode()
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            mount, _, kind = line.partition(b" - ")
            if mount.split()[2] == wanted:
                return kind.split()[0].decode("ascii", "replace")
    return ""


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
