"""Where the socket of a node is, and whose it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from lmcache_core.config.rules import CONTROLS
from lmcache_core.errors import ConfigError

AUTO = "auto"
LONGEST = 107
"""Bytes of the longest path of a Unix socket on Linux."""
BACKLOG = 128


def socket_path(setting: str) -> str:
    """The path that a setting names: itself, or for `auto` one for this user below the runtime directory.

    Raises:
        ConfigError: It is too long for a socket, or no path.
    """
    if CONTROLS.search(setting):
        raise ConfigError(f"the socket {setting!r} has control characters in its path; write it without them")
    path = runtime_socket("node") if setting == AUTO else os.path.abspath(os.path.expanduser(setting))
    if len(os.fsencode(path)) > LONGEST:
        raise ConfigError(
            f"the socket {path!r} cannot be had: a path of at most {LONGEST} bytes is needed; choose a shorter one"
        )
    return path


def runtime_socket(name: str) -> str:
    """Path of the socket of that name below the runtime directory of this user."""
    return str(_runtime_directory() / f"{name}.sock")


def _runtime_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "lmcache-core"
    return Path("/tmp") / f"lmcache-core-{os.getuid()}"  # checked to be ours before it is used


def remove_stale_sockets(prefix: str) -> None:
    """Remove the sockets below the runtime directory that begin so and whose nodes have died, with their locks."""
    for lock in _runtime_directory().glob(f"{prefix}*.sock.lock"):
        with contextlib.suppress(OSError, ConfigError):  # somebody else is at it, or it is not ours
            Listener.remove(str(lock).removesuffix(".lock"))


class Listener:
    """The listening socket at a path, for its user alone (mode 0600). What a dead node left there is replaced.

    Raises:
        ConfigError: Another node listens there, or the path cannot be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = -1
        try:
            self._take()
            self.socket = self._listen()
        except OSError as error:
            self._unlock()
            if isinstance(error, FileNotFoundError):
                raise ConfigError(
                    f"the socket {path} cannot be made, since {os.path.dirname(os.path.dirname(path))} is not there; "
                    "make that directory, or choose another path"
                ) from error
            raise ConfigError(f"the socket {path} cannot be made: {error.strerror}; choose another one") from error
        except BaseException:  # whatever it is, the next one must be able to try
            self._unlock()
            raise

    @classmethod
    def remove(cls, path: str) -> None:
        """Remove what a dead node left at a path.

        Raises:
            ConfigError: It is alive.
            OSError: It cannot be removed.
        """
        dead = cls.__new__(cls)
        dead.path, dead._lock = path, -1
        dead._take()
        try:
            dead._remove_socket()
        finally:
            dead._unlock()

    @property
    def there(self) -> bool:
        """Whether the path still leads to this socket."""
        try:
            return os.lstat(self.path).st_ino == self._inode
        except OSError:
            return False

    def listen_anew(self) -> None:
        """Make the socket again, after somebody has removed it.

        Raises:
            ConfigError: Another node has the path now.
            OSError: It cannot be made.
        """
        if not self._locked:
            self._unlock()
            self._take()
        before, self.socket = self.socket, self._listen()
        before.close()

    @property
    def _locked(self) -> bool:
        """Whether the file at the lock's path is the one that is locked here."""
        try:
            return self._lock >= 0 and os.path.samestat(os.fstat(self._lock), os.lstat(f"{self.path}.lock"))
        except OSError:
            return False

    def _take(self) -> None:
        """Lock the path."""
        directory = os.path.dirname(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode=0o700)  # one, so that a path that is mistyped makes no tree
        _check_ours(directory)
        while not self._locked:  # whoever had the lock has removed its file just now
            self._unlock()
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
                os.close(self._lock)
                self._lock = -1
                raise ConfigError(
                    f"a node{f' (process {owner})' if owner else ''} is served at {self.path} already; stop it, use it "
                    f"('connect: {self.path}'), or choose another socket"
                ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _listen(self) -> socket.socket:
        self._remove_socket()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                made.bind(self.path)
            finally:
                os.umask(before)
            made.listen(BACKLOG)
            self._inode = os.stat(self.path).st_ino
        except BaseException:  # whatever it is, no socket stays behind
            made.close()
            raise
        return made

    def _remove_socket(self) -> None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"{self.path} is there and is no socket; choose another path")
        if _is_alive(self.path):
            raise ConfigError(
                f"a process listens at {self.path} already: another program, or a node whose lock somebody has "
                "removed; choose another path, or end that process"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # of a node that is dead

    def close(self) -> None:
        """Listen no more, and leave nothing at the path that is ours."""
        self.socket.close()
        if self.there:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._unlock()

    def abandon(self) -> None:
        """Close this process's copies, in a forked child."""
        self.socket.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _unlock(self) -> None:
        if self._lock >= 0:
            if self._locked:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.path}.lock")  # while it is held: who takes it looks whether it is still there
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # also if a child of ours has a copy
            os.close(self._lock)
            self._lock = -1


def _is_alive(path: str) -> bool:
    """Whether a process has the socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it takes nobody now, or is of another kind or user: somebody's in any case
            return True
    return True


def _check_ours(directory: str) -> None:
    """Refuse a directory for all under /tmp that somebody else has made in our name.

    Raises:
        ConfigError: It belongs to another user.
    """
    if os.path.basename(directory) == f"lmcache-core-{os.getuid()}":
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(f"{directory} is not a directory of this user alone (mode 0700); remove it")
