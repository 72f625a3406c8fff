"""A store that is under way: what is filled can be read and is on its way to tiers, and stays until the store ends."""

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.index import POOL, TierRules
from lmcache_core.index.decisions import Write
from tests.index.world import CHUNK_PAGES, World, prompt

LONG = prompt(*"abcdefghijkl")  # three chunks
OTHER = prompt(*"mnop")


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_chunk_is_readable_and_written_before_those_behind_it_are_filled(policy: str) -> None:
    world = World(4, [TierRules("disk")], policy=policy)
    world.run()
    plan = world.index.plan_store(world.spaces, LONG)
    assert world.pages(LONG) == 0
    for number, reservation in enumerate(plan.reservations, 1):
        world.fill(plan, reservation)
        world.take()
        assert world.pages(LONG) == 4 * number
        assert [type(decision) for decision in world.pending] == [Write] * number
    assert [entry.key for entry in world.index.commit(plan)] == [LONG[3], LONG[7], LONG[11]]
    world.take()
    assert len(world.pending) == 3
    world.run()
    assert world.index.arrived(plan)
    world.check_accounts()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_it_stays_until_the_store_has_ended(policy: str) -> None:
    world = World(3, policy=policy)
    plan = world.index.plan_store(world.spaces, LONG)
    world.fill(plan, plan.reservations[0])
    assert world.store(OTHER).dropped == 4
    assert world.pages(LONG) == 4
    for reservation in plan.reservations[1:]:
        world.fill(plan, reservation)
    world.index.commit(plan)
    assert world.store(OTHER).dropped == 0
    assert world.pages(LONG) == 8, "the tail has gone, not the head"
    world.check_accounts()


def test_what_is_not_filled_is_given_back_and_what_was_published_stays() -> None:
    world = World(4)
    plan = world.index.plan_store(world.spaces, LONG)
    world.fill(plan, plan.reservations[0])
    with pytest.raises(UsageError, match="reported twice"):
        world.index.filled(plan, plan.reservations[0])
    assert [entry.key for entry in world.index.commit(plan)] == [LONG[3]]
    assert world.pool.slots == 1


def test_a_chunk_that_is_cleared_meanwhile_is_gone() -> None:
    world = World(3)
    plan = world.index.plan_store(world.spaces, LONG)
    world.fill(plan, plan.reservations[0])
    world.clear(-1)
    world.index.commit(plan)
    assert world.pages(LONG) == 0
    world.clear(-1)
    assert world.pool.slots == 0
    world.check_accounts()


def test_a_chunk_that_has_become_readable_meanwhile_stays_as_it_is() -> None:
    """It left the pool while it was being written, and is stored again before that has ended."""
    world = World(4, [TierRules("disk")])
    keys = prompt(*"abcd")
    world.store(keys)
    (first,) = world.entries()
    world.index.evict([first], POOL)
    plan = world.index.plan_store(world.spaces, keys)
    (again,) = plan.reservations
    world.run()
    world.index.pin(piece.entry for piece in world.find(keys).pieces)
    lease = world.index.lease(world.find(keys))
    world.fill(plan, again)
    assert world.index.commit(plan) == []
    assert (plan.present, again.published, world.pool.slots) == (CHUNK_PAGES, False, 0)
    assert [piece.entry for piece in world.find(keys).pieces] == [first]
    assert first.pins == first.leases == 1
    assert world.index.arrived(plan)
    world.index.release(lease)
    world.check_accounts()
