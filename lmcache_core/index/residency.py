"""Where chunks live: making room in the host pool and on tiers, writing to tiers, and what happens when that fails.

The rule of order: a chunk is useless without those in front of it, so the last copy of a chunk goes only when no known
chunk needs it, and a candidate that others need is replaced by a leaf behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from lmcache_core.counts import Counts
from lmcache_core.frame import FrameShape
from lmcache_core.hostpool import HostPool, Slot
from lmcache_core.index.decisions import Decision, Delete, Refusal, Write
from lmcache_core.index.entries import POOL, Entry
from lmcache_core.index.policy import PolicyName
from lmcache_core.index.shares import MOST_SKIPPED, Owner, OwnerKind, Share, ShareRules, Shares
from lmcache_core.index.spilling import AHEAD, Unwritten
from lmcache_core.index.tiers import TierRules, TierState
from lmcache_core.protocols import ChunkKey, WriteResult

MOST_PINNED = 4096
"""Pinned ones that may be passed over. They go behind the others, so that later searches don't meet them."""

MOST_SHED = 4096
"""Chunks that leave a tier at once because its capacity has become smaller: the mutex is held meanwhile."""

MOST_KNOWN = 1 << 16
"""Chunks that are known of a tier where nothing is deleted to make room."""

MOST_OWNERS = 1024
"""Owners that tenants are added to: each is looked at when room is wanted."""

CPU = "cpu"
"""Label of the host pool."""


