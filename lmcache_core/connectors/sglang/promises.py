"""What look-ups have found, kept by leases until it is read, superseded, or too old.

An engine asks first how much of a run of pages there is, and reads it later, batch by batch, or never. A `Promise`
holds what was found; `Promises` keeps a bounded number of them, to be found by any of their pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_core.client import Client, Grant, Held

__all__ = ["Promise", "Promises", "Segment"]


class Segment:
    """A stretch of a run that one lease covers. `first` is its first page, counted from the run's start: below 0 where
    the chunk begins in front of it."""

    def __init__(self, first: int, held: Held) -> None:
        self.first = first
        self.held = held
        self.granted: dict[int, Grant] = {}
        """By the part's number: what was granted and is not copied yet."""
        self.consumed = 0
        """Parts from the front that need not be kept any more."""

    @property
    def end(self) -> int:
        return self.first + self.held.pages


class Promise:
    """See the module.

    Args:
        client: Of the node.
        keys: Of the pages found.
        segments: That cover them, one behind the other.
        until: When it is too old.
    """

    def __init__(self, client: Client, keys: Sequence[bytes], segments: Sequence[Segment], until: float) -> None:
        self.keys = list(keys)
        self.segments = list(segments)
        self.until = until
        self.read = 0
        """Pages from the front that have been read, or passed over."""
        self.busy = False
        self.ended = False
        self._client = client
        self._places = {key: place for place, key in enumerate(self.keys)}

    def place(self, keys: Sequence[bytes]) -> int | None:
        """Where in the run these pages begin; None if not all that is asked for and promised is the same."""
        at = self._places.get(keys[0])
        if at is None or at < self.read:
            return None
        known = self.keys[at : at + len(keys)]
        return at if list(keys[: len(known)]) == known else None

    def release(self) -> None:
        """Let go of all leases."""
        for segment in self.segments:
            segment.granted.clear()
            self._client.release(segment.held)
        self.segments.clear()


class Promises:
    """The promises of one rank. All methods may be called from any thread.

    Args:
        most: How many are kept.
        clock: In seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Promise] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, promise: Promise) -> None:
        """Keep one. Those for the same run, too old ones, and the oldest above the bound are let go of."""
        now = self._clock()
        with self._lock:
            gone = [
                number for number, each in self._kept.items() if each.until <= now or each.keys[:1] == promise.keys[:1]
            ]
            self._numbers += 1
            self._kept[self._numbers] = promise
            gone += list(self._kept)[: max(0, len(self._kept) - len(gone) - self._most)]
            ended = self._take(gone)
        self._release(ended)

    def take(self, keys: Sequence[bytes]) -> tuple[Promise, int] | None:
        """The newest promise that has these pages, and where in it they begin. It is the caller's until `give_back`."""
        now = self._clock()
        with self._lock:
            old = [number for number, each in self._kept.items() if each.until <= now]
            ended = self._take(old)
            found = None
            for each in reversed(self._kept.values()):
                at = None if each.busy else each.place(keys)
                if at is not None:
                    each.busy = True
                    found = each, at
                    break
        self._release(ended)
        return found

    def give_back(self, promise: Promise, *, keep: bool) -> None:
        """Nobody copies from it any more. It is kept as long as there is more to read, if it shall be."""
        with self._lock:
            promise.busy = False
            if not keep or promise.read >= len(promise.keys):
                promise.ended = True
                for number, each in list(self._kept.items()):
                    if each is promise:
                        del self._kept[number]
            ended = promise.ended
        if ended:
            promise.release()

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            ended = self._take(list(self._kept))
        self._release(ended)

    def _take(self, numbers: Sequence[int]) -> list[Promise]:
        """Those that can be released now: whoever is copying from one releases it when done."""
        gone = [self._kept.pop(number) for number in dict.fromkeys(numbers) if number in self._kept]
        for each in gone:
            each.ended = True
        return [each for each in gone if not each.busy]

    @staticmethod
    def _release(ended: Sequence[Promise]) -> None:
        for each in ended:
            each.release()
