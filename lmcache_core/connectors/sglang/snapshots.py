"""Pages that stand for themselves: of sliding windows and recurrent state, only what lies at the end of a prefix is
needed, so each is found, read and stored without those in front of it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_core.client import AHEAD, Client, Held, Model
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.connectors.sglang.pagestore import result_of
from lmcache_core.protocols import KVView

__all__ = ["Snapshots", "restorable"]

MOST_KEPT = 4096
"""Pages that are kept until they are read."""


class Snapshots:
    """See the module. Methods may be called from any thread, and raise what the client raises.

    Args:
        client: Of the node.
        model: What is stored, of one group of states, registered with it.
        options: Of the user.
        clock: In seconds.
    """

    def __init__(
        self, client: Client, model: Model, options: Options, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self._model = model
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Held, float]] = OrderedDict()

    def present(self, keys: Sequence[bytes], needed: int) -> list[bool]:
        """For each of these pages whether it can be read; one that could not be asked for in time cannot.

        Args:
            keys: Of the pages of a prefix.
            needed: Pages at its end that have to be there. Those are kept until they have been read.
        """
        deadline = self._clock() + self._options.lookup_timeout
        there = [False] * len(keys)
        first = max(0, len(keys) - needed)
        for place in range(first, len(keys)):
            there[place] = self._keep(keys[place], deadline)
        for place in range(first - 1, -1, -1):
            if self._clock() >= deadline:
                break
            there[place] = self.client.lookup(self._model, [keys[place]], quiet=True).pages == 1
        return there

    def _hold(self, key: bytes, deadline: float) -> Held | None:
        held = self.client.hold(self._model, [key])
        if not held.pages and held.asked is not None:
            self.client.release(held)
            result_of(held.asked, deadline - self._clock())
            held = self.client.hold(self._model, [key])
        if not held.pages:
            self.client.release(held)
            return None
        return held

    def _keep(self, key: bytes, deadline: float) -> bool:
        held = self._hold(key, deadline)
        if held is None:
            return False
        now = self._clock()
        until = now + self._options.read_timeout + 1024 * self._options.read_timeout_per_ki_token
        with self._lock:
            gone = [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = held, until
            while len(self._kept) > MOST_KEPT or next(iter(self._kept.values()))[1] <= now:
                gone.append(self._kept.popitem(last=False)[1])
        for old, _ in gone:
            self.client.release(old)
        return True

    def get(self, keys: Sequence[bytes], view: KVView) -> list[bool]:
        """Copy these pages into those of the view, page `i` into page `i`. For each whether it is there: whole, and as
        it was stored."""
        deadline = self._clock() + self._options.read_timeout
        return [self._get(key, view, place, deadline) for place, key in enumerate(keys)]

    def _get(self, key: bytes, view: KVView, place: int, deadline: float) -> bool:
        with self._lock:
            kept = self._kept.pop(key, None)
        held = kept[0] if kept is not None else self._hold(key, deadline)
        if held is None:
            return False
        try:
            while self._clock() < deadline:
                granted = self.client.grant(held, 0, AHEAD)
                if not granted:
                    return False
                (grant,) = granted
                if grant.source is not None:
                    view.scatter(0, place, 1, grant.source)
                    self.client.consume(held, 1)
                    self.client.count("copied_bytes", "to_engine", len(grant.source))
                    return True
                if grant.wait is None or not result_of(grant.wait, deadline - self._clock()):
                    return False
            return False
        finally:
            self.client.release(held)

    def set(self, keys: Sequence[bytes], view: KVView) -> list[bool]:
        """Store these pages, page `i` from page `i` of the view; those that are stored already stay as they are. For
        each whether it is stored now."""
        if not keys:
            return []
        storing = self.client.begin_store(self._model, keys, at=range(1, len(keys) + 1))
        copied = 0
        try:
            for room in storing.rooms:
                view.gather(0, room.part.first, 1, room.target)
                copied += len(room.target)
                self.client.filled(room)
        finally:
            finished = self.client.finish_store(storing)
        self.client.count("copied_bytes", "from_engine", copied)
        if not storing.dropped and finished.pages == len(storing.rooms):
            return [True] * len(keys)
        return [self.client.lookup(self._model, [key], quiet=True).pages == 1 for key in keys]

    def clear(self) -> int:
        """Take all that is stored of this model out of all tiers. Returns how many chunks."""
        self.close()
        return self.client.clear(self._model)

    def close(self) -> None:
        """Let go of what is kept."""
        with self._lock:
            gone, self._kept = self._kept, OrderedDict()
        for held, _ in gone.values():
            self.client.release(held)


def restorable(there: Sequence[bool], trailing: int) -> list[int]:
    """The lengths of prefixes of which the last `trailing` pages, or all if it is shorter, are there."""
    run, found = 0, []
    for place, page in enumerate(there):
        run = run + 1 if page else 0
        if run >= min(trailing, place + 1):
            found.append(place + 1)
    return found
