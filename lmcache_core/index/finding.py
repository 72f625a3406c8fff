"""Looking a prompt up: the longest prefix that all cache groups can be restored to, and the chunks it takes."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.index.boundary import restorable, window_start
from lmcache_core.index.decisions import Found, Piece
from lmcache_core.index.entries import Space
from lmcache_core.namespace import GroupKind


def find(spaces: Sequence[Space], keys: Sequence[bytes], readable: int) -> Found:
    """What can be restored of a prompt. Changes nothing.

    Args:
        spaces: The groups of a namespace, in order.
        keys: Keys of the prompt's whole pages.
        readable: Mask of the places to look in.
    """
    kinds = [space.kind for space in spaces]
    if kinds == [GroupKind.FULL]:
        return _prefix(spaces[0], 0, keys, readable)
    full = [_prefix(space, group, keys, readable) for group, space in enumerate(spaces) if space.kind is GroupKind.FULL]
    limit = min((found.pages for found in full), default=len(keys))
    head = keys[:limit]
    windows = [
        (space.known.window_pages, _held(space, head, readable)) for space in spaces if space.kind is GroupKind.WINDOW
    ]
    states = [
        {number + 1 for number in range(limit) if space.run(head, number, readable)}
        for space in spaces
        if space.kind is GroupKind.STATE
    ]
    boundary = restorable(limit, windows, states)
    pieces: list[Piece] = []
    for group, space in enumerate(spaces):
        pieces += _pieces(space, group, keys[:boundary], readable)
    return Found(boundary, pieces)


def _prefix(space: Space, group: int, keys: Sequence[bytes], readable: int) -> Found:
    pieces: list[Piece] = []
    step, chunks, count = space.known.chunk_pages, space.chunks, len(keys)
    first = 0
    while first < count:
        full = first + step
        entry = chunks.get(keys[full - 1]) if full <= count else None
        if entry is not None and entry.where & readable and entry.load is None and len(entry.pages) == step:
            pieces.append(Piece(group, entry, first, step))  # as `run` would find, several times as fast
            first = full
            continue
        found = space.run(keys, first, readable)
        if found is None:
            break
        pieces.append(Piece(group, found[0], first, found[1]))
        first += found[1]
        if found[1] < step:
            break
    return Found(first, pieces)


def _held(space: Space, keys: Sequence[bytes], readable: int) -> list[bool]:
    held = [False] * len(keys)
    for first in range(0, len(keys), space.known.chunk_pages):
        found = space.run(keys, first, readable)
        if found is not None:
            held[first : first + found[1]] = [True] * found[1]
    return held


def _pieces(space: Space, group: int, keys: Sequence[bytes], readable: int) -> list[Piece]:
    """What a group needs to be restored to the end of `keys`, given that it can be."""
    geometry = space.known
    if not keys:
        return []
    first = 0
    if geometry.kind is GroupKind.STATE:
        first = len(keys) - 1
    elif geometry.kind is GroupKind.WINDOW:
        first = window_start(len(keys), geometry.window_pages) // geometry.chunk_pages * geometry.chunk_pages
    pieces = []
    while first < len(keys):
        found = space.run(keys, first, readable)
        assert found is not None, "a boundary that a group does not reach"
        pieces.append(Piece(group, found[0], first, found[1]))
        first += found[1]
    return pieces
