"""Two reads of one chunk: the first that has it is used; the slot of the other one is nobody's until it has ended."""

from __future__ import annotations

import pytest

from lmcache_core.index import POOL, TierRules
from lmcache_core.index.decisions import Load, Read
from lmcache_core.index.loading import MUCH, RELEARN, WORTH
from lmcache_core.pace import FEWEST
from lmcache_core.protocols import ReadResult
from tests.index.world import World, prompt

KEYS = prompt(*"abcd")


def world_with_a_read(slots: int = 4) -> tuple[World, Load]:
    """A chunk on two tiers that is being read from the first, with somebody who waits for it."""
    world = World(slots, [TierRules("first"), TierRules("second")])
    world.store(KEYS)
    world.run()
    world.clear(POOL)
    (piece,) = world.find(KEYS).pieces
    load = world.index.load(piece.entry)
    assert load is not None
    assert load.tier == 0
    load.waiters.append(lambda there: world.told.append((load, there)))
    world.take()
    return world, load


def hedged(world: World, load: Load) -> Load:
    assert world.index.overdue(load)
    world.take()
    assert load.twin is not None
    assert load.twin.slot is not load.slot
    assert load.twin.tier == 1
    return load.twin


def finish(world: World, load: Load, failure: object = None) -> None:
    """Carry a read out; its slot is filled as a tier would."""
    world.pending = [each for each in world.pending if not (isinstance(each, Read) and each.load is load)]
    world.carry_out(Read(load), failure)
    world.check_accounts()


def counted(world: World, name: str, label: str) -> float:
    return world.index.counts.get(name, label)


def test_the_second_tier_is_first() -> None:
    world, load = world_with_a_read()
    twin = hedged(world, load)
    finish(world, twin)
    assert world.told == [(load, True)]
    assert world.pages(KEYS, POOL) == 4
    assert twin.entry.slot is twin.slot
    assert load.slot.references == 1, "it is being read into"
    assert (counted(world, "hedged_reads", "first"), counted(world, "won_hedges", "second")) == (1, 1)
    finish(world, load)
    assert load.slot.references == 0
    assert world.pool.slots == 1
    assert world.told == [(load, True)]
    world.find(KEYS)


def test_the_first_tier_is_first_after_all() -> None:
    world, load = world_with_a_read()
    twin = hedged(world, load)
    finish(world, load)
    assert world.told == [(load, True)]
    assert load.entry.slot is load.slot
    assert counted(world, "won_hedges", "second") == 0
    finish(world, twin)
    assert twin.slot.references == 0
    assert world.pool.slots == 1


@pytest.mark.parametrize("failure", [True, ReadResult.MISS, ReadResult.CORRUPT])
def test_one_that_fails_leaves_the_other_to_be_waited_for(failure: object) -> None:
    for first in (True, False):
        world, load = world_with_a_read()
        twin = hedged(world, load)
        finish(world, load if first else twin, failure)
        assert world.told == []
        assert not load.entry.where & (world.index.tiers[0 if first else 1].bit)
        finish(world, twin if first else load)
        assert world.told == [(load, True)]
        assert world.pages(KEYS, POOL) == 4
        assert world.pool.slots == 1


def test_both_fail() -> None:
    world, load = world_with_a_read()
    twin = hedged(world, load)
    finish(world, load, ReadResult.MISS)
    finish(world, twin, ReadResult.MISS)
    assert world.told == [(load, False)]
    assert world.pool.slots == 0
    assert world.entries() == []


def test_a_deadline_ends_the_waiting_for_one_and_not_for_the_other() -> None:
    world, load = world_with_a_read()
    twin = hedged(world, load)
    assert not world.index.gave_up(load)
    assert world.pages(KEYS) == 4, "it is on its way from the second tier"
    finish(world, twin)
    assert world.told == [(load, True)]
    assert counted(world, "late_reads", "first") == 1
    finish(world, load)
    assert world.pool.slots == 1


def test_both_are_too_late() -> None:
    world, load = world_with_a_read()
    twin = hedged(world, load)
    assert not world.index.gave_up(load)
    assert world.index.gave_up(twin)
    assert world.pages(KEYS) == 0
    finish(world, load)
    assert world.pages(KEYS, POOL) == 0, "its slot is not what anybody waits for"
    finish(world, twin)
    assert world.pages(KEYS, POOL) == 4, "late and right"
    assert world.pool.slots == 1


