"""Errors of the operating system as `BackendError`: what failed where, and what to do."""

from __future__ import annotations

import errno

from lmcache_core.errors import BackendError

__all__ = ["FULL", "GONE", "NAMES_GONE", "NOT_PERMITTED", "failed"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""There is no room, which is an outcome and no failure."""
NOT_PERMITTED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""What need not be done cannot be done here."""
GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""What was there has been removed or replaced on another host meanwhile. Opening it anew tells."""

NAMES_GONE = GONE | {errno.ENOTDIR}
"""The same of what is found by its name in a directory."""

_WRITABLE = "let this user write there, run all engines as one user or one group, or set `write: never`"
_IN_THE_WAY = "something that is none of ours is in the way; remove it, or choose another path"
_REMOVED = "the directory was removed or is no longer exported; put it back, the tier tries again by itself"
_UNREACHABLE = "the server cannot be reached or gave up; see to it and to the mount, the tier tries again by itself"
_ADVICE = {
    errno.EROFS: "the file system is read-only; mount it read-write, or set `write: never`",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.ENOENT: _REMOVED,
    errno.ESTALE: _REMOVED,
    errno.ENODEV: _REMOVED,
    errno.ENOTCONN: "the client of this file system has died; unmount it and mount it again",
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.ENOTEMPTY: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.ELOOP: "a symbolic link is in the way; remove it, or choose another path",
    errno.ENAMETOOLONG: "the path is too long for this file system; choose a shorter one",
    errno.EIO: "the server or the network fails; a `soft` mount gives up early; look in dmesg",
    errno.ETIMEDOUT: _UNREACHABLE,
    errno.EHOSTDOWN: _UNREACHABLE,
    errno.EHOSTUNREACH: _UNREACHABLE,
    errno.ECONNREFUSED: _UNREACHABLE,
    errno.ECONNRESET: _UNREACHABLE,
    errno.EFBIG: "a file may not be that large here; raise `ulimit -f`, or use a smaller chunk_tokens",
    errno.EMFILE: "this process has too many files open; raise `ulimit -n`",
    errno.ENFILE: "this host has too many files open; raise fs.file-max",
    errno.EINVAL: "the file system refuses O_DIRECT; set `direct: auto`",
    errno.ENOSPC: "the file system is full; free some space, or set a smaller `capacity`",
    errno.EDQUOT: "the quota is used up; raise it, or set a smaller `capacity`",
}
_READABLE = "let this user read there: run all engines as one user, or as one group with umask 027"


def failed(error: OSError, path: str, *, reading: bool = False, name: str = "nfs") -> BackendError:
    """The error to raise for `error`, met by the backend `name` while working on `path`."""
    advice = _ADVICE.get(error.errno or 0, "look in dmesg, or choose another path")
    if reading and error.errno in (errno.EACCES, errno.EPERM):
        advice = _READABLE
    return BackendError(f"{name}: {path}: {error.strerror or error}; {advice}")
