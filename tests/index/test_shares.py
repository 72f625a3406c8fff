"""Room is shared fairly by those who use it: the order against a definition, floods, quotas, and whose a chunk is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache_core.index import POOL, Entry, Geometry, Space, TierRules, residency, tier_bit
from lmcache_core.index.decisions import Refusal, Write
from lmcache_core.index.policy import Lru, PolicyName
from lmcache_core.index.shares import MOST_SKIPPED, Owner, OwnerKind, ShareRules, Shares
from lmcache_core.namespace import GroupKind
from tests.index.world import CHUNK_PAGES, PAGE, World, prompt

DISK = tier_bit(0)
SIZE = World(1).chunk_bytes
FULL = Geometry(GroupKind.FULL, PAGE, 1, CHUNK_PAGES)
POLICIES: list[PolicyName] = ["lru", "s3fifo"]


def due(
    quotas: Mapping[str, int] | None = None, *, tenant: str = "", weight: float = 1.0, model: str = ""
) -> ShareRules:
    """Rules of an owner; quotas in chunks."""
    kind: OwnerKind = "tenant" if tenant else "model"
    return ShareRules(kind, tenant or model, weight, {place: n * SIZE for place, n in (quotas or {}).items()})


def flood(world: World, tenant: str, chunks: int, start: int = 0) -> None:
    """Prompts of a chunk each that were never seen before, and all I/O that comes of it."""
    for number in range(start, start + chunks):
        world.store(chunk_of(tenant, number), tenant=tenant)
        world.run()


def chunk_of(tenant: str, number: int) -> list[bytes]:
    return prompt(f"{tenant} {number}", *"abc")


def held(world: World, tenant: str, place: int = 0) -> int:
    """Chunks that an owner holds."""
    owner = world.index.owners.get(("tenant", tenant)) if tenant else world.spaces[0].owner
    return 0 if owner is None else owner.shares[place].held // SIZE


def refused(world: World, reason: Refusal) -> float:
    return world.index.counts.get("dropped_chunks", reason.value)


# The order


@dataclass
class Modelled:
    """What the definition knows of an owner."""

    owner: Owner
    order: list[Entry] = field(default_factory=list)
    extra: int = 0
    """Bytes that may not leave."""

    def level(self, more: int = 0) -> float:
        held = sum(entry.nbytes for entry in self.order) + self.extra
        return math.inf if self.owner.idle else (held + more) / self.owner.weight


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=20),
    idle=st.sets(st.integers(0, 3)),
    asking=st.none() | st.integers(0, 3),
    more=st.integers(1, 12),
    stay=st.sets(st.integers(0, 20)),
    extra=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_the_order_is_that_of_the_definition(
    weights: list[float],
    sizes: list[tuple[int, int]],
    idle: set[int],
    asking: int | None,
    more: int,
    stay: set[int],
    extra: list[int],
) -> None:
    """Always the owner that holds most for its weight, the one that asks with what it asks for; among equals the one
    that asks; never one that holds less than the one that asks."""
    shares, space = Shares(0, "lru"), Space(b"s" * 32, FULL)
    modelled = []
    for number, weight in enumerate(weights):
        owner = Owner("tenant", str(number), weight)
        owner.used, owner.idle, owner.since = False, number in idle, float(number)
        shares.add_owner(owner)
        owner.shares[0].held = extra[number]
        modelled.append(Modelled(owner, extra=extra[number]))
    for number, (which, nbytes) in enumerate(sizes):
        mine = modelled[which % len(modelled)]
        entry = Entry(space, (b"%032d" % number,), b"", nbytes, mine.owner)
        mine.order.append(entry)
        shares.charge(entry)
        shares.add(entry)
    who = None if asking is None else modelled[asking % len(modelled)]

    expected: list[Entry] = []
    seen: set[Entry] = set()
    while True:
        left = [each for each in modelled if set(each.order) - seen]
        if not left:
            break
        rank = {id(each): (each.level(more if each is who else 0), each is who, -each.owner.since) for each in modelled}
        first = max(left, key=lambda each: rank[id(each)])
        if who is not None and first is not who and rank[id(first)][0] < rank[id(who)][0]:
            break
        entry = next(entry for entry in first.order if entry not in seen)
        expected.append(entry)
        seen.add(entry)
        if len(expected) not in stay:
            first.order.remove(entry)

    offered = []
    for entry in shares.candidates(None if who is None else who.owner, more):
        offered.append(entry)
        if len(offered) not in stay:
            shares.discard(entry)
            entry.owner.shares[0].aside += entry.nbytes
    assert offered == expected


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=100, deadline=None)
def test_one_owner_has_the_order_of_its_policy(seed: int) -> None:
    rng = random.Random(seed)
    shares, plain, space = Shares(0, "lru"), Lru(), Space(b"s" * 32, FULL)
    owner = Owner("model", "m")
    shares.add_owner(owner)
    entries = [Entry(space, (b"%032d" % number,), b"", 1, owner) for number in range(12)]
    for _ in range(60):
        entry = rng.choice(entries)
        verb = rng.choice(["add", "add", "touch", "discard", "defer"])
        if verb != "defer" or entry in list(plain):
            getattr(shares, verb)(entry)
            getattr(plain, verb)(entry)
        assert (list(shares), len(shares)) == (list(plain), len(plain))
        assert list(shares.candidates(owner, 5)) == list(plain.candidates())


def test_what_one_owner_keeps_does_not_end_the_search_for_others() -> None:
    shares, space = Shares(0, "lru"), Space(b"s" * 32, FULL)
    large, small = Owner("tenant", "large"), Owner("tenant", "small")
    for owner, chunks in ((large, 2 * MOST_SKIPPED), (small, 3)):
        shares.add_owner(owner)
        for number in range(chunks):
            entry = Entry(space, (f"{owner.name} {number}".encode(),), b"", 1, owner)
            shares.charge(entry)
            shares.add(entry)
    offered = [entry.owner for entry in shares.candidates(small, 1)]
    assert offered == [large] * (MOST_SKIPPED + 1) + [small] * 3


# Fair parts


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_leaves_the_other_its_half_of_the_pool(policy: PolicyName) -> None:
    world = World(10, policy=policy)
    flood(world, "quiet", 5)
    flood(world, "noisy", 200)
    assert (held(world, "quiet"), held(world, "noisy")) == (5, 5)
    assert all(world.pages(chunk_of("quiet", number)) == CHUNK_PAGES for number in range(5))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_leaves_the_other_its_half_of_a_tier(policy: PolicyName) -> None:
    world = World(2, [TierRules("disk", capacity=10 * SIZE, policy=policy)])
    flood(world, "quiet", 8)
    flood(world, "noisy", 200)
    assert (held(world, "quiet", 1), held(world, "noisy", 1)) == (5, 5)
    assert all(world.pages(chunk_of("quiet", number), DISK) == CHUNK_PAGES for number in range(3, 8))


def test_idle_room_is_anybodys_until_its_owner_wants_it() -> None:
    world = World(10)
    flood(world, "a", 30)
    assert held(world, "a") == 10
    flood(world, "b", 30)
    assert (held(world, "a"), held(world, "b")) == (5, 5)


def test_what_the_small_do_not_want_the_others_share() -> None:
    world = World(12)
    for turn in range(40):
        flood(world, "a", 3, 3 * turn)
        flood(world, "b", 1, turn)
        if turn < 2:
            flood(world, "small", 1, turn)
    assert (held(world, "small"), held(world, "a"), held(world, "b")) == (2, 5, 5)


def test_parts_are_as_weights_say() -> None:
    world = World(12, shares=[due(tenant="a", weight=3)])
    for turn in range(40):
        flood(world, "a", 1, turn)
        flood(world, "b", 3, 3 * turn)
    assert (held(world, "a"), held(world, "b")) == (9, 3)


def test_an_owner_without_a_tenant_is_the_model_with_all_its_groups() -> None:
    groups = [FULL, Geometry(GroupKind.WINDOW, PAGE, 1, CHUNK_PAGES, window_pages=4)]
    world = World(8, kinds=groups)
    other = world.index.add_space(b"o" * 32, FULL, "other")
    flood(world, "", 30)
    mine, world.spaces = world.spaces, [other]
    flood(world, "", 30)
    world.spaces = mine
    assert mine[0].owner is mine[1].owner
    assert [mine[0].owner.shares[0].held, other.owner.shares[0].held] == [4 * SIZE] * 2


def test_more_owners_than_chunks_still_get_their_turn() -> None:
    world = World(3)
    for turn in range(5):
        for number in range(6):
            flood(world, f"t{number}", 1, turn)
            assert held(world, f"t{number}") == 1
            world.index.tick()


def test_pinned_and_leased_chunks_count_and_nobody_else_pays_for_them() -> None:
    world = World(10)
    flood(world, "greedy", 10)
    for number in range(3):
        world.index.pin(piece.entry for piece in world.find(chunk_of("greedy", number)).pieces)
        world.index.lease(world.find(chunk_of("greedy", 3 + number)))
    flood(world, "modest", 10)
    assert (held(world, "greedy"), held(world, "modest")) == (6, 4)
    flood(world, "greedy", 10, 100)
    assert (held(world, "greedy"), held(world, "modest")) == (6, 4)
    assert refused(world, Refusal.POOL_FULL) == 10
    assert all(world.pages(chunk_of("greedy", number)) == CHUNK_PAGES for number in range(6))


def test_a_large_chunk_takes_from_the_largest_one_after_the_other() -> None:
    large = Geometry(GroupKind.FULL, 4 * PAGE, 1, CHUNK_PAGES)
    world = World(20, kinds=[FULL, large])
    small = world.spaces[:1]
    both, world.spaces = world.spaces, small
    flood(world, "a", 11)
    flood(world, "b", 9)
    world.spaces = both
    plan = world.index.plan_store(both[1:], prompt("l", "a", "r", "g"), tenant="c")
    assert len(plan.reservations) == 1
    assert abs(held(world, "a") - held(world, "b")) <= 1
    world.index.abort(plan.reservations[0])
    world.clear(-1, both)


# Those that have left


def test_an_owner_that_uses_nothing_for_long_has_no_part() -> None:
    world = World(10, share_timeout=60.0)
    flood(world, "gone", 5)
    flood(world, "here", 5)
    for _ in range(8):
        world.index.tick()
        world.now += 10.0
        world.index.release(world.index.lease(world.find(chunk_of("here", 4))))
    world.index.tick()
    flood(world, "here", 3, 100)
    assert (held(world, "gone"), held(world, "here")) == (2, 8)
    flood(world, "gone", 1, 50)
    flood(world, "here", 30, 200)
    assert held(world, "gone") == 3
    world.clear(-1)
    world.index.tick()
    assert len(world.index.owners) == 3
    world.index.tick()
    assert list(world.index.owners) == [("model", "")]


def test_tenants_beyond_all_measure_count_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MOST_OWNERS", 3)
    world = World(10)
    for tenant in ("a", "b", "c", "d", "a"):
        flood(world, tenant, 1, 7)
        flood(world, tenant, 1, 8)
    assert [held(world, tenant) for tenant in ("a", "b", "c", "")] == [2, 2, 0, 4]


# Whose a chunk is


def test_the_chunk_that_anothers_needs_becomes_the_others() -> None:
    world = World(6)
    shared = prompt(*"ssss", *"1111")
    world.store(shared[:CHUNK_PAGES], tenant="a")
    flood(world, "a", 4)
    world.store(shared, tenant="b")
    assert (held(world, "a"), held(world, "b")) == (5, 1)
    flood(world, "a", 20, 100)
    assert world.pages(shared) == 2 * CHUNK_PAGES
    assert (held(world, "a"), held(world, "b")) == (4, 2)


def test_a_chunk_becomes_nobodys_beyond_his_quota() -> None:
    world = World(6, shares=[due({"cpu": 1}, tenant="b")])
    shared = prompt(*"ssss", *"1111")
    world.store(shared[:CHUNK_PAGES], tenant="a")
    world.store(shared, tenant="b")
    flood(world, "a", 20, 100)
    assert (held(world, "a"), held(world, "b")) == (5, 1)
    assert world.pages(shared) == 2 * CHUNK_PAGES


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_found_on_a_tier_is_the_models_in_the_order_it_had(policy: PolicyName) -> None:
    groups = [FULL, Geometry(GroupKind.WINDOW, PAGE, 1, CHUNK_PAGES, window_pages=4)]
    rules = [TierRules("disk", capacity=20 * SIZE, policy=policy)]
    world = World(20, rules, kinds=groups)
    flood(world, "", 10)
    found = [stored for stored, _ in world.media[0].values()]
    assert len(found) == 20
    fresh = World(20, rules, kinds=[Geometry(GroupKind.STATE, PAGE, 1, 1)])
    tier = fresh.index.tiers[0]
    fresh.index.spaces.clear()
    fresh.index.scanned(tier, found)
    unclaimed = fresh.index.owners["unclaimed", ""]
    assert unclaimed.shares[1].held == 20 * SIZE
    order = [entry.chunk_key for entry in tier.policy]
    spaces = fresh.index.add_spaces({space.digest: space.known for space in world.spaces}, "m")
    owner = fresh.index.owners["model", "m"]
    assert {space.owner for space in spaces} == {owner}
    assert [entry.chunk_key for entry in owner.shares[1].order] == order == [stored.key for stored in found]
    assert owner.shares[1].held == 20 * SIZE
    assert ("unclaimed", "") not in fresh.index.owners
    assert {entry.owner for space in spaces for entry in space.chunks.values()} == {owner}


# Quotas


@pytest.mark.parametrize("policy", POLICIES)
def test_an_owner_at_its_quota_makes_room_from_its_own(policy: PolicyName) -> None:
    world = World(20, policy=policy, shares=[due({"cpu": 3}, tenant="a")])
    flood(world, "b", 5)
    flood(world, "a", 30)
    assert (held(world, "a"), held(world, "b")) == (3, 5)
    assert world.pages(chunk_of("a", 29)) == CHUNK_PAGES
    assert refused(world, Refusal.QUOTA) == 0


def test_an_owner_at_its_quota_whose_chunks_are_all_held_gets_no_more() -> None:
    world = World(20, shares=[due({"cpu": 3}, tenant="a")])
    flood(world, "a", 2)
    world.index.pin(piece.entry for piece in world.find(chunk_of("a", 0)).pieces)
    lease = world.index.lease(world.find(chunk_of("a", 1)))
    staged = world.index.plan_store(world.spaces, prompt(*"abcd"), tenant="a")
    assert held(world, "a") == 3
    flood(world, "a", 4, 10)
    assert refused(world, Refusal.QUOTA) == 4
    assert held(world, "a") == 3
    world.index.release(lease)
    flood(world, "a", 1, 20)
    assert refused(world, Refusal.QUOTA) == 4
    world.index.commit(staged)
    assert held(world, "a") == 2


def test_a_load_counts_for_the_quota() -> None:
    world = World(20, [TierRules("disk")], shares=[due({"cpu": 2}, tenant="a")])
    flood(world, "a", 6)
    found = [world.find(chunk_of("a", number)).pieces[0].entry for number in range(6)]
    assert all(entry.where & DISK for entry in found)
    gone = [entry for entry in found if not entry.where & POOL]
    for entry in gone[:2]:
        assert world.index.load(entry) is not None
    assert world.index.load(gone[2]) is None
    assert (held(world, "a"), refused(world, Refusal.QUOTA)) == (2, 1)
    world.take()
    world.run()
    assert world.index.load(gone[2]) is not None
    assert held(world, "a") == 2


def test_a_quota_of_a_tier() -> None:
    world = World(20, [TierRules("disk", capacity=10 * SIZE)], shares=[due({"disk": 2}, tenant="a")])
    flood(world, "b", 3)
    flood(world, "a", 9)
    assert (held(world, "a", 1), held(world, "b", 1)) == (2, 3)
    assert len(world.media[0]) == 5
    world.index.pin(piece.entry for number in (7, 8) for piece in world.find(chunk_of("a", number)).pieces)
    flood(world, "a", 1, 50)
    assert (held(world, "a", 1), refused(world, Refusal.QUOTA)) == (2, 1)
    assert not [decision for decision in world.pending if isinstance(decision, Write)]


def test_a_tier_with_more_of_an_owner_than_its_quota_is_brought_down_to_it() -> None:
    rules = [TierRules("disk", capacity=20 * SIZE)]
    world = World(20, rules)
    flood(world, "", 9)
    fresh = World(20, rules, shares=[due({"disk": 4})])
    fresh.media = world.media
    fresh.scan(0)
    assert held(fresh, "", 1) == 9
    fresh.index.tick()
    fresh.take()
    fresh.run()
    assert held(fresh, "", 1) == len(fresh.media[0]) == 4
    assert [fresh.pages(chunk_of("", number)) for number in (0, 4, 5, 8)] == [0, 0, CHUNK_PAGES, CHUNK_PAGES]


@given(seed=st.integers(0, 1 << 16), policy=st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_an_owner_with_less_than_its_part_loses_nothing_to_others(seed: int, policy: PolicyName) -> None:
    """Three tenants of any demand: in each store by another, one that holds no more than a third keeps all."""
    rng = random.Random(seed)
    world = World(12, [TierRules("disk", capacity=15 * SIZE, policy=policy)], policy=policy)
    keys = {(tenant, number): chunk_of(tenant, number) for tenant in "abc" for number in range(20)}
    for _ in range(120):
        tenant = rng.choice("aaabbc")
        before = {(other, place): held(world, other, place) for other in "abc" for place in (0, 1)}
        world.store(keys[tenant, rng.randrange(20)], tenant=tenant)
        world.run()
        for (other, place), chunks in before.items():
            if other != tenant and chunks <= (4, 5)[place]:
                assert held(world, other, place) == chunks
        world.check_accounts()
