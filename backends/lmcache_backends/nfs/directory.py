"""The cache's directory, held open.

All names are looked up below its descriptor and not below its path: if the file system is unmounted while the cache is
in use, nothing goes to the empty mount point that is left.
"""

from __future__ import annotations

import contextlib
import errno
import os

from lmcache_backends.nfs.errors import NAMES_GONE
from lmcache_backends.nfs.mounts import is_of_one_machine, mount_of
from lmcache_core.config import InvalidSetting
from lmcache_core.errors import BackendError

__all__ = ["DIRECTORY_MODE", "FILE_MODE", "is_removed", "make_below", "names_below", "open_below", "open_root"]

DIRECTORY_MODE, FILE_MODE = 0o770, 0o660
"""For this user and its group, less what the umask takes away: KV is as confidential as the prompts."""

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_root(path: str, must_be_mounted: bool, name: str = "nfs", *, make: bool = True) -> int:
    """Open the directory; if it is missing, `make` it. Raises `OSError`, `BackendError` if it is not on a shared file
    system now or is missing, and `InvalidSetting` if it can never be a directory."""
    missing: list[str] = []
    at = path
    while True:
        try:
            fd = os.open(at, _OPEN)
            break
        except FileNotFoundError:
            missing.append(os.path.basename(at))
            at = os.path.dirname(at)
        except NotADirectoryError:
            problem = f"{name}: path {path} leads to or through a file; write a directory, or remove that file"
            raise InvalidSetting(("path",), problem) from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                problem = f"{name}: path {path} is too long for a file system; write a shorter one"
                raise InvalidSetting(("path",), problem) from None
            raise
    try:
        if must_be_mounted:
            _check_mount(path, fd, name)
        if missing and not make:
            raise BackendError(
                f"{name}: {path} is not there for this process, which reads beside its node; mount it here too, at the "
                "same path"
            )
        for part in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another host was faster
                os.mkdir(part, DIRECTORY_MODE, dir_fd=fd)
            below = os.open(part, _OPEN, dir_fd=fd)
            os.close(fd)
            fd = below
    except BaseException:  # whatever it was, the descriptor must not stay open
        os.close(fd)
        raise
    return fd


def _check_mount(path: str, fd: int, name: str) -> None:
    mount = mount_of(fd)
    if mount is not None and is_of_one_machine(mount):
        raise BackendError(
            f"{name}: {path}: nothing shared is mounted there; it is on {mount.kind}, which is mounted at "
            f"{mount.point} and which no other host sees. Mount the shared file system, the tier tries again by "
            "itself; to use a local directory all the same, set `must_be_mounted: false`"
        )


def open_below(root: int, name: str) -> int:
    """Open a directory below. Raises `OSError`."""
    return os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=root)


def names_below(root: int, name: str) -> list[str]:
    """What lies in a directory below; nothing if there is none, or another host has just removed it. Raises
    `OSError`."""
    try:
        fd = open_below(root, name or ".")
    except OSError as error:
        if error.errno not in (*NAMES_GONE, errno.ELOOP):
            raise
        return []
    try:
        return os.listdir(fd)
    except OSError as error:
        if error.errno not in NAMES_GONE:
            raise
        return []
    finally:
        os.close(fd)


def make_below(root: int, name: str) -> None:
    """Make a directory below and those that lead to it, unless they are there. Raises `OSError`."""
    done = ""
    for part in name.split("/"):
        done = f"{done}/{part}" if done else part
        with contextlib.suppress(FileExistsError):
            os.mkdir(done, DIRECTORY_MODE, dir_fd=root)


def is_removed(root: int) -> bool:
    """Whether the directory was removed while it was open. Raises `OSError`."""
    return os.fstat(root).st_nlink == 0