class Residency:
    """Chunks in the pool and on tiers. `out` collects decisions."""

    def __init__(
        self,
        pool: HostPool,
        policy: PolicyName,
        rules: Sequence[TierRules],
        counts: Counts,
        shares: Sequence[ShareRules] = (),
    ) -> None:
        self.pool = pool
        self.policy = Shares(0, policy)
        self.tiers = [TierState(number, each) for number, each in enumerate(rules)]
        self.counts = counts
        self.out: list[Decision] = []
        self.readable = POOL
        """Places that can be read now."""
        self.pinned: set[Entry] = set()
        self.writes: dict[Entry, list[Write]] = {}
        """Writes that have not ended."""
        self.owners: dict[tuple[OwnerKind, str], Owner] = {}
        self._share_rules = {(each.kind, each.name): each for each in shares}
        self.unwritten = Unwritten()
        self._resident = 0
        """Bytes of the chunks in the pool that are not pinned."""
        self._takes_leased = False
        """What is leased may make room too, if it can be read from a tier again."""
        self._spills = [tier for tier in self.tiers if tier.rules.write == "evict"]
        """Tiers that take what the pool evicts."""

    # Owners

    def owner(self, kind: OwnerKind, name: str) -> Owner:
        """An owner by its name."""
        owner = self.owners.get((kind, name))
        if owner is None:
            rules = self._share_rules.get((kind, name)) or ShareRules(kind, name)
            owner = self.owners[kind, name] = Owner(kind, name, rules.weight)
            self.policy.add_owner(owner, rules.quotas.get(CPU))
            for tier in self.tiers:
                tier.policy.add_owner(owner, rules.quotas.get(tier.rules.name))
        return owner

    def tenant(self, name: str) -> Owner | None:
        """A tenant by its name. None if there are too many: its chunks are their model's then."""
        known = ("tenant", name) in self.owners or len(self.owners) < MOST_OWNERS
        return self.owner("tenant", name) if known else None

    def _forget_owner(self, owner: Owner) -> None:
        del self.owners[owner.kind, owner.name]
        for shares in (self.policy, *(tier.policy for tier in self.tiers)):
            shares.remove_owner(owner)

    def _pass_on(self, entry: Entry, owner: Owner) -> None:
        """A chunk that would make room is needed by one of another owner, and counts for that one from now on, if it is
        within its quotas."""
        places: list[Shares] = []
        if entry.slot is not None or entry.load is not None:
            places.append(self.policy)
        places += [tier.policy for tier in self.tiers if (entry.where | entry.writing) & tier.bit]
        if entry.load is not None and entry.load.twin is not None:
            return  # two slots count for it
        if all(owner.shares[shares.place].over(entry.nbytes) <= 0 for shares in places):
            for shares in places:
                shares.move(entry, owner)
            entry.owner = owner

    # Host pool

    def allocate(self, form: FrameShape, owner: Owner, *, counted: bool = True) -> Slot | None:
        """A slot for a chunk of `owner`, if need be in place of chunks that may go. None, which is counted, when there
        is no room at once; if that is because what may go is not worth it, none goes."""
        share = owner.shares[0]
        nbytes = form.nbytes
        if share.quota is not None and share.over(nbytes) > 0 and not self._shed(share, nbytes):
            if counted:
                self.counts.add("dropped_chunks", Refusal.QUOTA.value)
            return None
        slot = self.pool.allocate(form)
        if slot is not None:
            share.held += nbytes
            return slot
        needed: int | None = None
        victims: list[Entry] = []
        unlinked: list[Entry] = []
        skipped = 0
        for candidate in self.policy.candidates(owner, nbytes) if nbytes <= self.pool.usable else ():
            entry = self._pool_victim(candidate)
            if entry is None:
                skipped += 1
                if skipped > MOST_SKIPPED * len(self.owners):
                    break
                continue
            if entry.nbytes < nbytes:
                needed = nbytes - self.pool.usable + self.pool.used if needed is None else needed
                needed -= entry.nbytes
                if needed > 0:
                    self._set_aside(self.policy, POOL, entry, victims, unlinked)
                    continue
            if victims:
                self._leave_for_others(victims)
                victims.clear()
            self.leave_pool(entry)
            self.counts.add("evicted_chunks", CPU)
            slot = self.pool.allocate(form)
            if slot is not None:
                share.held += nbytes
                return slot
        if victims:
            self._put_back(self.policy, victims, unlinked)
        if counted:
            self.counts.add("dropped_chunks", Refusal.POOL_FULL.value)
        return None

    def _shed(self, share: Share, more: int) -> bool:
        """Have an owner's own chunks leave the pool until `more` bytes are within its quota."""
        over = share.over(more)
        victims: list[Entry] = []
        unlinked: list[Entry] = []
        skipped = 0
        for candidate in share.order.candidates():
            entry = self._pool_victim(candidate)
            if entry is None:
                skipped += 1
                if skipped > MOST_SKIPPED:
                    break
                continue
            self._set_aside(self.policy, POOL, entry, victims, unlinked)
            over -= entry.nbytes
            if over <= 0:
                self._leave_for_others(victims)
                return True
        self._put_back(self.policy, victims, unlinked)
        return False

    def _leave_for_others(self, victims: Sequence[Entry]) -> None:
        for victim in victims:
            victim.owner.shares[0].aside = 0
            self.leave_pool(victim)
            self.counts.add("evicted_chunks", CPU)

    @staticmethod
    def _set_aside(policy: Shares, place: int, entry: Entry, victims: list[Entry], unlinked: list[Entry]) -> None:
        """Choose a chunk to leave a place. It leaves the order of eviction, and no other counts as needed by it, so
        that the one in front of it can be chosen too."""
        share = entry.owner.shares[policy.place]
        share.order.discard(entry)
        share.aside += entry.nbytes
        victims.append(entry)
        if entry.where == place and not entry.writing and entry.load is None and entry.space.chains.orphan(entry):
            unlinked.append(entry)

    @staticmethod
    def _put_back(policy: Shares, victims: list[Entry], unlinked: list[Entry]) -> None:
        """Undo `_set_aside`."""
        for entry in reversed(unlinked):
            entry.space.chains.adopt(entry)
        for entry in victims:
            entry.owner.shares[policy.place].aside = 0
        policy.put_back(victims)

    def enter_pool(self, entry: Entry, slot: Slot) -> None:
        """Make a chunk readable from the pool. The slot's first reference becomes its residence. It makes no room for
        others before it is lined up."""
        entry.slot = slot
        entry.where |= POOL
        if not entry.pins:
            self._resident += entry.nbytes
            self._note_unwritten(entry)
        entry.space.tell(entry, POOL, True)

    def line_up(self, entry: Entry) -> None:
        """Let a chunk of the pool make room for others, last of all so far, unless it is pinned or has left."""
        if entry.where & POOL and not entry.pins:
            entry.owner.shares[0].order.add(entry)
            self.unwritten.touch(entry)

    def leave_pool(self, entry: Entry) -> None:
        """End a chunk's residence; its room is free when nobody copies from it any more."""
        slot, entry.slot = entry.slot, None
        if slot is not None:
            entry.where &= ~POOL
            if not entry.pins:
                self._resident -= entry.nbytes
            self.unwritten.discard(entry)
            entry.space.tell(entry, POOL, False)
            share = entry.owner.shares[0]
            share.order.discard(entry)
            share.held -= entry.nbytes
            for tier in self.tiers:
                if entry in tier.owed:
                    del tier.owed[entry]
                    self.counts.add("dropped_chunks", Refusal.QUEUE_FULL.value)
            slot.release()
            self.forget_if_gone(entry)

    def _pool_victim(self, candidate: Entry) -> Entry | None:
        """The chunk that may leave the pool in place of `candidate`, if any. Starts spilling those that must be
        written to a tier first."""
        if not self._pool_may_drop(candidate):
            return None
        if not candidate.where & self.readable & ~POOL and candidate.key in candidate.space.chains:
            front, candidate = candidate, candidate.space.chains.leaf(candidate)
            if candidate.owner is not front.owner:
                self._pass_on(front, candidate.owner)
                return None
            if candidate.where & ~POOL or not self._pool_may_drop(candidate):
                return None
        return None if self._spills and self._must_wait(candidate) else candidate

    def _pool_may_drop(self, entry: Entry) -> bool:
        slot = entry.slot
        if slot is None or slot.references > 1 or entry.pins:
            return False
        return not entry.leases or (self._takes_leased and bool(entry.where & self.readable & ~POOL))

    def _spill(self, entry: Entry) -> bool:
        """Start writing a chunk to the tiers that take what the pool evicts. False if it is on all of them already, or
        cannot be written."""
        started = False
        for tier in self._spills:
            if not entry.where & tier.bit and tier.up and tier.admits(entry):
                started |= self.write(tier, entry) is None
        return started

    def _must_wait(self, entry: Entry) -> bool:
        """Whether a chunk may leave the pool only once it is written. Whether it shall be is decided once for each of
        its stays in the pool: a second look is no second use of it."""
        if any(entry.writing & tier.bit for tier in self._spills):
            return True
        if entry not in self.unwritten:
            return False
        ready = [tier for tier in self._spills if tier.up]
        if any(tier.takes(entry) for tier in ready):
            self.unwritten.discard(entry)
            return self._spill(entry)
        if ready:
            self.counts.add("dropped_chunks", Refusal.QUEUE_FULL.value)
        return False

    def _note_unwritten(self, entry: Entry) -> None:
        """Remember a chunk of the pool that cannot go yet because a tier should have it first."""
        if any(not (entry.where | entry.writing) & tier.bit for tier in self._spills):
            self.unwritten.add(entry)

    def spill_ahead(self) -> None:
        """Start writing chunks that will have to leave the pool soon, so that there is room at once when it is asked
        for: a store does not wait for a tier."""
        room = self.pool.usable - self.pool.used + self._resident - self.unwritten.nbytes
        wanted = self.pool.usable // AHEAD
        while room < wanted and (entry := self.unwritten.first()) is not None:
            if not any(tier.up and tier.takes(entry) for tier in self._spills):
                return
            self.unwritten.discard(entry)
            room += entry.nbytes
            self._spill(entry)

    # Tiers

    def write_through(self, entry: Entry, places: int) -> None:
        """Start writing a chunk that is in the pool to all tiers of `places` that take chunks as they are stored."""
        for tier in self.tiers:
            if tier.rules.write == "through" and places & tier.bit and tier.admits(entry):
                self.write(tier, entry)

    def write(
        self, tier: TierState, entry: Entry, *, waiters: Iterable[Callable[[bool], None]] = (), last_try: bool = False
    ) -> Refusal | None:
        """Start writing a chunk that is in the pool to a tier. Returns why not, and counts it, if it can't be done."""
        slot = entry.slot
        if slot is None or (entry.where | entry.writing | entry.doomed) & tier.bit:
            return None
        refusal = None
        evict: list[ChunkKey] = []
        if not tier.up:
            refusal = Refusal.TIER_DOWN
        elif tier.rules.shared and entry.space.geometry is not None and not entry.space.geometry.shareable:
            return None
        elif not tier.takes(entry):
            refusal = Refusal.QUEUE_FULL
        else:
            refusal = self._make_room(tier, tier.over(entry.nbytes), evict, entry)
        if refusal is Refusal.QUEUE_FULL and tier.rules.write == "through":
            tier.owed[entry] = None  # written when there is room in the queue, unless it has left the pool by then
            return refusal
        if refusal is not None:
            self.counts.add("dropped_chunks", refusal.value)
            return refusal
        tier.owed.pop(entry, None)
        slot.acquire()
        entry.writing |= tier.bit
        tier.charge(entry)
        tier.pending += entry.nbytes
        write = Write(tier.number, entry, slot, evict, last_try, waiters=list(waiters))
        self.writes.setdefault(entry, []).append(write)
        self.out.append(write)
        return None

    def writes_of(self, entries: Iterable[Entry]) -> list[Write]:
        """Writes of chunks that have not ended."""
        return [write for entry in entries for write in self.writes.get(entry, ())]

    def wrote(self, write: Write, result: WriteResult | None) -> bool:
        """Event: a write has ended; None stands for a failure. Returns whether its waiters can be told now."""
        tier, entry = self.tiers[write.tier], write.entry
        entry.writing &= ~tier.bit
        under_way = self.writes[entry]
        under_way.remove(write)
        if not under_way:
            del self.writes[entry]
        tier.pending -= entry.nbytes
        tier.refund(entry)
        doomed = entry.doomed & tier.bit
        entry.doomed &= ~tier.bit
        told = True
        stored = result is WriteResult.STORED and not doomed and tier.up
        if stored:
            tier.charge(entry)
            tier.gained(entry)
            self.counts.add("written_chunks", tier.rules.name)
            self.counts.add("written_bytes", tier.rules.name, entry.nbytes)
        elif result is WriteResult.FULL and not doomed:
            told = not self._once_more(tier, write)
        elif result is None:
            self.counts.add("dropped_chunks", Refusal.WRITE_FAILED.value)
        # Where there was no room, what an earlier write was to have undone by this one may be left, or another node's.
        if told and not stored and (result is not WriteResult.FULL or not tier.rules.shared):
            self._undo(tier, entry)
        write.slot.release()
        self.forget_if_gone(entry)
        self._write_owed(tier)
        if self._spills:
            if entry.where & POOL and not entry.pins and result is WriteResult.STORED and not doomed:
                self.settle(entry)
            self.spill_ahead()
        return told

    def _undo(self, tier: TierState, entry: Entry) -> None:
        """Delete what a write may have left on a tier, unless the chunk is to be there, or will be."""
        newer = entry.space.chunks.get(entry.key, entry)
        if tier.up and not (newer.where | newer.writing) & tier.bit:
            self.out.append(Delete(tier.number, [entry.chunk_key]))

    def settle(self, entry: Entry) -> None:
        """A chunk of the pool has come to a tier."""
        if all(entry.where & tier.bit for tier in self._spills):
            self.unwritten.discard(entry)

    def _write_owed(self, tier: TierState) -> None:
        """Start writing what waited for room in the queue of a tier."""
        while tier.owed and tier.up and tier.pending + next(iter(tier.owed)).nbytes <= tier.rules.pending_limit:
            entry, _ = tier.owed.popitem(last=False)
            self.write(tier, entry)

    def _once_more(self, tier: TierState, write: Write) -> bool:
        """A tier says that it is full although our account says otherwise (fragments, other owners): make twice the
        room, or at least as much as the chunk takes, and try once more. The pool's slot is still held by the write that
        has just ended."""
        entry = write.entry
        evict: list[ChunkKey] = []
        again = not write.last_try and entry.slot is write.slot and tier.up
        if again and not all(self._make_room(tier, times * entry.nbytes, evict, entry) for times in (2, 1)):
            self.out.append(Delete(tier.number, evict))
            return self.write(tier, entry, waiters=write.waiters, last_try=True) is None
        self.counts.add("dropped_chunks", Refusal.TIER_FULL.value)
        return False

    def _make_room(self, tier: TierState, needed: int, evicted: list[ChunkKey], new: Entry) -> Refusal | None:
        """Take chunks worth `needed` bytes off a tier's account, and what else `new` needs so that its owner's quota is
        kept; their keys are added to `evicted` for deletion. If it cannot be had, none goes; returns why."""
        over = new.owner.shares[tier.number + 1].over(new.nbytes)
        if needed <= 0 and over <= 0:
            return None
        victims = self._choose(tier, needed, over, new)
        if isinstance(victims, Refusal):
            return victims
        for entry in victims:
            entry.owner.shares[tier.number + 1].aside = 0
            self._take_off(tier, entry, evicted)
        return None

    def _choose(self, tier: TierState, needed: int, over: int, new: Entry) -> list[Entry] | Refusal:
        """Chunks worth `needed` bytes that may go, set aside, of which `over` are of the owner of `new`."""
        victims: list[Entry] = []
        unlinked: list[Entry] = []
        own = self._victims(tier, tier.candidates_of(new.owner)) if over > 0 else iter(())
        for entry in own:
            self._set_aside(tier.policy, tier.bit, entry, victims, unlinked)
            over -= entry.nbytes
            needed -= entry.nbytes
            if over <= 0:
                break
        if over <= 0 and needed <= tier.used:  # else the chunk that asks is larger than the tier
            if needed <= 0:
                return victims
            for entry in self._victims(tier, tier.candidates(new.owner, new.nbytes)):
                self._set_aside(tier.policy, tier.bit, entry, victims, unlinked)
                needed -= entry.nbytes
                if needed <= 0:
                    return victims
        self._put_back(tier.policy, victims, unlinked)
        return Refusal.QUOTA if over > 0 else Refusal.TIER_FULL

    def _victims(self, tier: TierState, candidates: Iterator[Entry]) -> Iterator[Entry]:
        """Those of `candidates` that may leave a tier. Each has left the order of eviction when it is given."""
        skipped, pinned = 0, 0
        given: set[Entry] = set()
        for candidate in candidates:
            if candidate.pins:
                tier.policy.defer(candidate)
                pinned += 1
                if pinned > MOST_PINNED:
                    return
                continue
            entry = self._tier_victim(tier, candidate)
            if entry is not None and entry not in given:
                tier.policy.discard(entry)
                given.add(entry)
                yield entry
                continue
            skipped += 1
            if skipped > MOST_SKIPPED * len(self.owners):
                return

    def _take_off(self, tier: TierState, entry: Entry, evicted: list[ChunkKey]) -> None:
        evicted.append(entry.chunk_key)
        self._lost(tier, entry)
        self.counts.add("evicted_chunks", tier.rules.name)
        self.forget_if_gone(entry)

    def _tier_victim(self, tier: TierState, candidate: Entry) -> Entry | None:
        if not self._tier_may_drop(tier, candidate):
            return None
        if not candidate.where & ~tier.bit and candidate.key in candidate.space.chains:
            front, candidate = candidate, candidate.space.chains.leaf(candidate)
            if candidate.owner is not front.owner:
                self._pass_on(front, candidate.owner)
                return None
            if not candidate.where & tier.bit or not self._tier_may_drop(tier, candidate):
                return None
        return candidate

    @staticmethod
    def _tier_may_drop(tier: TierState, entry: Entry) -> bool:
        load = entry.load
        read = load is not None and tier.number in (load.tier, load.tier if load.twin is None else load.twin.tier)
        return not (read or entry.pins or (entry.leases and not entry.where & POOL))

    def _lost(self, tier: TierState, entry: Entry) -> None:
        tier.lost(entry)
        if tier in self._spills and entry.where & POOL and not entry.pins:
            self._note_unwritten(entry)

    def shrink(self, tier: TierState) -> None:
        """Delete what a tier holds above its capacity, which may have become smaller, and above the quotas of owners,
        whose chunks it may have been found to hold; the rest of much at the next call."""
        evict: list[ChunkKey] = []
        for share in tier.policy.shares:
            if share.over(0) > 0:
                for entry in islice(self._victims(tier, tier.candidates_of(share.owner)), MOST_SHED):
                    self._take_off(tier, entry, evict)
                    if share.over(0) <= 0:
                        break
        if tier.over(0) > 0:
            for entry in islice(self._victims(tier, tier.candidates()), MOST_SHED):
                self._take_off(tier, entry, evict)
                if tier.over(0) <= 0:
                    break
        if evict:
            self.out.append(Delete(tier.number, evict))

    def forget_oldest(self, tier: TierState) -> None:
        """Know no more than so many chunks of a tier where nothing is deleted; the rest of many at the next call. Who
        asks for what was forgotten has the tier asked again."""
        over = min(len(tier.policy) - MOST_KNOWN, MOST_SHED)
        if over > 0:
            for entry in list(islice(tier.policy, 2 * over)):
                if not (entry.where & POOL or entry.leases or entry.pins or entry.load or entry.writing):
                    self.lose(tier, entry, delete=False)
                    over -= 1
                    if not over:
                        return

    def lose(self, tier: TierState, entry: Entry, *, delete: bool) -> None:
        """A chunk cannot be read from a tier any more; `delete` what may still be there. A write under way is undone
        when it has ended."""
        if entry.writing & tier.bit:
            entry.doomed |= tier.bit
        if entry.where & tier.bit:
            self._lost(tier, entry)
            if delete:
                self.out.append(Delete(tier.number, [entry.chunk_key]))
            self.forget_if_gone(entry)

    def set_up(self, tier: TierState, up: bool) -> None:
        """Event: a tier can be used, or can't."""
        tier.up = up
        if not up and tier.owed:
            self.counts.add("dropped_chunks", Refusal.TIER_DOWN.value, len(tier.owed))
            tier.owed.clear()
        self.readable = self.readable | tier.bit if up else self.readable & ~tier.bit

    # Entries

    def forget_if_gone(self, entry: Entry) -> None:
        """Forget a chunk that is nowhere and that nothing is being done with."""
        if not (entry.where or entry.writing) and entry.load is None and entry.space.staged.get(entry.key) is not entry:
            entry.space.leave(entry)
            self.pinned.discard(entry)

    def remove(self, entries: Iterable[Entry], places: int, *, label: str | None = None) -> int:
        """Take chunks out of `places`, whoever leases or pins them; returns how many were anywhere there."""
        removed = 0
        gone: defaultdict[int, list[ChunkKey]] = defaultdict(list)
        for entry in list(entries):
            removed += bool(entry.where & places)
            if entry.load is not None and places & POOL:
                entry.load.doomed = True
                if entry.load.twin is not None:
                    entry.load.twin.doomed = True
            for tier in self.tiers:
                if not places & tier.bit:
                    continue
                if entry.writing & tier.bit:
                    entry.doomed |= tier.bit
                if entry.where & tier.bit:
                    gone[tier.number].append(entry.chunk_key)
                    self._lost(tier, entry)
                    if label:
                        self.counts.add(label, tier.rules.name)
            if places & POOL and entry.slot is not None:
                if label:
                    self.counts.add(label, CPU)
                self.leave_pool(entry)
            self.forget_if_gone(entry)
        self.out += [Delete(number, keys) for number, keys in gone.items()]
        return removed
