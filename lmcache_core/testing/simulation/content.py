"""What engines compute: prompts that share beginnings, and pages whose bytes follow from their key."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

from lmcache_core.client import Part
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace

__all__ = ["CHUNK_BYTES", "CHUNK_PAGES", "PAGE_TOKENS", "keys", "namespace", "page", "part_bytes", "payload", "prompt"]

PAGE_TOKENS = 16
CHUNK_PAGES = 4
PAGE_BYTES = 128
CHUNK_BYTES = 8192
"""A frame of this size has a page of header and a page of payload."""

PROMPTS = (
    *("aaaa", "aaaaaa", "aaaaaaaa", "aaaab", "aabbbb", "aaaaaaabbbbb"),
    *("bbbb", "bbbbb", "ccccccccc", "dddd", "eeeee"),
)
"""Some share beginnings, end inside chunks, and fork inside and between them."""


def prompt(rng: random.Random) -> list[bytes]:
    """Keys of a prompt: few prompts, so that engines meet."""
    return keys(rng.choice(PROMPTS))


@lru_cache(maxsize=4096)
def _keys(text: str) -> tuple[bytes, ...]:
    made: list[bytes] = []
    for letter in text:
        made.append(hashlib.sha256((made[-1] if made else b"") + letter.encode()).digest())
    return tuple(made)


def keys(text: str) -> list[bytes]:
    """Keys of a prompt's pages; each letter is a page, whose key stands for all before it too."""
    return list(_keys(text))


@lru_cache(maxsize=65536)
def page(space: bytes, key: bytes, shard: int) -> bytes:
    """The bytes that a page must have, in the group of that space."""
    return hashlib.shake_128(space + key + bytes([shard])).digest(PAGE_BYTES)


def part_bytes(space: bytes, keys: list[bytes], part: Part, shard: int) -> bytes:
    """The bytes of a part of a prompt."""
    return b"".join([page(space, key, shard) for key in keys[part.first : part.first + part.pages]])


@lru_cache(maxsize=4096)
def payload(space: bytes, pages: tuple[bytes, ...], shards: int) -> bytes:
    """The payload that a chunk must have."""
    return b"".join([page(space, key, shard) for shard in range(shards) for key in pages])


@lru_cache(maxsize=64)
def namespace(kinds: str, shards: int, weights: str = "model") -> Namespace:
    """One group a letter: `f`ull, `w`indow of two pages, `s`tate."""
    groups = tuple(
        Group(
            kind={"f": GroupKind.FULL, "w": GroupKind.WINDOW, "s": GroupKind.STATE}[kind],
            layers=(2 * number, 2 * number + 1),
            page_layer_bytes=PAGE_BYTES // 2,
            dtype="uint8",
            kv_heads=1,
            head_size=2,
            window_tokens=2 * PAGE_TOKENS if kind == "w" else None,
        )
        for number, kind in enumerate(kinds)
    )
    return Namespace(
        weights=weights,
        groups=groups,
        page_tokens=PAGE_TOKENS,
        encoding=Encoding(layout="canonical"),
        shards=shards,
        model_name=weights,
    )
