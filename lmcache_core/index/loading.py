"""Reading chunks from tiers into the pool, and learning what tiers hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lmcache_core.hostpool import Slot
from lmcache_core.index.decisions import Delete, Describe, Load, Read
from lmcache_core.index.entries import POOL, Entry, Space
from lmcache_core.index.residency import Residency
from lmcache_core.index.tiers import TierState
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ChunkKey, ReadResult, Stored

KEY_BYTES = 32
MUCH = 2.0
"""How much faster than a tier in front of it another must be to be read instead."""
WORTH = 0.005
"""Seconds that it must be faster by, and before which no read is late: less is noise."""
RELEARN = 5.0
"""Seconds without a read after which a slow tier is tried again."""


class Loading(Residency):
    """Residency, and the events by which chunks become known and loaded. `spaces` are all namespaces' groups."""

    spaces: dict[bytes, Space]
    clock: Callable[[], float]

    def load(self, entry: Entry) -> Load | None:
        """Start reading a chunk into the pool, or join the read under way. None if it cannot be read or there is no
        room; the caller has made sure that it is not in the pool."""
        if entry.load is not None:
            return None if entry.load.late else entry.load
        tier = self._source(entry, self.readable)
        if tier is None:
            return None
        slot = self.allocate(entry.form, entry.owner, counted=False) or self._allocate_of_leased(entry)
        if slot is None:
            return None
        if entry.where & self.readable & (tier.bit - 1) & ~POOL:
            self.counts.add("overtaking_reads", tier.rules.name)
        entry.load = Load(entry, slot, tier.number)
        self.out.append(Read(entry.load))
        return entry.load

    def source(self, entry: Entry) -> TierState | None:
        """Where a chunk would be read from that is neither in the pool nor on its way there; else None."""
        if entry.slot is not None or entry.load is not None:
            return None
        return self._source(entry, self.readable)

    def _allocate_of_leased(self, entry: Entry) -> Slot | None:
        """Room for a chunk in place of what is leased: of a prompt larger than the pool the tail may lie there, and is
        read again when its turn comes."""
        self._takes_leased = True
        try:
            return self.allocate(entry.form, entry.owner)
        finally:
            self._takes_leased = False

    def _source(self, entry: Entry, places: int) -> TierState | None:
        """Where to read a chunk: from the first tier that has it, unless another is known to be much faster now."""
        first: TierState | None = None
        for tier in self.tiers:
            if entry.where & places & tier.bit:
                if first is None:
                    first = tier
                elif self._much_faster(tier, first, entry.nbytes):
                    return tier
        return first

    def _much_faster(self, tier: TierState, than: TierState, nbytes: int) -> bool:
        other = than.pace.expected(nbytes)
        if other is None or self.clock() > than.pace.measured + RELEARN:
            return False
        mine = tier.pace.expected(nbytes)
        if mine is None:  # it is worth a try where the other one is not what it was
            mine = than.usual.expected(nbytes)
        return mine is not None and other > MUCH * mine and other - mine > WORTH

    def measured(self, tier: TierState, nbytes: int, seconds: float) -> None:
        """Event: a call that read `nbytes` from a tier took so long."""
        tier.pace.add(nbytes, seconds, self.clock())
        tier.usual.add(nbytes, seconds, self.clock())

    def patience(self, tier: TierState, nbytes: int) -> float | None:
        """Seconds that reading so much from a tier hardly ever takes; None while nothing is known of it."""
        longest = tier.pace.longest(nbytes)
        return None if longest is None else max(longest, WORTH)

    def overdue(self, load: Load) -> bool:
        """Event: a read takes longer than its tier's reads do. Has another tier read the chunk too, if one can. Returns
        whether it does."""
        entry, tier = load.entry, self.tiers[load.tier]
        if entry.load is not load or load.twin is not None or not load.wanted:
            return False
        other = self._source(entry, self.readable & ~tier.bit)
        slot = None if other is None else self.allocate(entry.form, entry.owner, counted=False)
        if other is None or slot is None:
            return False
        load.twin = Load(entry, slot, other.number, twin=load)
        self.counts.add("hedged_reads", tier.rules.name)
        self.out.append(Read(load.twin))
        return True

    def _part(self, load: Load, *, beaten: bool) -> Load | None:
        """End the race of two reads. The other one is who is waited for from now on, unless it is `beaten`; else this
        one is."""
        twin, load.twin = load.twin, None
        if twin is None:
            return None
        entry, twin.twin = load.entry, None
        loser = twin if beaten else load
        winner = load if beaten else twin
        loser.beaten_of = entry.owner
        if entry.load is loser:
            entry.load = winner
            winner.waiters += loser.waiters
            loser.waiters = []
        return twin

    def _drop_beaten(self, load: Load) -> None:
        assert load.beaten_of is not None
        load.beaten_of.shares[0].held -= load.entry.nbytes
        load.slot.release()

    def loaded(self, load: Load, result: ReadResult | None) -> bool:
        """Event: a read has ended; None stands for a failure. Returns whether its waiters can be told now (a read from
        another tier may have been started instead)."""
        entry, tier = load.entry, self.tiers[load.tier]
        name = tier.rules.name
        if load.beaten_of is not None:
            self._drop_beaten(load)
            return True
        if result is ReadResult.HIT and not load.doomed:
            self.counts.add("read_chunks", name)
            self.counts.add("read_bytes", name, entry.nbytes)
            if entry.load is not load:
                self.counts.add("won_hedges", name)
            self._part(load, beaten=True)
            entry.load = None
            load.slot.sealed = True
            self.enter_pool(entry, load.slot)
            self.line_up(entry)
            self._promote(entry, tier)
            self.spill_ahead()
            return True
        if result is not ReadResult.HIT:
            reason = {ReadResult.CORRUPT: "corrupt_chunks", ReadResult.MISS: "vanished_chunks"}
            self.counts.add(reason[result] if result else "failed_reads", name)
            # Others may read a shared tier well: there only what is surely damaged is deleted.
            bad = result is ReadResult.CORRUPT or (result is None and not tier.rules.shared)
            self.lose(tier, entry, delete=bad and tier.up)
            if self._part(load, beaten=False) is not None:
                self._drop_beaten(load)
                return True
            other = self._source(entry, self.readable & ~tier.bit)
            if other is not None and not load.late and not load.doomed:
                load.tier = other.number
                self.out.append(Read(load))
                return False
        self.dropped(load)
        return True

    def _promote(self, entry: Entry, source: TierState) -> None:
        """Bring a chunk that was read from a tier to those above it too; where a second use decides, that use does."""
        rules = [(tier.bit, tier.rules) for tier in self.tiers[: source.number]]
        above = sum(bit for bit, each in rules if each.promote and each.admit == "always")
        self.write_through(entry, above & ~entry.where)

    def dropped(self, load: Load) -> None:
        """Event: a read was not carried out, which says nothing about the chunk."""
        self._part(load, beaten=False)
        if load.beaten_of is not None:
            self._drop_beaten(load)
            return
        load.entry.load = None
        self.policy.refund(load.entry)
        load.slot.release()
        self.forget_if_gone(load.entry)

    def gave_up(self, load: Load) -> bool:
        """Event: the deadline of a read has passed. Its slot stays out of use until the read has ended. Returns whether
        there is anybody to tell."""
        if load.late:
            return False
        load.late = True
        if load.entry.load is not load and load.twin is None:
            return False
        self.counts.add("late_reads", self.tiers[load.tier].rules.name)
        return self._part(load, beaten=False) is None

    # Tiers

    def scanned(self, tier: TierState, batch: Iterable[Stored]) -> None:
        """Event: chunks found on a tier, least recently used first. Those of a namespace that nobody has registered yet
        are known by size alone."""
        for stored in batch:
            if not _plausible(stored):
                continue
            space = self.spaces.setdefault(stored.key.space, Space(stored.key.space))
            if space.geometry is None:
                space.owner = self.owner("unclaimed", "")
            known = space.chunks.get(stored.key.page)
            if known is None:
                geometry = space.geometry
                if geometry is not None and stored.nbytes != space.form(len(stored.pages)).nbytes:
                    self.out.append(Delete(tier.number, [stored.key]))
                    continue
                known = Entry(space, stored.pages, stored.parent, stored.nbytes)
                space.enter(known)
                if geometry is None or geometry.kind is GroupKind.FULL:
                    space.chains.adopt(known)
            if not (known.where | known.writing) & tier.bit:
                tier.charge(known)
                tier.gained(known)
                self.settle(known)

    def tier_opened(self, tier: TierState) -> None:
        """Event: a tier can be used from now on; a scan, where it has one, has been reported."""
        self.set_up(tier, True)
        self.out += [Describe(tier.number, space) for space in self.spaces.values() if space.geometry is not None]

    def reset_tier(self, tier: TierState, entries: Iterable[Entry]) -> None:
        """Event: whether a tier, which is down, holds these chunks is unknown; a scan follows that of all."""
        for entry in entries:
            self.lose(tier, entry, delete=False)

    def learned(self, tier: TierState, space: Space, pages: tuple[bytes, ...], parent: bytes) -> None:
        """Event: a tier that cannot be listed was asked for a chunk and has it."""
        nbytes = space.form(len(pages)).nbytes
        self.scanned(tier, [Stored(ChunkKey(space.digest, pages[-1]), pages, nbytes, parent)])


def _plausible(stored: Stored) -> bool:
    """Whether a chunk that a tier says it holds can be one at all. A plugin may say anything."""
    pages, parent = stored.pages, stored.parent
    return (
        len(pages) > 0
        and pages[-1] == stored.key.page
        and all(len(page) == KEY_BYTES for page in (*pages, stored.key.space))
        and (not parent or (len(parent) == KEY_BYTES and parent not in pages))
        and stored.nbytes > 0
    )
