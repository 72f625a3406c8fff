"""The index under any order of events: a hypothesis state machine against brute-force definitions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_core.hostpool import Slot
from lmcache_core.index import POOL, Entry, Geometry, Space, TierRules, tier_bit
from lmcache_core.index.decisions import Delete, Lease, Read, StorePlan, Touch, Write
from lmcache_core.index.policy import PolicyName
from lmcache_core.index.shares import OwnerKind, ShareRules
from lmcache_core.index.tiers import Admission, WriteMode
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ReadResult, WriteResult
from tests.index.world import CHUNK_PAGES, PAGE, World, fill, prompt

# Prompts that share beginnings, end inside chunks, and fork inside and between them.
PROMPTS = [
    "a" * 4,
    "a" * 6,
    "a" * 8,
    "a" * 12,
    "aaab",
    "aabbbb",
    "a" * 7 + "b" * 5,
    "a" * 4 + "b" * 6,
    "b" * 4,
    "bbbbb",
    "c" * 9,
]
HOW = [None, None, None, None, None, True, "damage", "miss", "full"]


class IndexMachine(RuleBasedStateMachine):
    """Stores, lookups, loads, leases, pins, evictions, failures and restarts of tiers, in any order.

    One rule picks an operation by weight and a seed for its details: so most steps do something that matters.
    """

    OPERATIONS = (
        ["store"] * 5
        + ["look_up_and_load"] * 5
        + ["carry_out"] * 6
        + ["carry_out_all"] * 2
        + ["release"] * 6
        + ["evict"] * 5
        + ["begin_store", "finish_store", "look_up", "copy", "copied", "copied", "unpin_all"]
        + ["time_passes", "deadline", "pin", "unpin_all", "clear", "tier_fails_and_comes_back"]
        + ["clear_in_turns"] * 2
        + ["overdue"] * 4
    )

    MAY_LOSE = ("carry_out", "carry_out_all", "clear", "clear_in_turns", "deadline", "tier_fails_and_comes_back")
    """Operators and failures take chunks away whoever wants them; nothing else does."""

    KINDS: Sequence[Geometry] = ()
    """Groups; one full one by default."""

    TENANTS: Sequence[str] = ("",)

    QUOTAS: ClassVar[Mapping[tuple[OwnerKind, str], Mapping[str, int]]] = {}
    """In chunks, by owner and place."""

    @initialize(
        slots=st.integers(1, 7),
        policies=st.tuples(*[st.sampled_from(["lru", "s3fifo"])] * 3),
        modes=st.tuples(*[st.sampled_from(["through", "through", "evict", "never"])] * 2),
        admit=st.tuples(*[st.sampled_from(["always", "always", "second-touch"])] * 2),
        chunks=st.integers(1, 8),
        pending=st.integers(1, 4),
    )
    def start(
        self,
        slots: int,
        policies: tuple[PolicyName, ...],
        modes: tuple[WriteMode, ...],
        admit: tuple[Admission, ...],
        chunks: int,
        pending: int,
    ) -> None:
        size = World(1).chunk_bytes
        first = TierRules(
            "first", modes[0], admit[0], policies[0], chunks * size, remembers_use=True, pending_limit=pending * size
        )
        second = TierRules("second", modes[1], admit[1], policies[1], None, shared=True, evictable=False)
        shares = [
            ShareRules(kind, name, weight, {place: chunks * size for place, chunks in quotas.items()})
            for weight, ((kind, name), quotas) in enumerate(self.QUOTAS.items(), 1)
        ]
        self.world = World(
            slots,
            [first, second],
            policy=policies[2],
            kinds=self.KINDS,
            lease_timeout=10.0,
            shares=shares,
            share_timeout=20.0,
        )
        self.index = self.world.index
        self.plans: list[StorePlan] = []
        self.leases: list[Lease] = []
        self.lent: list[Slot] = []
        self.clearing: list[Entry] = []
        self.cleared_places = 0

    @rule(operation=st.sampled_from(OPERATIONS), seed=st.integers(0, 1 << 16))
    def step(self, operation: str, seed: int) -> None:
        self.rng = random.Random(seed)
        pinned = {entry: entry.where for entry in self.index.pinned}
        leased = {
            entry for lease in self.leases for entry in self.kept_by(lease) if entry.readable(self.index.readable)
        }
        getattr(self, operation)()
        if operation not in self.MAY_LOSE:
            assert all(entry.where & where == where for entry, where in pinned.items()), "a pinned chunk has moved"
            still = {entry for lease in self.leases if lease.active for entry in self.kept_by(lease)}
            assert all(entry.readable(self.index.readable) for entry in leased & still), "a promised chunk has gone"
        self.world.take()

    @staticmethod
    def kept_by(lease: Lease) -> list[Entry]:
        return [piece.entry for piece in lease.found.pieces[lease.used :]]

    def prompt(self) -> list[bytes]:
        return prompt(*self.rng.choice(PROMPTS))

    # Engines

    def store(self) -> None:
        keys = self.prompt()
        self.world.store(keys, at=self.stops(keys), tenant=self.rng.choice(self.TENANTS))

    def stops(self, keys: list[bytes]) -> list[int]:
        """Boundaries at which a later prompt can stop."""
        return [len(keys)]

    def begin_store(self) -> None:
        if len(self.plans) < 3:
            keys = self.prompt()
            tenant = self.rng.choice(self.TENANTS)
            plan = self.index.plan_store(self.world.spaces, keys, self.stops(keys), tenant=tenant)
            staged = sum(len(reservation.entry.pages) for reservation in plan.reservations)
            assert self.KINDS or staged + plan.present + plan.dropped == len(keys)
            self.plans.append(plan)

    def finish_store(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(self.rng.randrange(len(self.plans)))
        kept = []
        for reservation in plan.reservations:
            if self.rng.random() < 0.7:
                fill(reservation.slot, reservation.entry)
                self.index.filled(plan, reservation)
                kept += [reservation.entry] if reservation.published else []
        assert set(self.index.commit(plan)) == set(kept)

    def look_up(self) -> None:
        keys = self.prompt()
        found = self.world.find(keys)
        assert found.pages == self.brute_force(keys)
        self.leases.append(self.index.lease(found))

    def look_up_and_load(self) -> None:
        self.look_up()
        for piece in self.leases[-1].found.pieces:
            if piece.entry.slot is None:
                self.index.load(piece.entry)

    def copy(self) -> None:
        for lease in self.leases[:1]:
            for piece in lease.found.pieces[:1]:
                slot = piece.entry.slot
                if slot is not None and len(self.lent) < 2:
                    slot.acquire()
                    self.lent.append(slot)

    def copied(self) -> None:
        if self.lent:
            self.lent.pop(0).release()

    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.index.consume(lease, min(self.rng.randrange(3), len(lease.found.pieces)))
            self.index.release(lease)
            self.index.release(lease)

    def time_passes(self) -> None:
        self.world.now += self.rng.choice([0.5, 6.0, 11.0])
        self.index.tick()
        self.leases = [lease for lease in self.leases if lease.active]

    def brute_force(self, keys: list[bytes]) -> int:
        """Pages from the start such that each window's are the start of one readable chunk; a window that is not
        wholly there is the last."""
        if self.KINDS:
            return self.hybrid_brute_force(keys)
        total = 0
        for start in range(0, len(keys), CHUNK_PAGES):
            window = keys[start : start + CHUNK_PAGES]
            best = 0
            for entry in self.world.spaces[0].chunks.values():
                late = entry.load is not None and entry.load.late and not entry.where & POOL
                if late or not entry.where & self.index.readable:
                    continue
                run = 0
                while run < min(len(window), len(entry.pages)) and entry.pages[run] == window[run]:
                    run += 1
                best = max(best, run)
            total += best
            if best < CHUNK_PAGES:
                break
        return total

    def hybrid_brute_force(self, keys: list[bytes]) -> int:
        """The largest boundary at which each group has what its rule asks for, page by page."""
        held = [self.pages_held(space, keys) for space in self.world.spaces]
        for boundary in range(len(keys), 0, -1):
            for space, pages in zip(self.world.spaces, held, strict=True):
                kind, wide = space.kind, space.known.window_pages
                first = {GroupKind.FULL: 0, GroupKind.WINDOW: boundary - wide, GroupKind.STATE: boundary - 1}[kind]
                if not pages.issuperset(range(max(0, first), boundary)):
                    break
            else:
                return boundary
        return 0

    def pages_held(self, space: Space, keys: list[bytes]) -> set[int]:
        """Numbers of the pages of a prompt that a readable chunk holds which starts where a window starts."""
        held = set()
        for entry in space.chunks.values():
            if entry.pages[0] in keys and entry.readable(self.index.readable):
                first = keys.index(entry.pages[0])
                same = [n for n, page in enumerate(entry.pages) if keys[first + n : first + n + 1] == [page]]
                held |= {first + n for n in same}
        return held

    # Tiers

    def carry_out(self) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            if self.world.pending:
                self.carry_out_one(self.rng.randrange(len(self.world.pending)), self.rng.choice(HOW))

    def carry_out_all(self) -> None:
        self.world.run()

    def carry_out_one(self, number: int, how: object) -> None:
        """Decisions of one key stay in order, others overtake each other."""
        pending = self.world.pending
        decision = pending[number]
        for earlier in pending[:number]:
            if _tier(earlier) == _tier(decision) and _names(earlier) & _names(decision):
                return
        pending.pop(number)
        failure: object = how if how is True else None
        if isinstance(decision, Read):
            results = {"damage": ReadResult.CORRUPT, "miss": ReadResult.MISS}
            failure = failure or results.get(how)  # type: ignore[call-overload]
        if isinstance(decision, Write) and how == "full":
            failure = WriteResult.FULL
        if failure and not isinstance(decision, Read | Write):
            failure = None
        self.world.carry_out(decision, failure)

    def deadline(self) -> None:
        for decision in self.world.pending:
            if isinstance(decision, Read):
                self.index.gave_up(decision.load)

    def overdue(self) -> None:
        """Some reads take longer than they should: where another tier has the chunk too, it is read twice."""
        for decision in [d for d in self.world.pending if isinstance(d, Read)]:
            if self.rng.random() < 0.7:
                load = decision.load
                alone = load.twin is None and load.entry.load is load
                if self.index.overdue(load):
                    assert alone
                    assert load.twin is not None
                    assert load.twin.tier != load.tier

    def tier_fails_and_comes_back(self) -> None:
        """Everything under way fails, what is queued is refused, and the tier is scanned when it comes back."""
        number = self.rng.randrange(2)
        tier = self.index.tiers[number]
        self.index.set_up(tier, False)
        mine = [d for d in self.world.pending if _tier(d) == number]
        self.world.pending = [d for d in self.world.pending if _tier(d) != number]
        for decision in mine:
            if isinstance(decision, Read):
                self.index.dropped(decision.load)
            elif isinstance(decision, Write):
                self.world.carry_out(decision, True)
        self.world.take()
        for decision in [d for d in self.world.pending if _tier(d) == number]:
            assert not isinstance(decision, Write | Read)
            self.world.pending.remove(decision)
        self.world.scan(number)

    # Operators

    def pin(self) -> None:
        self.index.pin(piece.entry for piece in self.world.find(self.prompt()).pieces)

    def unpin_all(self) -> None:
        for entry in list(self.index.pinned):
            self.index.unpin([entry] * entry.pins)

    def evict(self) -> None:
        places = self.rng.choice([POOL, POOL, POOL, POOL, tier_bit(0), -1])
        entries = [piece.entry for piece in self.world.find(self.prompt()).pieces]
        free = [entry for entry in entries if not entry.pins and not entry.leases]
        self.index.evict(entries, places)
        assert not any(entry.where & places for entry in free)

    def clear(self) -> None:
        places = self.rng.choice([POOL, POOL, tier_bit(0), -1])
        self.world.clear(places)
        assert not any(entry.where & places for entry in self.world.entries())

    def clear_in_turns(self) -> None:
        """The next turn of a clear, with anything in between."""
        if not self.clearing:
            self.cleared_places = self.rng.choice([POOL, tier_bit(0), -1])
            self.clearing = [entry for space in self.world.spaces for entry in space.chunks.values()]
        batch, self.clearing = self.clearing[:2], self.clearing[2:]
        there = sum(bool(entry.where & self.cleared_places) for entry in batch)
        assert self.index.clear(batch, self.cleared_places) == there
        assert not any(entry.where & self.cleared_places for entry in batch)

    # What must always hold

    def reserved(self) -> list[Slot]:
        return [r.slot for plan in self.plans for r in plan.reservations if r.open]

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check_accounts(self.reserved(), [slot for slot in self.lent if slot.references])

    def teardown(self) -> None:
        """At rest nothing is leased, lent, staged or under way, and every slot is a resident chunk's."""
        if not hasattr(self, "world"):
            return
        for plan in self.plans:
            self.index.commit(plan)
        for lease in self.leases:
            self.index.release(lease)
        for slot in self.lent:
            slot.release()
        self.plans, self.leases, self.lent = [], [], []
        self.unpin_all()
        self.world.take()
        self.world.run()
        entries = self.world.entries()
        assert not self.index.leases
        assert not self.index.writes
        assert not any(entry.leases or entry.pins or entry.load or entry.writing or entry.doomed for entry in entries)
        assert not any(space.staged for space in self.world.spaces)
        assert self.world.pool.slots == sum(entry.slot is not None for entry in entries)
        for tier, medium in zip(self.index.tiers, self.world.media, strict=True):
            known = {entry.chunk_key for entry in entries if entry.where & tier.bit}
            assert known <= set(medium), "a chunk that a tier is said to hold and does not"
        self.world.clear(-1)
        self.world.take()
        self.world.run()
        assert self.world.entries() == []
        assert self.world.pool.used == 0
        for space in self.index.spaces.values():
            assert not space._holders
            assert not space.chains
        assert all(owner.empty for owner in self.index.owners.values())


