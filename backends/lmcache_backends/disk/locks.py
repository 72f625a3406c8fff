"""Advisory locks on files (`flock`): the kernel drops them when their process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref

__all__ = ["FileLock", "lock_text"]

_WAIT = 10.0
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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def wait(cls, path: str) -> FileLock:
        """Take the lock as soon as it is free, within ten seconds.

        Raises:
            OSError: It cannot be opened, or nobody let go of it (ETIMEDOUT).
        """
        end = time.monotonic() + _WAIT
        while (lock := cls.attempt(path)) is None:
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, f"locked for {_WAIT:g} s", path)
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
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_text(path: str) -> str:
    """What a lock's file says about its owner; empty if nothing.

    Raises:
        OSError: It cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.pread(fd, 256, 0).decode("ascii", "replace")
    finally:
        os.close(fd)


def _release_in_child() -> None:
    """A forked child shares the lock; closing its copy leaves it to the parent, so that it ends with the parent."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
