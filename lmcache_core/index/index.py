"""`Index`: namespaces, leases, stores, pins and the passing of time, over `Loading` and `Residency`.

Every method runs on the caller's thread under the node's one mutex. What has to be done besides is appended to
`out` as decisions; the node takes them and answers with further events.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from lmcache_core.counts import Counts
from lmcache_core.errors import LayoutError, LMCacheError, UsageError
from lmcache_core.frame import shape
from lmcache_core.hostpool import HostPool
from lmcache_core.index.boundary import chunks_to_store
from lmcache_core.index.decisions import (
    Describe,
    Found,
    Lease,
    Refusal,
    Reservation,
    StorePlan,
    Touch,
    Write,
)
from lmcache_core.index.entries import POOL, Entry, Geometry, Space
from lmcache_core.index.finding import find
from lmcache_core.index.loading import Loading
from lmcache_core.index.policy import PolicyName
from lmcache_core.index.residency import CPU
from lmcache_core.index.shares import Owner, ShareRules
from lmcache_core.index.tiers import TierRules
from lmcache_core.namespace import GroupKind
from lmcache_core.protocols import WriteResult

EVERYWHERE = -1
"""Mask of all places."""


class Index(Loading):
    """What is where, for all namespaces of a node.

    Args:
        pool: The host pool.
        tiers: Rules of the tiers, fastest first.
        policy: Order of eviction of the pool.
        lease_timeout: Seconds until a lease ends by itself.
        clock: Monotonic seconds.
        counts: Where to count.
        shares: What owners are due that are not like the others.
        share_timeout: Seconds without use after which an owner's chunks are the first to go.
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
        shares: Sequence[ShareRules] = (),
        share_timeout: float = math.inf,
    ) -> None:
        super().__init__(pool, policy, tiers, Counts() if counts is None else counts, shares)
        self.spaces: dict[bytes, Space] = {}
        self.leases: OrderedDict[int, Lease] = OrderedDict()
        self.frozen = False
        """Nothing new is stored; what is there is served."""
        self._lease_timeout = lease_timeout
        self.clock = clock
        self._share_timeout = share_timeout
        self._numbers = 0
        self._second_touch = 0
        for tier in self.tiers:
            if tier.rules.admit != "always":
                self._second_touch |= tier.bit

    # Spaces

    def add_space(self, digest: bytes, geometry: Geometry, model: str = "") -> Space:
        """`add_spaces` of one."""
        return self.add_spaces({digest: geometry}, model)[0]

    def add_spaces(self, geometries: Mapping[bytes, Geometry], model: str = "") -> list[Space]:
        """Register the groups of a namespace, whose chunks count for `model`; the same again are the same spaces.

        Raises:
            LayoutError: One was registered with other sizes, or its chunks are too large to be handled.
        """
        for digest, geometry in geometries.items():
            shape(geometry.chunk_pages, geometry.shards, geometry.page_bytes)
            known = self.spaces.get(digest)
            if known is not None and known.geometry not in (None, geometry):
                raise LayoutError(
                    f"the namespace is in use with {known.geometry}, not {geometry}; all users of a node need the same "
                    "chunk_tokens and page_tokens"
                )
        owner = self.owner("model", model)
        spaces, new = [], set()
        for digest, geometry in geometries.items():
            space = self.spaces.setdefault(digest, Space(digest))
            spaces.append(space)
            if space.geometry is None:
                new.add(space)
                space.geometry = geometry
                wrong = [e for e in space.chunks.values() if e.nbytes != space.form(len(e.pages)).nbytes]
                self.remove(wrong, EVERYWHERE)
                self.out += [Describe(tier.number, space) for tier in self.tiers if tier.up]
        self._claim(new, owner)
        return spaces

    def _claim(self, spaces: Collection[Space], owner: Owner) -> None:
        """What was found of `spaces` before they were registered counts for `owner`, in the order in which it was."""
        found = self.owners.get(("unclaimed", ""))
        for space in spaces:
            space.owner = owner
        if found is None or not spaces:
            return
        for tier in self.tiers:
            for entry in [entry for entry in found.shares[tier.number + 1].order if entry.space in spaces]:
                tier.policy.move(entry, owner)
        for space in spaces:
            for entry in space.chunks.values():
                entry.owner = owner
        if found.empty:
            self._forget_owner(found)

    # Lookup

    def find(self, spaces: Sequence[Space], keys: Sequence[bytes], places: int = EVERYWHERE) -> Found:
        """What can be restored of a prompt from `places`; see `finding.find`."""
        return find(spaces, keys, self.readable & places)

    def lease(self, found: Found) -> Lease:
        """Keep what was found, and note its use: chunks are touched from tail to head, so that tails go first."""
        self._numbers += 1
        lease = Lease(self._numbers, found, self.clock() + self._lease_timeout)
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
            owner = entry.owner
            owner.used = True
            if entry.where & POOL:
                owner.shares[0].order.touch(entry)
                self.unwritten.touch(entry)
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
        most: int | None = None,
        tenant: str = "",
    ) -> StorePlan:
        """Reserve room for what a prompt lacks. Every reservation must be committed or aborted.

        Args:
            spaces: The groups of a namespace, in order.
            keys: Keys of the prompt's whole pages.
            at: Boundaries at which a later prompt can stop, ascending (for window and state groups).
            first_page: Pages in front of this one are not offered: a chunk that needs one is passed over unless stored.
            places: Places to store in.
            most: Chunks to plan now; all by default. Go on with `plan_more` while there is a `rest`, and let others
                have the mutex between the calls.
            tenant: Whose the chunks will be; the model's without one.
        """
        plan = StorePlan([], [], places, keys=keys, first_page=first_page, tenant=tenant)
        if keys:
            for group, space in enumerate(spaces):
                geometry = space.known
                chunks = chunks_to_store(
                    geometry.kind, len(keys), geometry.chunk_pages, geometry.window_pages, at or (len(keys),)
                )
                plan.rest.extend((space, group, first, pages) for first, pages in chunks)
            self.plan_more(plan, most)
        return plan

    def plan_more(self, plan: StorePlan, most: int | None = None) -> None:
        """Reserve room for the next `most` chunks of a plan, all by default."""
        left = len(plan.rest) if most is None else min(most, len(plan.rest))
        tenant = self.tenant(plan.tenant) if plan.tenant else None
        try:
            for _ in range(left):
                self._plan_chunk(plan, tenant, *plan.rest.popleft())
        except LMCacheError:  # nothing stays reserved; what nobody foresaw is beyond mending here
            for reservation in plan.reservations:
                self.abort(reservation)
            raise

    def _plan_chunk(
        self, plan: StorePlan, tenant: Owner | None, space: Space, group: int, first: int, pages: int
    ) -> None:
        keys = plan.keys
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
        if self.frozen:
            plan.dropped += pages
            self.counts.add("dropped_chunks", Refusal.FROZEN.value)
            return
        geometry = space.known
        chained = geometry.kind is GroupKind.FULL
        if first < plan.first_page or (chained and first and not self._has_parent(space, keys[first - 1])):
            plan.dropped += pages
            self.counts.add("dropped_chunks", Refusal.NO_PARENT.value)
            return
        form = space.form(pages)
        owner = space.owner if tenant is None else tenant
        owner.used = True
        made = Entry(space, tuple(keys[first : first + pages]), keys[first - 1] if first else b"", form.nbytes, owner)
        if chained:
            space.chains.adopt(made)  # before room is made, so that the chunk it needs is not what makes it
        slot = self.allocate(form, owner)
        if slot is None:
            space.chains.orphan(made)
            plan.dropped += pages
            return
        space.staged[key] = made
        plan.reservations.append(Reservation(made, slot, group, first, set(range(geometry.shards))))
        plan.touched.append(made)

    def _has_parent(self, space: Space, key: bytes) -> bool:
        if key in space.staged:
            return True
        return any(entry.where & self.readable for entry in space.holding(key))

    def filled(self, plan: StorePlan, reservation: Reservation, shard: int = 0) -> None:
        """Event: a shard of a reservation is in place. Once all are, the chunk is readable and on its way to tiers; the
        tail of a long store may still be being copied. It makes no room for others before `commit`.

        Raises:
            UsageError: The reservation has ended or the shard was filled before.
        """
        if not reservation.open or shard not in reservation.missing:
            raise UsageError("a shard of a chunk was reported twice, or after its reservation had ended")
        reservation.missing.discard(shard)
        if reservation.missing:
            return
        entry, space = reservation.entry, reservation.entry.space
        older = space.chunks.get(entry.key)
        if older is not None and older.readable(self.readable):  # since a write has ended that was under way
            self._withdraw(reservation)
            plan.touched[plan.touched.index(entry)] = older
            plan.present += len(entry.pages)
            return
        reservation.open = False
        reservation.published = True
        space.staged.pop(entry.key, None)
        if older is not None:  # a copy nobody can read now, on a tier that is down
            self.remove([older], EVERYWHERE)
            space.leave(older)
        space.enter(entry)
        self.enter_pool(entry, reservation.slot)
        self._supersede(entry, POOL)
        self.write_through(entry, plan.places)

    def commit(self, plan: StorePlan) -> list[Entry]:
        """End a store: abort what is not filled. Returns the chunks stored, head first."""
        while plan.rest:
            plan.dropped += plan.rest.popleft()[3]
        stored: list[Entry] = []
        for reservation in plan.reservations:
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
        self.spill_ahead()
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
            self._withdraw(reservation)
            self.counts.add("dropped_chunks", Refusal.ABORTED.value)

    def _withdraw(self, reservation: Reservation) -> None:
        reservation.open = False
        entry = reservation.entry
        entry.space.staged.pop(entry.key, None)
        entry.space.chains.orphan(entry)
        self.policy.refund(entry)
        reservation.slot.release()

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
        if space.kind is GroupKind.STATE or space.chunks.keys().isdisjoint(inner := entry.pages[:-1]):
            return
        for page in inner:
            tail = space.chunks.get(page)
            if tail is None or tail.parent != entry.parent or tail.leases or tail.pins or tail.load is not None:
                continue
            if tail.slot is None or tail.slot.references == 1 or tail.writing:
                self.remove([tail], places, label="superseded_chunks")

    def tick(self) -> None:
        """Event: time has passed. Ends leases, passes on uses, keeps tiers within their capacity and owners within
        their quotas."""
        now = self.clock()
        while self.leases:
            lease = next(iter(self.leases.values()))
            if lease.expires > now:
                break
            self.counts.add("expired_leases", "lease")
            self.release(lease)
        for owner in list(self.owners.values()):
            if owner.used:
                owner.used, owner.since = False, now
            elif owner.kind != "model" and owner.empty:
                self._forget_owner(owner)
            owner.idle = now - owner.since > self._share_timeout
        for tier in self.tiers:
            if tier.up and tier.touched:
                self.out.append(Touch(tier.number, list(tier.touched)))
                tier.touched.clear()
            if tier.up:
                (self.shrink if tier.rules.evictable else self.forget_oldest)(tier)

    # Operators

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep chunks where they are until they are unpinned as often as they were pinned."""
        for entry in entries:
            if entry.where & POOL and not entry.pins:
                self._resident -= entry.nbytes
            entry.pins += 1
            self.pinned.add(entry)
            self.policy.discard(entry)
            self.unwritten.discard(entry)

    def unpin(self, entries: Iterable[Entry]) -> int:
        """Undo `pin`; returns how many chunks are pinned no longer."""
        freed = 0
        for entry in entries:
            if entry not in self.pinned:
                continue  # it has gone
            entry.pins -= 1
            if not entry.pins:
                freed += 1
                self.pinned.discard(entry)
                if entry.where & POOL:
                    self._resident += entry.nbytes
                    self._note_unwritten(entry)
                self.line_up(entry)
        return freed

    def evict(self, entries: Iterable[Entry], places: int) -> int:
        """Take chunks out of `places`; those that are pinned or leased stay. Returns how many left."""
        return self.remove([e for e in entries if not e.pins and not e.leases], places)

    def clear(self, entries: Iterable[Entry], places: int) -> int:
        """Take chunks out of `places`, pinned and leased ones too, but for those that have gone since they were listed.
        What is still elsewhere stays pinned there. Returns how many left."""
        return self.remove([entry for entry in entries if entry.space.chunks.get(entry.key) is entry], places)


__all__ = ["CPU", "EVERYWHERE", "Index"]