def _tier(decision: object) -> int:
    if isinstance(decision, Read):
        return decision.load.tier
    number: int = decision.tier  # type: ignore[attr-defined]
    return number


def _names(decision: object) -> set[object]:
    if isinstance(decision, Read):
        return {decision.load.entry.chunk_key}
    if isinstance(decision, Write):
        return {decision.entry.chunk_key, *decision.evict}
    return set(decision.keys) if isinstance(decision, Delete | Touch) else set()


class HybridMachine(IndexMachine):
    """The same over a model with full attention, a sliding window and a recurrent state."""

    KINDS = (
        Geometry(GroupKind.FULL, PAGE, 1, CHUNK_PAGES),
        Geometry(GroupKind.WINDOW, PAGE, 1, CHUNK_PAGES, window_pages=3),
        Geometry(GroupKind.STATE, PAGE, 1, 1),
    )

    def stops(self, keys: list[bytes]) -> list[int]:
        return sorted({len(keys), *self.rng.sample(range(1, len(keys) + 1), self.rng.randrange(min(3, len(keys))))})


class TenantsMachine(IndexMachine):
    """The same used by several tenants, some with quotas."""

    TENANTS = ("", "x", "x", "y", "z")
    QUOTAS: ClassVar = {
        ("tenant", "x"): {"cpu": 2, "first": 3},
        ("tenant", "y"): {"first": 2},
        ("model", ""): {"cpu": 3},
    }


TestIndexMachine = IndexMachine.TestCase
TestHybridMachine = HybridMachine.TestCase
TestTenantsMachine = TenantsMachine.TestCase
TestIndexMachine.settings = TestHybridMachine.settings = TestTenantsMachine.settings = settings(
    max_examples=120,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_slot_cannot_be_released_twice() -> None:
    from lmcache_core.errors import UsageError

    world = World(1)
    plan = world.store(prompt("a"))
    slot = plan.reservations[0].slot
    world.clear(POOL)
    assert slot.references == 0
    with pytest.raises(UsageError):
        slot.release()
    with pytest.raises(UsageError):
        slot.acquire()
