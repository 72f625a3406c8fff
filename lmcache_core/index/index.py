"""`Index`: the events of lookups, stores and loads, over `Residency`.

Every method runs on the caller's thread under the node's one mutex. What has to be done besides is appended to
`out` as decisions; the node takes them and answers with further events.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from lmcache_core.counts import Counts
from lmcache_core.errors import LayoutError, UsageError
from lmcache_core.hostpool import HostPool
from lmcache_core.index.boundary import chunks_to_store, restorable, window_start
from lmcache_core.index.decisions import (
    Delete,
    Describe,
    Found,
    Lease,
    Load,
    Piece,
    Read,
    Refusal,
    Reservation,
    StorePlan,
    Touch,
    Write,
)
from lmcache_core.index.entries import POOL, Entry, Geometry, Space
from lmcache_core.index.policy import PolicyName
from lmcache_core.index.residency import CPU, Residency
from lmcache_core.index.tiers import TierRules, TierState
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import ChunkKey, ReadResult, Stored, WriteResult

EVERYWHERE = -1
"""Mask of all places."""


class Index(Residency):
    """What is where, for all namespaces of a node.

    Args:
        pool: The host pool.
        tiers: Rules of the tiers, fastest first.
        policy: Order of eviction of the pool.
        lease_timeout: Seconds until a lease ends by itself.
        clock: Monotonic seconds.
        counts: Where to count.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierRules] = (),
        *,
        policy: PolicyName = "lru",
        lease_timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
    ) -> None:
        super().__init__(pool, policy, tiers, Counts() if counts is None else counts)
        self.spaces: dict[bytes, Space] = {}
        self.leases: OrderedDict[int, Lease] = OrderedDict()
        self._lease_timeout = lease_timeout
        self._clock = clock
        self._numbers = 0
        self._second_touch = 0
        for tier in self.tiers:
            if tier.rules.admit != "always":
                self._second_touch |= tier.bit

    # Spaces

    def add_space(self, digest: bytes, geometry: Geometry) -> Space:
        """Register one group of a namespace; the same again is the same space.

        Raises:
            LayoutError: It was registered with other sizes.
        """
        space = self.spaces.setdefault(digest, Space(digest))
        if space.geometry is None:
            space.geometry = geometry
            wrong = [e for e in space.chunks.values() if e.nbytes != space.form(len(e.pages)).nbytes]
            self.remove(wrong, EVERYWHERE)
            self.out += [Describe(tier.number, space) for tier in self.tiers if tier.up]
        elif space.geometry != geometry:
            raise LayoutError(
                f"the namespace is in use with {space.geometry}, not {geometry}; all users of a node need the same "
                "chunk_tokens and page_tokens"
            )
        return space

    # Lookup

    def find(self, spaces: Sequence[Space], keys: Sequence[bytes], places: int = EVERYWHERE) -> Found:
        """The longest prefix of a prompt that all groups can be restored to. Changes nothing.

        Args:
            spaces: The groups of a namespace, in order.
            keys: Keys of the prompt's whole pages.
            places: Places to look in.
        """
        readable = self.readable & places
        if len(spaces) == 1 and _kind(spaces[0]) is GroupKind.FULL:
            return self._prefix(spaces[0], 0, keys, readable)
        full = [
            self._prefix(space, group, keys, readable)
            for group, space in enumerate(spaces)
            if _kind(space) is GroupKind.FULL
        ]
        limit = min((found.pages for found in full), default=len(keys))
        head = keys[:limit]
        windows = [
            (_geometry(space).window_pages, self._held(space, head, readable))
            for space in spaces
            if _kind(space) is GroupKind.WINDOW
        ]
        states = [
            {number + 1 for number in range(limit) if self._run(space, head, number, readable)}
            for space in spaces
            if _kind(space) is GroupKind.STATE
        ]
        boundary = restorable(limit, windows, states)
        pieces: list[Piece] = []
        for group, space in enumerate(spaces):
            pieces += self._pieces(space, group, keys[:boundary], readable)
        return Found(boundary, pieces)

    def _run(self, space: Space, keys: Sequence[bytes], first: int, places: int) -> tuple[Entry, int] | None:
        found = space.run(keys, first, places)
        if found is not None:
            load = found[0].load
            if load is not None and load.late and not found[0].where & POOL:
                return None
        return found

    def _prefix(self, space: Space, group: int, keys: Sequence[bytes], places: int) -> Found:
        pieces: list[Piece] = []
        step = _geometry(space).chunk_pages
        first = 0
        while first < len(keys):
            found = self._run(space, keys, first, places)
            if found is None:
                break
            pieces.append(Piece(group, found[0], first, found[1]))
            first += found[1]
            if found[1] < step:
                break
        return Found(first, pieces)

    def _held(self, space: Space, keys: Sequence[bytes], places: int) -> list[bool]:
        held = [False] * len(keys)
        for first in range(0, len(keys), _geometry(space).chunk_pages):
            found = self._run(space, keys, first, places)
            if found is not None:
                held[first : first + found[1]] = [True] * found[1]
        return held

    def _pieces(self, space: Space, group: int, keys: Sequence[bytes], places: int) -> list[Piece]:
        """What a group needs to be restored to the end of `keys`, given that it can be."""
        geometry = _geometry(space)
        if not keys:
            return []
        first = 0
        if geometry.kind is GroupKind.STATE:
            first = len(keys) - 1
        elif geometry.kind is GroupKind.WINDOW:
            first = window_start(len(keys), geometry.window_pages) // geometry.chunk_pages * geometry.chunk_pages
        pieces = []
        while first < len(keys):
            found = self._run(space, keys, first, places)
            assert found is not None, "a boundary that a group does not reach"
            pieces.append(Piece(group, found[0], first, found[1]))
            first += found[1]
        return pieces

    def lease(self, found: Found) -> Lease:
        """Keep what was found, and note its use: chunks are touched from tail to head, so that tails go first."""
        self._numbers += 1
        lease = Lease(self._numbers, found, self._clock() + self._lease_timeout)
        self.leases[lease.number] = lease
        for piece in found.pieces:
            piece.entry.leases += 1
        entries = [piece.entry for piece in found.pieces]
        self.touch(entries)
        if self._second_touch:
            for entry in entries:
                self.write_through(entry, self._second_touch & ~entry.where)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease; one that has ended by itself is let pass."""
        if lease.active:
            lease.active = False
            del self.leases[lease.number]
            for piece in lease.found.pieces[lease.used :]:
                piece.entry.leases -= 1

    def consume(self, lease: Lease, pieces: int) -> None:
        """Event: the next `pieces` pieces of a lease have been copied; they may be evicted from now on."""
        if lease.active:
            for piece in lease.found.pieces[lease.used : lease.used + pieces]:
                piece.entry.leases -= 1
            lease.used += pieces

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note a use of the chunks of a prompt, given from head to tail."""
        tiers = self.tiers
        for entry in reversed(entries):
            if entry.where & POOL:
                self.policy.touch(entry)
            for tier in tiers:
                if entry.where & tier.bit:
                    tier.used_now(entry)

    # Store

    def plan_store(
        self,
        spaces: Sequence[Space],
        keys: Sequence[bytes],
        at: Sequence[int] = (),
        first_page: int = 0,
        places: int = EVERYWHERE,
    ) -> StorePlan:
        """Reserve room for what a prompt lacks. Every reservation must be committed or aborted.

        Args:
            spaces: The groups of a namespace, in order.
            keys: Keys of the prompt's whole pages.
            at: Boundaries at which a later prompt can stop, ascending (for window and state groups).
            first_page: Pages in front of this one are not offered: a chunk that needs one is passed over unless stored.
            places: Places to store in.
        """
        plan = StorePlan([], [], places)
        for group, space in enumerate(spaces):
            geometry = _geometry(space)
            chunks = chunks_to_store(
                geometry.kind, len(keys), geometry.chunk_pages, geometry.window_pages, at or (len(keys),)
            )
            for first, pages in chunks:
                self._plan_chunk(plan, space, group, keys, first, pages, first_page)
        return plan

    def _plan_chunk(
        self,
        plan: StorePlan,
        space: Space,
        group: int,
        keys: Sequence[bytes],
        first: int,
        pages: int,
        first_page: int,
    ) -> None:
        key = keys[first + pages - 1]
        entry = space.chunks.get(key)
        if entry is None or not entry.where & self.readable:
            entry = space.holder(key, pages, self.readable) or entry
        if entry is not None and (entry.where & self.readable or entry.load is not None):
            plan.present += pages
            plan.touched.append(entry)
            return
        if key in space.staged:
            plan.present += pages
            return
        chained = _kind(space) is GroupKind.FULL
        if first < first_page or (chained and first and not self._has_parent(space, keys[first - 1])):
            plan.dropped += pages
            self.counts.add("dropped_chunks", Refusal.NO_PARENT.value)
            return
        form = space.form(pages)
        made = Entry(space, tuple(keys[first : first + pages]), keys[first - 1] if first else b"", form.nbytes)
        if chained:
            space.adopt(made)  # before room is made, so that the chunk it needs is not what makes it
        slot = self.allocate(form)
        if slot is None:
            space.orphan(made)
            plan.dropped += pages
            self.counts.add("dropped_chunks", Refusal.POOL_FULL.value)
            return
        space.staged[key] = made
        plan.reservations.append(Reservation(made, slot, group, first, set(range(_geometry(space).shards))))
        plan.touched.append(made)

    def _has_parent(self, space: Space, key: bytes) -> bool:
        if key in space.staged:
            return True
        return any(entry.where & self.readable for entry in space.holding(key))

    def filled(self, reservation: Reservation, shard: int = 0) -> None:
        """Event: a shard of a reservation is in place.

        Raises:
            UsageError: The reservation has ended or the shard was filled before.
        """
        if not reservation.open or shard not in reservation.missing:
            raise UsageError("a shard of a chunk was reported twice, or after its reservation had ended")
        reservation.missing.discard(shard)

    def publish(self, plan: StorePlan, reservation: Reservation) -> None:
        """Make a reservation of a plan readable, if all its shards are in place, and start writing it to tiers; a long
        store is on its way there while its tail is still being copied. It makes no room for others before `commit`."""
        if reservation.missing or not reservation.open:
            return
        reservation.open = False
        reservation.published = True
        entry, space = reservation.entry, reservation.entry.space
        space.staged.pop(entry.key, None)
        older = space.chunks.get(entry.key)
        if older is not None:  # a copy nobody can read now, on a tier that is down
            self.remove([older], EVERYWHERE)
            space.leave(older)
        space.enter(entry)
        self.enter_pool(entry, reservation.slot)
        self._supersede(entry, POOL)
        self.write_through(entry, plan.places)

    def commit(self, plan: StorePlan) -> list[Entry]:
        """End a store: publish what is filled, abort the rest. Returns the chunks stored, head first."""
        stored: list[Entry] = []
        for reservation in plan.reservations:
            self.publish(plan, reservation)
            if reservation.published:
                stored.append(reservation.entry)
            else:
                self.abort(reservation)
        for entry in reversed(stored):  # the tail first, so that the head is the most recently used
            self.line_up(entry)
        new = set(stored)
        present = [entry for entry in plan.touched if entry.where and entry not in new]
        for entry in present:
            if entry.where & POOL:
                self.write_through(entry, plan.places)
        self.touch(present)
        return stored

    def arrived(self, plan: StorePlan) -> bool:
        """Whether all chunks of a plan are on every tier that they should have gone to. Needs no mutex."""
        wanted = 0
        for tier in self.tiers:
            if tier.rules.write == "through" and tier.rules.admit == "always" and plan.places & tier.bit:
                wanted |= tier.bit
        return not plan.dropped and all(entry.where & wanted == wanted for entry in plan.touched)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's room back; one that has ended is let pass."""
        if reservation.open:
            reservation.open = False
            entry = reservation.entry
            entry.space.staged.pop(entry.key, None)
            entry.space.orphan(entry)
            reservation.slot.release()
            self.counts.add("dropped_chunks", Refusal.ABORTED.value)

    def wrote(self, write: Write, result: WriteResult | None) -> bool:
        """See `Residency.wrote`. A tail leaves a tier of this host only when the longer chunk is there."""
        told = super().wrote(write, result)
        tier = self.tiers[write.tier]
        if write.entry.where & tier.bit and not tier.rules.shared:
            self._supersede(write.entry, tier.bit)
        return told

    def _supersede(self, entry: Entry, places: int) -> None:
        """Remove the tails that a longer chunk of the same window replaces from `places`, where it is itself."""
        space = entry.space
        if _kind(space) is GroupKind.STATE:
            return
        for page in entry.pages[:-1]:
            tail = space.chunks.get(page)
            if tail is None or tail.parent != entry.parent or tail.leases or tail.pins or tail.load is not None:
                continue
            if tail.slot is None or tail.slot.references == 1 or tail.writing:
                self.remove([tail], places, label="superseded_chunks")

    # Load

    def load(self, entry: Entry) -> Load | None:
        """Start reading a chunk into the pool, or join the read under way. None if it cannot be read or there is no
        room; the caller has made sure that it is not in the pool."""
        if entry.load is not None:
            return None if entry.load.late else entry.load
        tier = self._source(entry, self.readable)
        if tier is None:
            return None
        slot = self.allocate(entry.form)
        if slot is None:
            self.counts.add("dropped_chunks", Refusal.POOL_FULL.value)
            return None
        entry.load = Load(entry, slot, tier.number)
        self.out.append(Read(entry.load))
        return entry.load

    def _source(self, entry: Entry, places: int) -> TierState | None:
        for tier in self.tiers:
            if entry.where & places & tier.bit:
                return tier
        return None

    def loaded(self, load: Load, result: ReadResult | None) -> bool:
        """Event: a read has ended; None stands for a failure. Returns whether its waiters can be told now (a read from
        another tier may have been started instead)."""
        entry, tier = load.entry, self.tiers[load.tier]
        name = tier.rules.name
        if result is ReadResult.HIT and not load.doomed:
            self.counts.add("read_chunks", name)
            self.counts.add("read_bytes", name, entry.nbytes)
            entry.load = None
            load.slot.sealed = True
            self.enter_pool(entry, load.slot)
            self.line_up(entry)
            return True
        if result is not ReadResult.HIT:
            reason = {ReadResult.CORRUPT: "corrupt_chunks", ReadResult.MISS: "vanished_chunks"}
            self.counts.add(reason[result] if result else "failed_reads", name)
            self.lose(tier, entry, delete=result is not ReadResult.MISS and tier.up)
            other = self._source(entry, self.readable & ~tier.bit)
            if other is not None and not load.late and not load.doomed:
                load.tier = other.number
                self.out.append(Read(load))
                return False
        entry.load = None
        load.slot.release()
        self.forget_if_gone(entry)
        return True

    def dropped(self, load: Load) -> None:
        """Event: a read was not carried out, which says nothing about the chunk."""
        load.entry.load = None
        load.slot.release()
        self.forget_if_gone(load.entry)

    def gave_up(self, load: Load) -> bool:
        """Event: the deadline of a read has passed. Its slot stays out of use until the read has ended. Returns whether
        there is anybody to tell."""
        if load.entry.load is not load or load.late:
            return False
        load.late = True
        self.counts.add("late_reads", self.tiers[load.tier].rules.name)
        return True

    # Tiers

    def scanned(self, tier: TierState, batch: Iterable[Stored]) -> None:
        """Event: chunks found on a tier, least recently used first. Those of a namespace that nobody has registered yet
        are known by size alone."""
        for stored in batch:
            space = self.spaces.setdefault(stored.key.space, Space(stored.key.space))
            known = space.chunks.get(stored.key.page)
            if known is None:
                geometry = space.geometry
                if geometry is not None and stored.nbytes != space.form(len(stored.pages)).nbytes:
                    self.out.append(Delete(tier.number, [stored.key]))
                    continue
                known = Entry(space, stored.pages, stored.parent, stored.nbytes)
                space.enter(known)
                if geometry is None or geometry.kind is GroupKind.FULL:
                    space.adopt(known)
            if not (known.where | known.writing) & tier.bit:
                tier.used += known.nbytes
                tier.gained(known)

    def tier_opened(self, tier: TierState) -> None:
        """Event: a tier can be used from now on; a scan, where it has one, has been reported."""
        self.set_up(tier, True)
        self.out += [Describe(tier.number, space) for space in self.spaces.values() if space.geometry is not None]

    def reset_tier(self, tier: TierState) -> None:
        """Event: what a tier holds is unknown; a scan follows."""
        for space in list(self.spaces.values()):
            for entry in list(space.chunks.values()):
                self.lose(tier, entry, delete=False)

    def learned(self, tier: TierState, space: Space, pages: tuple[bytes, ...], parent: bytes) -> None:
        """Event: a tier that cannot be listed was asked for a chunk and has it."""
        nbytes = space.form(len(pages)).nbytes
        self.scanned(tier, [Stored(ChunkKey(space.digest, pages[-1]), pages, nbytes, parent)])

    def tick(self) -> None:
        """Event: time has passed. Ends leases, passes on uses, keeps tiers within their capacity."""
        now = self._clock()
        while self.leases:
            lease = next(iter(self.leases.values()))
            if lease.expires > now:
                break
            self.counts.add("expired_leases", "lease")
            self.release(lease)
        for tier in self.tiers:
            if tier.up and tier.touched:
                self.out.append(Touch(tier.number, list(tier.touched)))
                tier.touched.clear()
            if tier.up:
                self.shrink(tier)

    # Operators

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep chunks where they are until they are unpinned as often as they were pinned."""
        for entry in entries:
            entry.pins += 1
            self.pinned.add(entry)
            self.policy.discard(entry)

    def unpin(self, entries: Iterable[Entry]) -> int:
        """Undo `pin`; returns how many chunks are pinned no longer."""
        freed = 0
        for entry in entries:
            if not entry.pins:
                continue
            entry.pins -= 1
            if not entry.pins:
                freed += 1
                self.pinned.discard(entry)
                if entry.where & POOL:
                    self.policy.add(entry)
        return freed

    def evict(self, entries: Iterable[Entry], places: int) -> int:
        """Take chunks out of `places`; those that are pinned or leased stay. Returns how many left."""
        return self.remove([e for e in entries if not e.pins and not e.leases], places)

    def clear(self, spaces: Iterable[Space], places: int) -> int:
        """Take all chunks of `spaces` out of `places`, pinned and leased ones too. Returns how many left."""
        removed = 0
        for space in list(spaces):
            entries = list(space.chunks.values())
            if places & POOL:
                for entry in entries:
                    self.unpin([entry] * entry.pins)
            removed += self.remove(entries, places)
        return removed


def _geometry(space: Space) -> Geometry:
    if space.geometry is None:
        raise LayoutError("the namespace has not been registered with the node")
    return space.geometry


def _kind(space: Space) -> GroupKind:
    return _geometry(space).kind


__all__ = ["CPU", "EVERYWHERE", "Index"]
