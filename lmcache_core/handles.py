"""What a client holds of a node: leases, stores under way, and futures of what is read and written for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lmcache_core.client import Part, Room
from lmcache_core.hostpool import Slot
from lmcache_core.index import Index
from lmcache_core.index.decisions import Lease, Load, StorePlan, Write


class Holding:
    """A lease and the references it has taken on slots. `dropped` is called with one that was let go of unreleased."""

    __slots__ = ("__weakref__", "_dropped", "done", "lease", "shard", "shared", "slots", "tiers")

    def __init__(self, lease: Lease, shard: int, dropped: Callable[[Holding], None]) -> None:
        self.lease = lease
        self.shard = shard
        self.shared = 0
        """The number by which others can join it; 0 is none."""
        self.done = 0
        self.slots: dict[int, Slot] = {}
        self.tiers: dict[int, str] = {}
        self._dropped = dropped

    def release(self, index: Index) -> None:
        """End all access. Called under the mutex."""
        for slot in self.slots.values():
            slot.release()
        self.slots.clear()
        index.release(self.lease)

    def __del__(self) -> None:
        if hasattr(self, "_dropped") and (self.slots or self.lease.active):  # or interrupted while it was made
            self._dropped(self)


class Filling:
    """A store under way. `dropped` is called with one that was let go of unfinished."""

    __slots__ = ("__weakref__", "_dropped", "finished", "joined", "plan", "shard", "shared")

    def __init__(self, plan: StorePlan, shard: int, dropped: Callable[[Filling], None], *, joined: bool) -> None:
        self.plan = plan
        self.shard = shard
        self.shared = 0
        """The number by which others can join it; 0 is none."""
        self.joined: dict[int, Slot] | None = {} if joined else None
        """Of one that somebody else began: the slots that this one keeps from being used otherwise."""
        self.finished = False
        self._dropped = dropped

    def leave(self) -> None:
        """Let go of the slots of a store that was joined. Called under the mutex."""
        self.finished = True
        joined = self.joined or {}
        for slot in joined.values():
            slot.release()
        joined.clear()

    def __del__(self) -> None:
        if not getattr(self, "finished", True):  # it may have been interrupted while it was made
            self._dropped(self)


def reading(load: Load) -> Future[bool]:
    """Whether a chunk that is being read is there, once that is known. Called under the mutex."""
    future = _uncancellable()
    load.waiters.append(future.set_result)
    return future


def arrival(writes: Sequence[Write], outcome: Callable[[], bool]) -> Future[bool]:
    """A future of `outcome` once those of `writes` have ended that are not past their deadline. Called under the mutex.
    Waiters are called on the event loop, one after another."""
    writes = [write for write in writes if not write.late]
    future = _uncancellable()
    left = len(writes)

    def ended(_: bool) -> None:
        nonlocal left
        left -= 1
        if not left:
            future.set_result(outcome())

    for write in writes:
        write.waiters.append(ended)
    if not writes:
        future.set_result(outcome())
    return future


def rooms_of(filling: Filling) -> list[Room]:
    """The rooms of a store that are its client's to fill."""
    rooms = []
    shard, joined = filling.shard, filling.joined
    for number, each in enumerate(filling.plan.reservations):
        if joined is None or number in joined:
            slot = each.slot
            form = slot.form
            start, size = form.header_bytes + shard * form.shard_bytes, form.shard_bytes
            part = Part(each.group, each.first, form.pages)
            rooms.append(Room(part, slot.frame[start : start + size], (filling, number), slot.offset + start))
    return rooms


def _uncancellable() -> Future[bool]:
    """A future that stays open when a coroutine that waits for it is cancelled: whoever sets it must not be hit."""
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()
    return future
