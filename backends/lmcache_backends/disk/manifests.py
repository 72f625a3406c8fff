"""Readable descriptions of spaces, a small JSON file each, shared by all owners of a path. Raises `OSError`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets

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
    os.makedirs(directory, mode=0o700, exist_ok=True)
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
    except FileNotFoundError:
        return 0
    for name in left:
        os.unlink(os.path.join(directory, name))
    return len(left)


def read_manifests(root: str) -> dict[bytes, bytes]:
    """All descriptions below `root`."""
    directory = os.path.join(root, DIRECTORY)
    found: dict[bytes, bytes] = {}
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return found
    for name in sorted(names):
        if match := _NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, name), "rb") as file:
                content = file.read(_LARGEST + 1)
                if len(content) <= _LARGEST:
                    found[bytes.fromhex(match[1])] = content
    return found
