"""Advisory locks on files (`flock`): the kernel drops them when their process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref

from lmcache_backends.disk.files import close_quietly, open_file

__all__ = ["WAIT", "FileLock", "Locked", "is_locked", "lock_text", "locked_files"]

Locked = frozenset[tuple[int, int, int]]
"""Files that somebody has locked: major and minor number of the file system's device, and inode."""

WAIT = 10.0
"""Seconds to wait for a lock that is held for moments only, so whoever has it longer is stopped or hung."""
_POLL = 0.002

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock that is held, until `release`. Two of one process exclude each other as those of two processes do."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    @classmethod
    def attempt(cls, path: str) -> FileLock | None:
        """Take the lock; None if somebody has it. Creates the file.

        Raises:
            OSError: It cannot be opened.
        """
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:  # whatever it was, the descriptor must not stay open
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def wait(cls, path: str, seconds: float) -> FileLock:
        """Take the lock as soon as it is free, within `seconds`.

        Raises:
            OSError: It cannot be opened, or nobody let go of it (ETIMEDOUT).
        """
        end = time.monotonic() + seconds
        while (lock := cls.attempt(path)) is None:
            if time.monotonic() > end:
                problem = f"locked for {seconds:g} s" if seconds else "still locked"
                raise OSError(errno.ETIMEDOUT, f"{os.path.basename(path)} is {problem}", path)
            time.sleep(_POLL)
        return lock

    def label(self, text: str) -> None:
        """Write who the owner is into the file."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode("ascii"), 0)

    def release(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _held.discard(self)
            close_quietly(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_text(path: str) -> str:
    """What a lock's file says about its owner; empty if nothing.

    Raises:
        OSError: It cannot be read.
    """
    fd = open_file(path, os.O_RDONLY)
    try:
        return os.pread(fd, 256, 0).decode("ascii", "replace")
    finally:
        os.close(fd)


def locked_files() -> Locked | None:
    """All files with a lock, without taking one; None if this system does not tell."""
    try:
        with open("/proc/locks", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    names = [words[5].split(":") for words in lines if len(words) > 5 and words[1] == "FLOCK"]
    return frozenset((int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in names)


def is_locked(path: str, locked: Locked) -> bool | None:
    """Whether the file at `path` is one of these; None if this system does not tell.

    Raises:
        OSError: It cannot be opened.
    """
    fd = open_file(path, os.O_RDONLY)
    try:
        inode = os.fstat(fd).st_ino
        # Not st_dev: each subvolume of btrfs has one of its own, which is not the one that locks are listed under.
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            mount = dict(line.split(":", 1) for line in file)["mnt_id"].strip()
        with open("/proc/self/mountinfo", "rb") as mounts:
            device = next(words[2] for words in map(bytes.split, mounts) if words[0] == mount.encode())
    except (FileNotFoundError, KeyError, StopIteration):
        return None
    finally:
        os.close(fd)
    major, minor = device.split(b":")
    return (int(major), int(minor), inode) in locked


def _release_in_child() -> None:
    """A forked child shares the lock; closing its copy leaves it to the parent, so that it ends with the parent."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
