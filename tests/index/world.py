"""A small world around an index: a pool, tiers whose media are dictionaries, a clock, decisions run on demand.

Every chunk has bytes that follow from its key, so that wrong bytes show wherever they turn up.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence

from lmcache_core.frame import FrameShape
from lmcache_core.hostpool import HostPool, Slot
from lmcache_core.index import POOL, Entry, Geometry, Index, Space, TierRules
from lmcache_core.index.decisions import (
    Decision,
    Delete,
    Describe,
    Found,
    Load,
    Read,
    Refusal,
    Reservation,
    StorePlan,
    Touch,
    Write,
)
from lmcache_core.index.shares import Owner, ShareRules, Shares
from lmcache_core.index.tiers import TierState
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ChunkKey, ReadResult, Stored, WriteResult

PAGE = 8000
CHUNK_PAGES = 4
SPACE = hashlib.sha256(b"space").digest()


def key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def prompt(*pages: str) -> list[bytes]:
    """Keys of a prompt, by a name for the content of each page."""
    keys = []
    last = b""
    for page in pages:
        last = hashlib.sha256(last + page.encode()).digest()
        keys.append(last)
    return keys


def content(entry: Entry) -> bytes:
    """The first bytes of each page of a chunk."""
    return b"".join(page[:8] for page in entry.pages)


def fill(slot: Slot, entry: Entry) -> None:
    """Write the bytes of a chunk into its slot."""
    payload = slot.payload()
    size = slot.form.page_bytes
    for number, page in enumerate(entry.pages):
        payload[number * size : number * size + 8] = page[:8]


def held(slot: Slot) -> bytes:
    """What `content` should be, as the slot has it."""
    payload = slot.payload()
    size = slot.form.page_bytes
    return b"".join(bytes(payload[start : start + 8]) for start in range(0, len(payload), size))


class WatchedIndex(Index):
    """An index that checks each chunk it evicts to make room."""

    evicting = False
    asking: tuple[Owner, int] | None = None
    """Who wants room, and how much."""

    def watch(self) -> None:
        for tier in self.tiers:
            tier.lost = self._watched(tier.lost, tier.bit)  # type: ignore[assignment, method-assign]

    def _watched(self, lost: Callable[[Entry], None], bit: int) -> Callable[[Entry], None]:
        def checked(entry: Entry) -> None:
            if self.evicting:
                self.check_victim(entry, bit)
            lost(entry)

        return checked

    def check_victim(self, entry: Entry, bit: int) -> None:
        assert not entry.pins
        again = self.readable & ~POOL if self._takes_leased else 0
        assert not entry.leases or entry.where & ~bit & (POOL | again)
        assert entry.where & ~bit or entry.writing or entry.key not in entry.space.chains, "others need the last copy"
        load = entry.load
        for each in () if load is None or load.late else (load, load.twin):
            assert each is None or each.tier != bit.bit_length() - 2
        if self.asking is not None and self.asking[0] is not entry.owner:
            place = bit.bit_length() - 1
            asking, more = self.asking
            theirs, wanted = entry.owner.shares[place].held, asking.shares[place].held + more
            assert entry.owner.idle or theirs / entry.owner.weight >= wanted / asking.weight, "taken from who has less"

    def allocate(self, form: FrameShape, owner: Owner, *, counted: bool = True) -> Slot | None:
        self.evicting, self.asking = True, (owner, form.nbytes)
        try:
            return super().allocate(form, owner, counted=counted)
        finally:
            self.evicting, self.asking = False, None

    def leave_pool(self, entry: Entry) -> None:
        if self.evicting and entry.slot is not None:
            self.check_victim(entry, POOL)
            assert entry.slot.references == 1
        super().leave_pool(entry)

    def _make_room(self, tier: TierState, needed: int, evicted: list[ChunkKey], new: Entry) -> Refusal | None:
        before = self.evicting, self.asking
        self.evicting, self.asking = True, (new.owner, new.nbytes)
        try:
            return super()._make_room(tier, needed, evicted, new)
        finally:
            self.evicting, self.asking = before


class World:
    """An index and what is around it."""

    def __init__(
        self,
        slots: int = 4,
        tiers: Sequence[TierRules] = (),
        *,
        policy: str = "lru",
        kinds: Sequence[Geometry] | None = None,
        lease_timeout: float = 30.0,
        shares: Sequence[ShareRules] = (),
        share_timeout: float = math.inf,
    ) -> None:
        geometry = Geometry(GroupKind.FULL, PAGE, 1, CHUNK_PAGES)
        self.now = 0.0
        form = Space(b"", geometry).form(CHUNK_PAGES)
        self.chunk_bytes = form.nbytes
        self.pool = HostPool(slots * form.nbytes, prefault=False)
        weakref.finalize(self, self.pool.close)  # there are thousands of worlds in a run
        self.index = WatchedIndex(
            self.pool,
            tiers,
            policy="lru" if policy == "lru" else "s3fifo",
            lease_timeout=lease_timeout,
            clock=lambda: self.now,
            shares=shares,
            share_timeout=share_timeout,
        )
        self.index.watch()
        self.spaces = [
            self.index.add_space(SPACE if number == 0 else key(f"space {number}"), each)
            for number, each in enumerate(kinds or [geometry])
        ]
        self.media: list[dict[ChunkKey, tuple[Stored, bytes]]] = [{} for _ in tiers]
        self.pending: list[Decision] = []
        self.told: list[tuple[object, bool]] = []
        self.found_above: dict[object, int] = {}
        for tier in self.index.tiers:
            self.index.tier_opened(tier)
        self.take()

    # What engines do

    def store(self, keys: Sequence[bytes], *, commit: bool = True, **arguments: object) -> StorePlan:
        plan = self.index.plan_store(self.spaces, keys, **arguments)  # type: ignore[arg-type]
        for reservation in plan.reservations:
            self.fill(plan, reservation)
        if commit:
            self.index.commit(plan)
        self.take()
        return plan

    def fill(self, plan: StorePlan, reservation: Reservation) -> None:
        """Put the bytes of a chunk in place and report it."""
        fill(reservation.slot, reservation.entry)
        self.index.filled(plan, reservation)

    def clear(self, places: int = -1, spaces: Iterable[Space] | None = None) -> int:
        """Take all chunks out of places. Returns how many left."""
        found = self.spaces if spaces is None else spaces
        return self.index.clear([entry for space in found for entry in space.chunks.values()], places)

    def find(self, keys: Sequence[bytes], places: int = -1) -> Found:
        found = self.index.find(self.spaces, keys, places)
        for piece in found.pieces:
            assert piece.entry.pages[: piece.pages] == tuple(keys[piece.first : piece.first + piece.pages])
            self.check(piece.entry)
        return found

    def pages(self, keys: Sequence[bytes], places: int = -1) -> int:
        return self.find(keys, places).pages

    @staticmethod
    def check(entry: Entry) -> None:
        if entry.where & POOL:
            assert entry.slot is not None
            assert held(entry.slot) == content(entry)

    # What the node does

    def take(self) -> None:
        self.pending += self.index.out
        self.index.out = []

    def run(self, limit: int = 10_000) -> None:
        """Carry out what is pending, and what follows from it, in order."""
        while self.pending and limit:
            self.carry_out(self.pending.pop(0))
            limit -= 1
        assert limit, "the index never comes to rest"

    def carry_out(self, decision: Decision, failure: object = None) -> None:
        """Carry one decision out. `failure` is a `ReadResult` or `WriteResult` to give instead, or True to fail."""
        if isinstance(decision, Read):
            self._read(decision.load, failure)
        elif isinstance(decision, Write):
            self._write(decision, failure)
        elif isinstance(decision, Delete):
            for name in decision.keys:
                self.media[decision.tier].pop(name, None)
        elif isinstance(decision, Touch):
            for name in decision.keys:
                if name in self.media[decision.tier]:
                    self.media[decision.tier][name] = self.media[decision.tier].pop(name)
        else:
            assert isinstance(decision, Describe)
        self.take()

    def _read(self, load: Load, failure: object) -> None:
        found = self.media[load.tier].get(load.entry.chunk_key)
        result: ReadResult | None
        if failure is True:
            result = None
        elif isinstance(failure, ReadResult):
            result = failure
        elif found is None:
            result = ReadResult.MISS
        else:
            result = ReadResult.HIT
        load.slot.payload()[:] = b"\xee" * len(load.slot.payload())
        if result is ReadResult.HIT:
            assert found is not None
            assert found[1] == content(load.entry)
            fill(load.slot, load.entry)
        if self.index.loaded(load, result):
            for waiter in load.waiters:
                waiter(load.entry.slot is load.slot)

    def _write(self, write: Write, failure: object) -> None:
        medium = self.media[write.tier]
        for name in write.evict:
            medium.pop(name, None)
        result: WriteResult | None
        if failure is True:
            result = None
        elif isinstance(failure, WriteResult):
            result = failure
        else:
            result = WriteResult.STORED
        if result is WriteResult.STORED:
            entry = write.entry
            assert held(write.slot) == content(entry)
            medium[entry.chunk_key] = (
                Stored(entry.chunk_key, entry.pages, entry.nbytes, entry.parent),
                held(write.slot),
            )
        if self.index.wrote(write, result):
            for waiter in write.waiters:
                waiter(result is WriteResult.STORED)

    def scan(self, number: int) -> None:
        """What happens when a tier comes up."""
        tier = self.index.tiers[number]
        self.index.reset_tier(tier, [entry for space in self.spaces for entry in space.chunks.values()])
        self.index.scanned(tier, [stored for stored, _ in self.media[number].values()])
        self.index.tier_opened(tier)
        self.take()
        if tier.capacity is not None:
            self.found_above[tier] = max(0, tier.over(0))
        self.found_above |= {share: max(0, share.over(0)) for share in tier.policy.shares}

    # What must hold

    def check_most(self, of: object, nbytes: int, most: int) -> None:
        """Never more than is allowed; what a scan has found above that only becomes less."""
        above = max(0, nbytes - most)
        assert above <= self.found_above.get(of, 0)
        self.found_above[of] = above

    def check_shares(self, shares: Shares, held: list[Entry], may_leave: list[Entry]) -> None:
        """Each owner's bytes and order are those of its chunks, within its quota."""
        for share in shares.shares:
            assert share.held == sum(entry.nbytes for entry in held if entry.owner is share.owner)
            if share.quota is not None:
                self.check_most(share, share.held, share.quota)
            assert set(share.order) <= {entry for entry in may_leave if entry.owner is share.owner}
            assert not share.aside
        assert {entry.owner for entry in held} <= {share.owner for share in shares.shares}

    def entries(self) -> list[Entry]:
        found = {entry for space in self.spaces for entry in space.chunks.values()}
        return [*found, *(entry for space in self.spaces for entry in space.staged.values())]

    def check_accounts(self, reserved: Iterable[Slot] = (), lent: Iterable[Slot] = ()) -> None:
        """Slots, bytes and counts are what the entries say."""
        entries = self.entries()
        resident = {entry.slot for entry in entries if entry.slot is not None}
        used = resident | set(reserved) | set(lent)
        used |= {write.slot for writes in self.index.writes.values() for write in writes}
        loads = [d.load for d in self.pending + self.index.out if isinstance(d, Read)]
        used |= {load.slot for load in loads}
        assert {slot.references > 0 for slot in used} <= {True}
        assert self.pool.slots == len(used)
        assert self.pool.used == sum(slot.form.nbytes for slot in used)
        index = self.index
        assert index._resident == sum(entry.nbytes for entry in entries if entry.slot is not None and not entry.pins)
        assert index.unwritten.nbytes == sum(entry.nbytes for entry in index.unwritten)
        spills = [tier for tier in index.tiers if tier.rules.write == "evict"]
        for entry in index.unwritten:
            assert entry.where & POOL
            assert not entry.pins
            assert any(not entry.where & tier.bit for tier in spills)
        for tier in self.index.tiers:
            writes = [w for writes in self.index.writes.values() for w in writes if w.tier == tier.number]
            mine = [entry for entry in entries if entry.where & tier.bit]
            assert tier.used == sum(e.nbytes for e in mine) + sum(w.entry.nbytes for w in writes)
            assert tier.pending == sum(write.entry.nbytes for write in writes)
            assert len(tier.policy) == len(mine)
            if tier.capacity is not None:
                self.check_most(tier, tier.used, tier.capacity)
            self.check_shares(tier.policy, [*mine, *(w.entry for w in writes)], mine)
        pooled = [e for e in entries if e.slot is not None]
        staged = [e for space in self.spaces for e in space.staged.values()]
        others = [load for load in loads if load.beaten_of is not None and load.beaten_of is not load.entry.owner]
        for load in others:  # a read that is not wanted any more counts for who had the chunk then
            assert load.beaten_of is not None
            load.beaten_of.shares[0].held -= load.entry.nbytes
        wanted = [load.entry for load in loads if load not in others]
        self.check_shares(self.index.policy, [*pooled, *staged, *wanted], pooled)
        for load in others:
            assert load.beaten_of is not None
            load.beaten_of.shares[0].held += load.entry.nbytes
        for entry in entries:
            self.check(entry)
            assert entry.leases >= 0
            assert entry.pins >= 0
