"""Names below the directory, and whose they are.

`<space>/<3 digits>/<page>` is a chunk. What is not finished lies beside its place under the name `.<page>.<maker>`:
GlusterFS computes from such a name the server of `<page>`, so that the rename moves nothing. A name of another form is
nobody's of us, and is left alone.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket

__all__ = ["MANIFESTS", "SWEEPS", "Maker", "is_chunk", "is_shard", "is_space", "is_temporary"]

MANIFESTS = "manifests"
SWEEPS = "sweeps"

_SPACE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHARD = re.compile(r"[0-9a-f]{3}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}(\.json)?\.[a-z0-9_-]{1,100}", re.ASCII)
_NOT_IN_A_HOST = re.compile(r"[^a-z0-9-]+", re.ASCII)


def is_space(name: str) -> bool:
    """Whether it names the directory of a space."""
    return _SPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether it names a directory of chunks in a space."""
    return _SHARD.fullmatch(name) is not None


def is_chunk(name: str, shard: str) -> bool:
    """Whether it names a chunk in the directory `shard`."""
    return _SPACE.fullmatch(name) is not None and name.startswith(shard)


def is_temporary(name: str) -> bool:
    """Whether a process of ours has not finished it."""
    return _TEMPORARY.fullmatch(name) is not None


class Maker:
    """One opening of the backend: nobody on any host makes the same names."""

    def __init__(self) -> None:
        host = _NOT_IN_A_HOST.sub("-", socket.gethostname().partition(".")[0].lower())[:40].strip("-") or "host"
        self.name = f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
        self._numbers = itertools.count()

    def temporary(self, path: str) -> str:
        """A new name beside `path`, for what shall become it."""
        directory, _, name = path.rpartition("/")
        return f"{directory}/.{name}.{self.name}-{next(self._numbers)}"
