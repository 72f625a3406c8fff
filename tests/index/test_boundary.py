"""What a hybrid model can be restored to, against the definition spelled out page by page."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from lmcache_core.index import Geometry
from lmcache_core.index.boundary import chunks_to_store, restorable, stops
from lmcache_core.namespace import GroupKind
from tests.index.world import CHUNK_PAGES, PAGE, World, prompt

FULL = Geometry(GroupKind.FULL, PAGE, 1, CHUNK_PAGES)
STATE = Geometry(GroupKind.STATE, PAGE, 1, 1)


def window(pages: int) -> Geometry:
    return Geometry(GroupKind.WINDOW, PAGE, 1, CHUNK_PAGES, window_pages=pages)


def brute_force(pages: int, full: int, windows: list[tuple[int, list[bool]]], states: list[set[int]]) -> int:
    """The definition: the largest boundary for which every group has what it needs, looked at page by page."""
    possible = [0]
    for boundary in range(1, pages + 1):
        needs_full = all(page < full for page in range(boundary))
        needs_window = all(held[page] for size, held in windows for page in range(boundary) if page >= boundary - size)
        needs_state = all(boundary in held for held in states)
        if needs_full and needs_window and needs_state:
            possible.append(boundary)
    return max(possible)


@given(
    pages=st.integers(0, 24),
    data=st.data(),
    sizes=st.lists(st.integers(1, 8), max_size=3),
    snapshots=st.integers(0, 2),
)
@settings(max_examples=400)
def test_the_boundary_is_the_brute_force_one(pages: int, data: st.DataObject, sizes: list[int], snapshots: int) -> None:
    full = data.draw(st.integers(0, pages))
    windows = [(size, data.draw(st.lists(st.booleans(), min_size=pages, max_size=pages))) for size in sizes]
    states = [data.draw(st.sets(st.integers(1, max(1, pages)))) for _ in range(snapshots)]
    assert restorable(full, windows, states) == brute_force(pages, full, windows, states)


@given(
    kinds=st.lists(st.sampled_from(["full", "w1", "w2", "w3", "w6", "state"]), min_size=1, max_size=4, unique=True),
    stored=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    evicted=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 14))),
    pages=st.integers(1, 16),
)
@settings(max_examples=300, deadline=None)
def test_a_lookup_answers_with_what_every_group_holds(
    kinds: list[str], stored: list[int], evicted: set[tuple[int, int]], pages: int
) -> None:
    """Random groups, random prefixes stored, random chunks evicted: the boundary and its pieces against brute force."""
    groups = [FULL if k == "full" else STATE if k == "state" else window(int(k[1:])) for k in kinds]
    world = World(64, kinds=groups)
    keys = prompt(*[str(number) for number in range(16)])
    for length in stored:
        world.store(keys[:length])
    for group, page in evicted:
        if group < len(groups):
            entries = [e for e in world.spaces[group].chunks.values() if keys[page] in e.pages]
            world.index.evict(entries, -1)
    wanted = keys[:pages]
    held = [_pages_held(world, group, wanted) for group in range(len(groups))]
    full = min([_leading(held[g]) for g, k in enumerate(groups) if k.kind is GroupKind.FULL], default=pages)
    windows = [(k.window_pages, held[g]) for g, k in enumerate(groups) if k.kind is GroupKind.WINDOW]
    states = [
        {n + 1 for n, has in enumerate(held[g]) if has} for g, k in enumerate(groups) if k.kind is GroupKind.STATE
    ]
    expected = brute_force(pages, full, windows, states)
    found = world.find(wanted)
    assert found.pages == expected
    for group, geometry in enumerate(groups):
        covered = {
            page
            for piece in found.pieces
            if piece.group == group
            for page in range(piece.first, piece.first + piece.pages)
        }
        assert covered <= set(range(expected))
        if not expected:
            assert not covered
        elif geometry.kind is GroupKind.FULL:
            assert covered == set(range(expected))
        elif geometry.kind is GroupKind.WINDOW:
            assert covered >= set(range(max(0, expected - geometry.window_pages), expected))
        else:
            assert covered == {expected - 1}


def _pages_held(world: World, group: int, keys: list[bytes]) -> list[bool]:
    """Pages of a group that a readable chunk holds which starts where a window starts."""
    geometry = world.index.spaces[world.spaces[group].digest].geometry
    assert geometry is not None
    held = [False] * len(keys)
    for entry in world.spaces[group].chunks.values():
        for first in range(0, len(keys), geometry.chunk_pages):
            if entry.pages[0] == keys[first]:
                for offset, page in enumerate(entry.pages):
                    if first + offset < len(keys) and page == keys[first + offset]:
                        held[first + offset] = True
    return held


def _leading(held: list[bool]) -> int:
    return held.index(False) if False in held else len(held)


def test_a_window_group_alone_keeps_only_what_a_later_prompt_can_need() -> None:
    assert chunks_to_store(GroupKind.WINDOW, 20, 4, 3, [20]) == [(16, 4)]
    assert chunks_to_store(GroupKind.WINDOW, 18, 4, 3, [18]) == [(12, 4), (16, 2)]
    assert chunks_to_store(GroupKind.WINDOW, 18, 4, 3, [7, 18]) == [(4, 3), (12, 4), (16, 2)]
    assert chunks_to_store(GroupKind.STATE, 18, 1, 0, [7, 18]) == [(6, 1), (17, 1)]
    assert chunks_to_store(GroupKind.FULL, 10, 4, 0, [7, 10]) == [(0, 4), (4, 4), (8, 2)]


def test_stops_are_the_end_the_turns_and_every_retention_distance() -> None:
    assert stops(100, 64, 4096, [10, 40]) == [10, 40, 64, 100]
    assert stops(10, 64, 4096) == [10]
    assert stops(0, 64, 4096) == []
    assert stops(3, 4096, 1024) == [1, 2, 3]


@given(pages=st.integers(1, 40), size=st.integers(1, 6), wide=st.integers(1, 12), data=st.data())
def test_what_is_stored_for_a_window_covers_every_stop(pages: int, size: int, wide: int, data: st.DataObject) -> None:
    at = sorted(data.draw(st.sets(st.integers(1, pages), min_size=1)))
    covered = set()
    for first, length in chunks_to_store(GroupKind.WINDOW, pages, size, wide, at):
        assert first % size == 0
        assert 1 <= length <= size
        covered |= set(range(first, first + length))
    for boundary in at:
        assert set(range(max(0, boundary - wide), boundary)) <= covered
