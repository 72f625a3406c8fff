"""Which chunks need which, against sets; and that nothing is walked again and again: steps are counted, not time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache_core.index import Entry, Geometry, Space, TierRules, tier_bit
from lmcache_core.index.chains import Table
from lmcache_core.index.policy import PolicyName
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ChunkKey, Stored
from tests.index.world import PAGE, World, key, prompt

GEOMETRY = Geometry(GroupKind.FULL, PAGE, 1, 1)


class Tree:
    """Chunks of a space, and the same as plain sets."""

    def __init__(self) -> None:
        self.space = Space(b"s" * 32, GEOMETRY)
        self.known: dict[int, Entry] = {}
        self.parents: dict[int, int | None] = {}

    def add(self, number: int, parent: int | None) -> None:
        if number not in self.known:
            front = b"" if parent is None else key(str(parent))
            self.known[number] = entry = Entry(self.space, (key(str(number)),), front, 1)
            self.parents[number] = parent
            self.space.enter(entry)
            self.space.chains.adopt(entry)

    def remove(self, number: int) -> None:
        if number in self.known:
            self.space.leave(self.known.pop(number))
            del self.parents[number]

    def children(self, number: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == number]

    def behind(self, number: int) -> set[int]:
        found, todo = set(), [number]
        while todo:
            for child in self.children(todo.pop()):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    def leaf(self, number: int) -> int:
        found = self.space.chains.leaf(self.known[number])
        return next(each for each, entry in self.known.items() if entry is found)

    def check(self) -> None:
        for number, entry in self.known.items():
            assert (entry.key in self.space.chains) == bool(self.children(number))


@given(
    steps=st.lists(st.tuples(st.sampled_from(["add", "add", "add", "remove", "evict", "leaf"]), st.integers(0, 30))),
    spread=st.integers(1, 4),
)
@settings(max_examples=500, deadline=None)
def test_a_leaf_is_needed_by_none(steps: list[tuple[str, int]], spread: int) -> None:
    """A tree in which chunk n needs chunk (n - 1) // spread; added and removed in any order, inner ones too."""
    tree = Tree()
    whole = True
    for what, number in steps:
        if what == "add":
            tree.add(number, (number - 1) // spread if number else None)
        elif what == "remove":
            whole &= not (number in tree.known and tree.children(number))
            tree.remove(number)
        elif number in tree.known:
            leaf = tree.leaf(number)
            assert tree.children(leaf) == []
            if whole:
                assert leaf == number or leaf in tree.behind(number)
            if what == "evict":
                tree.remove(leaf)
        tree.check()
    for number in list(tree.known):
        tree.remove(number)
    assert len(tree.space.chains) == 0


ORDERS: dict[str, Callable[[int], Sequence[int]]] = {
    "head first": range,
    "tail first": lambda count: range(count - 1, -1, -1),
    "shuffled": lambda count: random.Random(0).sample(range(count), count),
    "odd ones first": lambda count: [*range(1, count, 2), *range(0, count, 2)],
    "halves in turns": lambda count: [number // 2 + number % 2 * (count // 2) for number in range(count)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_long_chain_is_not_walked_at_each_eviction(order: str) -> None:
    count = 3000
    tree = Tree()
    for number in ORDERS[order](count):
        tree.add(number, number - 1 if number else None)
    for number in reversed(range(count)):
        leaf = tree.space.chains.leaf(tree.known[0])
        assert leaf is tree.known[number]
        tree.remove(number)
    assert tree.space.chains.steps <= 4 * count, "steps from chunk to chunk, to add and evict them all"


def test_forks_are_not_walked_at_each_eviction() -> None:
    """A stem with a branch at each of its chunks; every leaf is looked for from the head."""
    count = 1500
    tree = Tree()
    for number in range(count):
        tree.add(number, number - 1 if number else None)
    for number in range(count):
        tree.add(count + number, number)
    numbers = {entry.key: number for number, entry in tree.known.items()}
    for _ in range(2 * count):
        leaf = tree.space.chains.leaf(tree.known[0])
        tree.remove(numbers[leaf.key])
    assert not tree.known
    assert tree.space.chains.steps <= 8 * count


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_tier_full_of_one_chain_makes_room_in_steps_that_do_not_grow_with_it(policy: PolicyName) -> None:
    """As a scan reports it with the head as the least recently used, the worst there is."""
    count, stores = 4000, 500
    size = Space(b"", GEOMETRY).form(1).nbytes
    world = World(8, [TierRules("disk", capacity=count * size, policy=policy)], kinds=[GEOMETRY])
    keys = prompt(*map(str, range(count)))
    space = world.spaces[0]
    world.index.scanned(
        world.index.tiers[0],
        [
            Stored(ChunkKey(space.digest, page), (page,), size, keys[number - 1] if number else b"")
            for number, page in enumerate(keys)
        ],
    )
    for number in range(stores):
        world.store([key(f"new {number}")])
        world.run()
    assert space.chains.steps <= 4 * stores
    assert world.index.counts.get("evicted_chunks", "disk") == stores
    held = [page in space.chunks and bool(space.chunks[page].where & tier_bit(0)) for page in keys]
    assert world.pages(keys) == sum(held) == held.index(False), (
        "tails have gone, and no chunk is without those it needs"
    )


def test_a_page_that_many_chunks_hold_costs_no_more_than_one() -> None:
    """Chunks that fork in their last page share the pages before it; the first of them have been evicted since."""
    table = Table()
    space = Space(b"s" * 32, GEOMETRY)
    entries = [Entry(space, (key(str(number)),), b"", 1) for number in range(2000)]
    for entry in entries:
        table.add(b"shared", entry)
    for entry in entries[:-1]:
        assert table.first(b"shared") is entry
        assert table.discard(b"shared", entry)
        assert not table.discard(b"shared", entry)
    assert list(table.of(b"shared")) == entries[-1:]
    assert table.discard(b"shared", entries[-1])
    assert (len(table), table.first(b"shared"), list(table.of(b"shared"))) == (0, None, [])


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_a_table_is_sets_of_entries(steps: list[tuple[bool, int, int]]) -> None:
    space = Space(b"s" * 32, GEOMETRY)
    entries = [Entry(space, (key(str(number)),), b"", 1) for number in range(6)]
    table = Table()
    model: dict[bytes, list[Entry]] = {bytes([name]): [] for name in range(4)}
    for add, name, number in steps:
        held, entry = model[bytes([name])], entries[number]
        if add:
            table.add(bytes([name]), entry)
            if entry not in held:
                held.append(entry)
        else:
            assert table.discard(bytes([name]), entry) == (entry in held)
            if entry in held:
                held.remove(entry)
        for key_, expected in model.items():
            assert list(table.of(key_)) == expected
            assert table.first(key_) is (expected[0] if expected else None)
            assert (key_ in table) == bool(expected)
