"""Making room on a tier: a chunk that cannot fit costs nobody anything."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache_core.index import POOL, Entry, Geometry, TierRules, tier_bit
from lmcache_core.index.decisions import Delete, Refusal, Write
from lmcache_core.index.policy import PolicyName
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import WriteResult
from tests.index.world import CHUNK_PAGES, PAGE, World, prompt
from tests.index.world import fill as give_bytes

SMALL = Geometry(GroupKind.FULL, PAGE, 1, CHUNK_PAGES)
LARGE = Geometry(GroupKind.FULL, 20 * PAGE, 1, CHUNK_PAGES)
DISK = tier_bit(0)


def world_of(capacity: int, policy: PolicyName = "lru") -> World:
    return World(200, [TierRules("disk", capacity=capacity, policy=policy)], kinds=[SMALL, LARGE])


def store(world: World, group: int, name: str) -> list[bytes]:
    """Store one chunk of one group."""
    keys = prompt(*name * CHUNK_PAGES)
    plan = world.index.plan_store([world.spaces[group]], keys)
    for reservation in plan.reservations:
        give_bytes(reservation.slot, reservation.entry)
        world.index.filled(plan, reservation)
    world.index.commit(plan)
    world.take()
    return keys


def on_disk(world: World) -> set[bytes]:
    return {entry.key for entry in world.entries() if entry.where & DISK}


def fill(world: World, names: str) -> None:
    for name in names:
        store(world, 0, name)
        for write in [d for d in world.pending if isinstance(d, Write)]:
            assert world.index.wrote(write, WriteResult.STORED)
        world.pending.clear()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_chunk_larger_than_a_tier_is_refused_and_leaves_the_tier_alone(policy: PolicyName) -> None:
    size = World(1).chunk_bytes
    world = world_of(5 * size, policy)
    fill(world, "abcde")
    before, order = on_disk(world), list(world.index.tiers[0].policy.candidates())
    for name in "xyz":
        store(world, 1, name)
    assert world.pending == []
    assert on_disk(world) == before
    assert list(world.index.tiers[0].policy.candidates()) == order
    assert world.index.counts.get("dropped_chunks", Refusal.TIER_FULL.value) == 3
    assert world.index.counts.get("evicted_chunks", "disk") == 0


@given(
    policy=st.sampled_from(["lru", "s3fifo"]),
    chained=st.booleans(),
    room=st.integers(1, 30),
    pinned=st.sets(st.integers(0, 7)),
    leased=st.sets(st.integers(0, 7)),
    needed=st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_room_is_made_wholly_or_nothing_goes(
    policy: PolicyName, chained: bool, room: int, pinned: set[int], leased: set[int], needed: int
) -> None:
    """Against the definition: the room can be had if what may go is worth it; then no more goes than has to, never a
    chunk before those that need it; and if it cannot, all is as it was."""
    size = World(1).chunk_bytes
    world = world_of(room * size, policy)
    names = "abcdefgh"
    if chained:
        world.store(prompt(*[name for name in names for _ in range(CHUNK_PAGES)]))
        world.pending = [d for d in world.pending if not isinstance(d, Write) or d.entry.space is world.spaces[0]]
        world.run()
    else:
        fill(world, names)
    tier = world.index.tiers[0]
    world.clear(-1, [world.spaces[1]])
    mine = [entry for entry in world.spaces[0].chunks.values() if entry.where & DISK]
    world.index.evict([entry for number, entry in enumerate(mine) if number % 3], 1)
    held = [entry for number, entry in enumerate(mine) if number in pinned]
    world.index.pin(held)
    for number in leased & set(range(len(mine))):
        mine[number].leases += 1
    world.take()
    world.pending.clear()
    used, before, order = tier.used, on_disk(world), _peek(world, policy)
    children = {entry.key for entry in mine if entry.key in world.spaces[0].chains}
    evicted: list[object] = []
    new = Entry(world.spaces[0], (b"n" * 32,), b"", size)
    made = not world.index._make_room(tier, needed * size, evicted, new)  # type: ignore[arg-type]
    if made:
        assert used - tier.used >= needed * size
        assert used - tier.used < (needed + 1) * size, "more went than had to"
        gone = before - on_disk(world)
        assert len(evicted) == len(gone)
        for entry in mine:
            if entry.key not in gone and entry.where == DISK and entry.parent:
                assert entry.parent not in gone or any(e.where for e in world.spaces[0].holding(entry.parent))
    else:
        assert (evicted, tier.used, on_disk(world)) == ([], used, before)
        assert children == {entry.key for entry in mine if entry.key in world.spaces[0].chains}
        assert sorted(_peek(world, policy), key=id) == sorted(order, key=id)
        if policy == "lru" and not (chained or pinned or leased):
            assert _peek(world, policy) == order
    assert not any(entry.key not in on_disk(world) for entry in held)
    free = [e for e in mine if not e.pins and not (e.leases and not e.where & 1)]
    if not chained:
        assert made == (needed * size <= len(free) * size and needed * size <= used)
    for entry in world.entries():
        entry.leases = 0


def _peek(world: World, policy: PolicyName) -> list[object]:
    order = world.spaces[0].owner.shares[1].order
    if policy == "lru":
        return list(order._order)  # type: ignore[attr-defined]
    return [*order._small, *order._main]  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_pinned_chunks_that_leave_too_little_room_cost_the_others_nothing(policy: PolicyName) -> None:
    size = World(1).chunk_bytes
    world = world_of(25 * size, policy)
    fill(world, "abcdefgh" + "ijklmnop" + "qrstuvwxy")
    world.index.pin(entry for entry in world.spaces[0].chunks.values() if entry.key != prompt(*"a" * 4)[-1])
    before = on_disk(world)
    assert len(before) == 25
    store(world, 1, "z")
    assert [d for d in world.pending if isinstance(d, Write | Delete)] == []
    assert on_disk(world) == before


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_store_that_the_pool_has_no_room_for_evicts_nothing(policy: PolicyName) -> None:
    """Most of the pool is leased; what is not is less than the large chunk needs."""
    world = World(30, policy=policy, kinds=[SMALL, LARGE])
    for name in "abcdefghijklmnopqrstuvwxyz0123":
        store(world, 0, name)
    leased = [
        world.index.lease(world.index.find(world.spaces[:1], prompt(*name * CHUNK_PAGES))) for name in "klmnopqrst"
    ]
    before = {entry.key for entry in world.entries() if entry.where & POOL}
    assert len(before) == 30
    leased += [
        world.index.lease(world.index.find(world.spaces[:1], prompt(*name * CHUNK_PAGES))) for name in "uvwxyz0123"
    ]
    plan = world.index.plan_store(world.spaces[1:], prompt(*"#" * CHUNK_PAGES))
    assert (plan.reservations, plan.dropped) == ([], CHUNK_PAGES)
    assert {entry.key for entry in world.entries() if entry.where & POOL} == before
    assert world.index.counts.get("evicted_chunks", "cpu") == 0
    for lease in leased:
        world.index.release(lease)
    plan = world.index.plan_store(world.spaces[1:], prompt(*"#" * CHUNK_PAGES))
    assert (len(plan.reservations), plan.dropped) == (1, 0)
    gone = before - {entry.key for entry in world.entries() if entry.where & POOL}
    assert len(gone) == -(-world.spaces[1].form(CHUNK_PAGES).nbytes // world.chunk_bytes)
    for reservation in plan.reservations:
        world.index.abort(reservation)
    world.check_accounts()


def test_a_chain_gives_way_to_a_large_chunk_from_its_tail() -> None:
    world = World(30, kinds=[SMALL, LARGE])
    keys = prompt(*[f"{number}" for number in range(30 * CHUNK_PAGES)])
    plan = world.index.plan_store(world.spaces[:1], keys)
    for reservation in plan.reservations:
        give_bytes(reservation.slot, reservation.entry)
        world.index.filled(plan, reservation)
    assert len(world.index.commit(plan)) == 30
    large = world.index.plan_store(world.spaces[1:], prompt(*"#" * CHUNK_PAGES))
    assert len(large.reservations) == 1
    needed = -(-world.spaces[1].form(CHUNK_PAGES).nbytes // world.chunk_bytes)
    assert world.index.find(world.spaces[:1], keys).pages == (30 - needed) * CHUNK_PAGES


def test_a_tier_whose_capacity_shrinks_lets_go_of_what_it_can() -> None:
    """Unlike a chunk, a smaller capacity is met as far as it can be, a bounded number of chunks a tick."""
    size = World(1).chunk_bytes
    world = world_of(8 * size)
    fill(world, "abcdefgh")
    tier = world.index.tiers[0]
    world.index.pin(entry for entry in world.spaces[0].chunks.values() if entry.key == prompt(*"b" * 4)[-1])
    tier.capacity = size // 2
    world.index.tick()
    world.take()
    assert on_disk(world) == {prompt(*"b" * 4)[-1]}
    assert sum(len(d.keys) for d in world.pending if isinstance(d, Delete)) == 7


@pytest.mark.parametrize("cleared", [False, True])
def test_what_was_cleared_while_it_was_written_goes_though_its_next_write_finds_no_room(cleared: bool) -> None:
    world = world_of(10 * PAGE * CHUNK_PAGES)
    store(world, 0, "a")
    world.clear()
    store(world, 0, "a")
    first, second = [decision for decision in world.pending if isinstance(decision, Write)]
    world.pending.clear()
    world.carry_out(first)
    if cleared:
        world.clear()
    world.carry_out(second, WriteResult.FULL)
    for again in [decision for decision in world.pending if isinstance(decision, Write)]:
        world.pending.remove(again)
        world.carry_out(again, WriteResult.FULL)
    world.run()
    assert not world.media[0]
    assert not on_disk(world)
