"""Errors of the operating system as `BackendError`: what failed where, and what to do."""

from __future__ import annotations

import errno

from lmcache_core.errors import BackendError

__all__ = ["FULL", "ODD", "failed"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean that there is no room, which is an outcome and no failure."""
ODD = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM})
"""Errors of a file that is none of ours: somebody put it there, or changed whose it is."""

_IN_THE_WAY = "something that is no file is in the way; remove it or choose another path"
_GONE = "it was removed or unmounted; put it back, the tier tries again by itself"
_ADVICE = {
    errno.EROFS: "the file system is read-only; look for errors of the drive in dmesg, then remount it",
    errno.ENOENT: _GONE,
    errno.ESTALE: _GONE,
    errno.ENODEV: _GONE,
    errno.ENOTDIR: "something that is no directory is in the way; remove it or choose another path",
    errno.EISDIR: _IN_THE_WAY,
    errno.ENXIO: _IN_THE_WAY,
    errno.EACCES: "let this user write there, or choose another path",
    errno.EPERM: "let this user write there, or choose another path",
    errno.ELOOP: "a symbolic link is in the way; remove it or choose another path",
    errno.EIO: "the drive reports an error; look in dmesg, replace it or choose another path",
    errno.EMFILE: "this process has too many files open; raise `ulimit -n` or choose larger segments",
    errno.ENFILE: "this host has too many files open; raise fs.file-max",
    errno.ENOSPC: "the file system is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.EINVAL: "the file system refuses O_DIRECT; set `direct: auto`",
    errno.ETIMEDOUT: "another process holds this lock; see who with `fuser`",
}


def failed(error: OSError, path: str, *, looking: bool = False) -> BackendError:
    """The error to raise for `error`, met while working on `path`, or only `looking` at it."""
    if error.errno in ODD and isinstance(error.filename, str):
        path = error.filename
    advice = _ADVICE.get(error.errno or 0, "look in dmesg, or choose another path")
    if looking and error.errno in (errno.EACCES, errno.EPERM):
        advice = "run this as the user that the engine runs as, or as root"
    return BackendError(f"disk: {path}: {error.strerror or error}; {advice}")
