"""Names of objects: of chunks, of the manifests of spaces, and of what is asked for to see whether we may.

Made of `[a-z0-9./-]` behind the user's prefix, which every server and every signature takes as it is. A chunk's name
starts with its space and three digits of its page, so that a service that splits a bucket by prefixes has where to.
"""

from __future__ import annotations

import re

from lmcache_core.errors import LayoutError
from lmcache_core.names import object_name, parse_object_name
from lmcache_core.protocols import ChunkKey

__all__ = ["Names"]

_MANIFEST = re.compile(r"([0-9a-f]{64})\.json")


class Names:
    """Names below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.manifests = f"{prefix}manifests/"
        """What the names of manifests begin with."""
        self.absent = f"{prefix}probe/absent"
        """An object that nobody writes: that it is missing can be told only to whom may read."""
        self.prefix = prefix
        """What all names begin with."""

    def chunk(self, key: ChunkKey) -> str:
        """The object that holds a chunk."""
        return self.prefix + object_name(key)

    def key_of(self, name: str) -> ChunkKey | None:
        """The chunk that an object holds, None if it is none of ours."""
        if not name.startswith(self.prefix):
            return None
        try:
            return parse_object_name(name.removeprefix(self.prefix))
        except LayoutError:
            return None

    def manifest(self, space: bytes) -> str:
        """The object that describes a space."""
        return f"{self.manifests}{space.hex()}.json"

    def space_of(self, name: str) -> bytes | None:
        """The space that an object describes, None if it is none of ours."""
        match = _MANIFEST.fullmatch(name.removeprefix(self.manifests))
        return bytes.fromhex(match[1]) if match and name.startswith(self.manifests) else None
