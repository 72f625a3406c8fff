"""Which page boundaries of a prompt can be restored, and which chunks a store must keep so that they can.

The layers of a model fall into cache groups with different needs. To go on after page b,

- `full` attention needs all pages [0, b),
- a sliding `window` of w tokens needs the pages that cover the last w tokens before the boundary,
- a recurrent `state` needs the snapshot taken exactly at b.

A prompt is restored to the largest b that every group can be restored to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lmcache_core.namespace import GroupKind


def window_start(boundary: int, window_pages: int) -> int:
    """First page that a window of `window_pages` pages needs at `boundary`."""
    return max(0, boundary - window_pages)


def restorable(
    limit: int, windows: Iterable[tuple[int, Sequence[bool]]] = (), states: Iterable[Collection[int]] = ()
) -> int:
    """The largest boundary up to `limit` (where all full groups end) that every other group can be restored to.

    Args:
        limit: Pages that every full group holds from the start.
        windows: For each window group its pages per window, and for each page whether it is held.
        states: For each state group the boundaries (1 and up) at which it has a snapshot.
    """
    runs = [(size, _run_lengths(held[:limit])) for size, held in windows]
    snapshots = list(states)
    for boundary in range(limit, 0, -1):
        if all(run[boundary - 1] >= min(size, boundary) for size, run in runs) and all(
            boundary in held for held in snapshots
        ):
            return boundary
    return 0


def _run_lengths(held: Sequence[bool]) -> list[int]:
    lengths = []
    length = 0
    for present in held:
        length = length + 1 if present else 0
        lengths.append(length)
    return lengths


def stops(pages: int, page_tokens: int, retention_tokens: int, extra: Iterable[int] = ()) -> list[int]:
    """Boundaries (in pages) at which a later prompt can stop: the end, `extra` ones (ends of turns), and every
    `retention_tokens`."""
    step = max(1, retention_tokens // page_tokens)
    wanted = {pages, *range(step, pages, step), *(page for page in extra if 0 < page < pages)}
    return sorted(wanted - {0})


def chunks_to_store(
    kind: GroupKind, pages: int, chunk_pages: int, window_pages: int, at: Sequence[int]
) -> list[tuple[int, int]]:
    """Chunks (first page, number of pages) of a prompt of `pages` pages that a group keeps, in order.

    Args:
        kind: The group's rule.
        pages: Whole pages of the prompt.
        chunk_pages: Pages of a full chunk.
        window_pages: Pages of a window (window groups).
        at: Boundaries at which a later prompt can stop, ascending (window and state groups).
    """
    if kind is GroupKind.STATE:
        return [(boundary - 1, 1) for boundary in at]
    if kind is GroupKind.FULL:
        return [(first, min(chunk_pages, pages - first)) for first in range(0, pages, chunk_pages)]
    wanted: dict[int, int] = {}
    for boundary in at:
        first = window_start(boundary, window_pages) // chunk_pages * chunk_pages
        for start in range(first, boundary, chunk_pages):
            wanted[start] = max(wanted.get(start, 0), min(chunk_pages, boundary - start))
    return sorted(wanted.items())
