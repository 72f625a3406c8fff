"""Readable descriptions of spaces, a small JSON file each, shared by all owners of a path. Raises `OSError`.

They are for people: what somebody else put in their place is passed over, and stops nothing but describing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets

from lmcache_backends.disk.faults import ODD
from lmcache_backends.disk.files import open_file

__all__ = ["read_manifests", "remove_temporary", "write_manifest"]

DIRECTORY = "manifests"
_NAME = re.compile(r"([0-9a-f]{64})\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.json\.[0-9a-f]{8}\.tmp")
_LARGEST = 1 << 20


def write_manifest(root: str, space: bytes, manifest: bytes) -> None:
    """Keep `manifest` for `space` below `root`. Under the node's lock."""
    directory = os.path.join(root, DIRECTORY)
    path = os.path.join(directory, f"{space.hex()}.json")
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, "is no directory", directory) from None
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:  # whatever it was, half a file must not stay
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_temporary(root: str) -> int:
    """Remove what a crash left half written, and tell how much that was. Under the node's lock."""
    directory = os.path.join(root, DIRECTORY)
    try:
        left = [name for name in os.listdir(directory) if _TEMPORARY.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    removed = 0
    for name in left:
        with contextlib.suppress(IsADirectoryError):
            os.unlink(os.path.join(directory, name))
            removed += 1
    return removed


def read_manifests(root: str) -> dict[bytes, bytes]:
    """All descriptions below `root`."""
    directory = os.path.join(root, DIRECTORY)
    found: dict[bytes, bytes] = {}
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in sorted(names):
        if match := _NAME.fullmatch(name):
            try:
                fd = open_file(os.path.join(directory, name), os.O_RDONLY)
            except OSError as error:
                if error.errno != errno.ENOENT and error.errno not in ODD:
                    raise
                continue
            with os.fdopen(fd, "rb") as file:
                content = file.read(_LARGEST + 1)
            if len(content) <= _LARGEST:
                found[bytes.fromhex(match[1])] = content
    return found
