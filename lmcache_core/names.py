"""Keys and texts as names of files and objects: injective, bounded, and made of `[a-z0-9._/-]` only.

Nothing differs by case alone, so that a file system which ignores case keeps two names apart.
"""

from __future__ import annotations

import hashlib
import re

from lmcache_core.errors import LayoutError
from lmcache_core.protocols import ChunkKey

__all__ = ["MAX_COMPONENT", "object_name", "parse_object_name", "safe_component"]

MAX_COMPONENT = 200
"""Most bytes of a component that `safe_component` makes. File systems take 255; the rest is for suffixes."""

_SHARD = 3
_OBJECT = re.compile(r"([0-9a-f]{64})/([0-9a-f]{3})/(\2[0-9a-f]{61})", re.ASCII)
_UNSAFE = re.compile(rb"^\.|[^a-z0-9.-]")


def object_name(key: ChunkKey) -> str:
    """Path of a chunk, relative: `<space>/<first 3 digits of page>/<page>`, in lower-case hex, 133 bytes.

    A space has 4096 directories, each with a thousand chunks when the space has four million.

    Raises:
        LayoutError: `space` or `page` is not of 32 bytes.
    """
    if len(key.space) != 32 or len(key.page) != 32:
        raise LayoutError(f"a chunk's space and page have 32 bytes each, not {len(key.space)} and {len(key.page)}")
    page = key.page.hex()
    return f"{key.space.hex()}/{page[:_SHARD]}/{page}"


def parse_object_name(name: str) -> ChunkKey:
    """The key whose `object_name` is `name`.

    Raises:
        LayoutError: No key has this name.
    """
    match = _OBJECT.fullmatch(name)
    if match is None:
        raise LayoutError(f"not the name of a chunk: {name[:200]!r}")
    return ChunkKey(bytes.fromhex(match[1]), bytes.fromhex(match[3]))


def safe_component(text: str) -> str:
    """Any text (a tenant, a model) as one component of a path: 1 to `MAX_COMPONENT` bytes, another for each text.

    Lower-case letters, digits, `-` and `.` stay, except for a `.` in front. Every other byte of the UTF-8 text becomes
    `_` and two hex digits, so `Qwen/Qwen3` is `_51wen_2f_51wen3`. Empty text is `_`. What would be too long is cut and
    ends in `_h` and the SHA-256 of the whole text. No escape starts with `_h`, so the forms can't meet.
    """
    raw = text.encode("utf-8", "surrogatepass")
    literal = _UNSAFE.sub(lambda found: b"_%02x" % found[0][0], raw).decode("ascii") or "_"
    if len(literal) <= MAX_COMPONENT:
        return literal
    suffix = "_h" + hashlib.sha256(raw).hexdigest()
    return literal[: MAX_COMPONENT - len(suffix)] + suffix