def test_a_tier_that_goes_down_drops_its_read_alone() -> None:
    for first in (True, False):
        world, load = world_with_a_read()
        twin = hedged(world, load)
        dropped, other = (load, twin) if first else (twin, load)
        world.index.set_up(world.index.tiers[dropped.tier], False)
        world.pending = [each for each in world.pending if not (isinstance(each, Read) and each.load is dropped)]
        world.index.dropped(dropped)
        world.check_accounts()
        finish(world, other)
        assert world.told == [(load, True)]


def test_what_is_cleared_meanwhile_stays_away_whoever_is_first() -> None:
    for first in (True, False):
        world, load = world_with_a_read()
        twin = hedged(world, load)
        world.clear(-1)
        world.take()
        one, other = (load, twin) if first else (twin, load)
        finish(world, one)
        finish(world, other)
        world.run()
        assert world.told == [(load, False)]
        assert world.entries() == []
        assert world.pool.slots == 0


def test_there_is_no_second_read_without_room_or_another_tier_and_never_a_third() -> None:
    world, load = world_with_a_read(slots=1)
    assert not world.index.overdue(load)
    finish(world, load)
    assert world.told == [(load, True)]
    world, load = world_with_a_read()
    twin = hedged(world, load)
    assert not world.index.overdue(load)
    assert not world.index.overdue(twin)
    world, load = world_with_a_read()
    world.index.lose(world.index.tiers[1], load.entry, delete=False)
    assert not world.index.overdue(load)
    assert counted(world, "hedged_reads", "first") == 0


# Which tier is read


def paced(world: World, tier: int, seconds: float) -> None:
    for _ in range(FEWEST):
        world.index.measured(world.index.tiers[tier], world.chunk_bytes, seconds)


def source(world: World) -> int:
    world.clear(POOL)
    (piece,) = world.find(KEYS).pieces
    load = world.index.load(piece.entry)
    assert load is not None
    world.take()
    tier = load.tier
    world.run()
    return tier


def test_a_tier_in_front_that_is_known_to_be_much_slower_is_passed_over_until_it_is_tried_again() -> None:
    world = World(4, [TierRules("first"), TierRules("second")])
    world.store(KEYS)
    world.run()
    assert source(world) == 0
    paced(world, 0, 1.0)
    assert source(world) == 0, "of the second nothing is known"
    paced(world, 1, 1.0 / MUCH)
    assert source(world) == 0, "not much slower"
    paced(world, 1, 0.1)
    for _ in range(20):
        paced(world, 1, 0.1)
    assert source(world) == 1
    assert counted(world, "overtaking_reads", "second") == 1
    world.now += RELEARN + 0.1
    assert source(world) == 0
    paced(world, 0, 1.0)
    assert source(world) == 1


def test_a_tier_that_nobody_has_read_is_tried_where_the_one_in_front_is_not_what_it_was() -> None:
    world = World(4, [TierRules("first"), TierRules("second")])
    world.store(KEYS)
    world.run()
    for _ in range(20):
        paced(world, 0, 0.02)
    assert source(world) == 0, "as fast as ever"
    paced(world, 0, 0.5)
    assert source(world) == 1
    paced(world, 1, 0.6)
    assert source(world) == 0, "tried, and no better"


def test_little_time_is_not_worth_it() -> None:
    world = World(4, [TierRules("first"), TierRules("second")])
    world.store(KEYS)
    world.run()
    paced(world, 0, WORTH / 2)
    paced(world, 1, WORTH / 2 / MUCH / 2)
    assert source(world) == 0


def test_patience_is_what_a_read_hardly_ever_takes() -> None:
    world = World(4, [TierRules("first")])
    tier = world.index.tiers[0]
    assert world.index.patience(tier, world.chunk_bytes) is None
    paced(world, 0, 0.05)
    longest = tier.pace.longest(world.chunk_bytes)
    assert longest is not None
    assert world.index.patience(tier, world.chunk_bytes) == longest > 0.05
    for _ in range(100):
        paced(world, 0, WORTH / 1000)
    assert world.index.patience(tier, world.chunk_bytes) == WORTH
