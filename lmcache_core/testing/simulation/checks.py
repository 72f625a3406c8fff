"""What must hold whenever nothing runs, and what must hold at rest."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_core.hostpool import Slot
from lmcache_core.index import POOL, Entry, Index
from lmcache_core.index.decisions import Lease, Read, StorePlan
from lmcache_core.node import Node
from lmcache_core.testing.simulation.backend import LocalBackend, SimulatedBackend
from lmcache_core.testing.simulation.trace import Trace

__all__ = ["Lent", "Watcher"]


class Lent:
    """Slots that engines of one node have been given, however they got them. Holds no handle, so that one that is let
    go of is let go of."""

    def __init__(self) -> None:
        self.plans: list[StorePlan] = []
        self.held: list[tuple[dict[int, Slot], Lease | None]] = []
        """What handles keep, and the lease that they may take more for."""

    def slots(self) -> Iterable[Slot]:
        """All that are kept from being used otherwise."""
        self.plans = [plan for plan in self.plans if any(each.open for each in plan.reservations) or plan.rest]
        for plan in self.plans:
            yield from (each.slot for each in plan.reservations if each.open)
        self.held = [(slots, lease) for slots, lease in self.held if slots or (lease is not None and lease.active)]
        for slots, _ in self.held:
            yield from slots.values()


class Watcher:
    """Checks of one node."""

    def __init__(self, name: str, node: Node, backends: list[SimulatedBackend], lent: Lent, trace: Trace) -> None:
        self.name = name
        self.node = node
        self.backends = backends
        self.lent = lent
        self._trace = trace
        self._counted: dict[tuple[str, str], float] = {}

    def _hold(self, truth: bool, what: str) -> None:
        if not truth:
            self._trace.fail(f"{self.name}: {what}")

    def quick(self) -> None:
        """What can be checked after every step."""
        guard = self.node.guard
        if guard.broken:
            self._trace.fail(f"{self.name}: {guard.refusal}")

    def entries(self) -> list[Entry]:
        """All that the index knows."""
        spaces = self.node.guard.index.spaces.values()
        found = [entry for space in spaces for entry in space.chunks.values()]
        return found + [entry for space in spaces for entry in space.staged.values()]

    def full(self) -> None:
        """Slots and bytes are those of the chunks, of what is under way and of what engines have."""
        index, pool = self.node.guard.index, self.node.pool
        entries = self.entries()
        used = {entry.slot for entry in entries if entry.slot is not None}
        loads = [entry.load for entry in entries if entry.load is not None]
        loads += [load.twin for load in loads if load.twin is not None]
        loads += [each.load for each in index.out if isinstance(each, Read)]  # beaten before it was begun
        used.update(load.slot for load in loads)
        for runner in self.node.runners:  # also of chunks that have been stored anew meanwhile
            used.update(load.slot for load in (*runner._timers, *runner._overdue))
        used.update(write.slot for writes in index.writes.values() for write in writes)
        used.update(self.lent.slots())
        self._hold(all(slot.references > 0 for slot in used), "a slot is in use and has been freed")
        self._hold(pool.slots == len(used), f"{pool.slots} slots are held, and {len(used)} are accounted for")
        self._hold(pool.used == sum(slot.form.nbytes for slot in used), "the pool's bytes are not those of its slots")
        for entry in entries:
            self._hold(bool(entry.where & POOL) == (entry.slot is not None), "a chunk of the pool has no slot")
            self._hold(entry.leases >= 0 and entry.pins >= 0, "more leases or pins have ended than there were")
        for runner, tier, backend in zip(self.node.runners, index.tiers, self.backends, strict=True):
            if runner.up and isinstance(backend, LocalBackend):
                medium = backend.medium
                for entry in entries:
                    if entry.where & tier.bit and not medium.may_hold(entry.chunk_key):
                        self._trace.fail(f"{self.name}: {tier.rules.name} is said to hold {entry}")
            writes = [write for each in index.writes.values() for write in each if write.tier == tier.number]
            held = sum(entry.nbytes for entry in entries if entry.where & tier.bit)
            pending = sum(write.entry.nbytes for write in writes)
            name = tier.rules.name
            self._hold(tier.used == held + pending, f"{name}: {tier.used} bytes used, {held + pending} found")
            self._hold(tier.pending == pending, f"{name}: {tier.pending} bytes pending, {pending} found")
            bound = tier.rules.pending_limit + 2 * max((write.entry.nbytes for write in writes), default=0)
            self._hold(pending <= bound, f"{name}: its queue has {pending} bytes, more than its bound")
            late = runner.health.quarantined
            self._hold(late >= 0, f"{name}: less than nothing is in quarantine")
            self._hold(late <= runner.config.quarantine or not runner.up, f"{name}: {late} bytes are in quarantine")
        self._owners(index, entries)

    def _owners(self, index: Index, entries: list[Entry]) -> None:
        for tier in index.tiers:
            total = sum(owner.shares[tier.number + 1].held for owner in index.owners.values())
            self._hold(total == tier.used, f"{tier.rules.name}: owners hold {total}, the tier has {tier.used}")

    def counters(self) -> None:
        """Counters only grow, and tell of no more than the backends have done."""
        counts = self.node.counts
        for key, value in self._counted.items():
            self._hold(counts.get(*key) >= value, f"the counter {key} has become smaller")
        self._counted = dict(counts._values)
        for runner, backend in zip(self.node.runners, self.backends, strict=True):
            name = runner.config.name
            self._hold(counts.get("read_chunks", name) <= backend.hits, f"{name}: more read than its backend gave")
            self._hold(counts.get("written_chunks", name) <= backend.stored, f"{name}: more written than it took")

    def at_rest(self) -> None:
        """Nothing is leased, staged, pinned or under way, and every slot is a resident chunk's."""
        self.full()
        self.counters()
        index, entries = self.node.guard.index, self.entries()
        self._hold(not index.leases, f"{len(index.leases)} leases are left")
        self._hold(not index.pinned, f"{len(index.pinned)} chunks are pinned")
        self._hold(not index.writes, "writes are left")
        self._hold(not any(space.staged for space in index.spaces.values()), "chunks are staged")
        busy = [entry for entry in entries if entry.leases or entry.pins or entry.load or entry.writing or entry.doomed]
        self._hold(not busy, f"something is being done with {busy[:3]}")
        resident = sum(entry.slot is not None for entry in entries)
        self._hold(self.node.pool.slots == resident, f"{self.node.pool.slots} slots for {resident} chunks")
        for tier, runner in zip(index.tiers, self.node.runners, strict=True):
            self._hold(not runner.queued, f"{tier.rules.name}: {runner.queued} operations are left")
            self._hold(not runner.health.quarantined, f"{tier.rules.name}: quarantine is not over")

    def empty(self) -> None:
        """After a clear nothing is left, nor on a medium but for what a delete has failed to remove."""
        self._hold(self.node.pool.used == 0, f"{self.node.pool.used} bytes of the pool are used by nothing")
        index = self.node.guard.index
        left = [entry for entry in self.entries() if entry.where & index.readable]
        self._hold(not left, f"a clear has left {left[:3]}")
        for runner, backend in zip(self.node.runners, self.backends, strict=True):
            if isinstance(backend, LocalBackend):
                there = [key for key in backend.medium.values if key.space in index.spaces]
                orphans = [key for key in there if key not in runner._undeleted]
                self._hold(not orphans, f"{runner.config.name}: {len(orphans)} values are there and nobody knows")
