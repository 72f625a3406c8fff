"""Finding, reading and storing runs of pages for an engine that keeps pages of its own in host memory.

The engine names a page by a key that stands for all tokens up to its end. It stores a run of pages when it has
computed them, wherever in a prompt they begin, and asks for a run of them behind what it has itself. Chunks begin at
multiples of their size from the prompt's start:

    pages of a prompt   | 0 1 2 3 | 4 5 6 7 | 8 9 ...
    stored first          0 1 2 3   4 5
    then                                6 7   8 9      the second chunk is made anew of 4 5, which are here, and 6 7

A run whose place in the prompt is not known, or whose chunk's beginning is gone, begins chunks of its own. So what is
found of a run may be of several stretches, each looked up by itself.

All calls end within their time. What comes late is copied nowhere.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from lmcache_core.client import AHEAD, Client, Grant, Held, Model, Storing
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.connectors.sglang.promises import Promise, Promises, Segment
from lmcache_core.protocols import KVView

__all__ = ["PageStore", "result_of"]

MOST_SEGMENTS = 32
"""Stretches of a run that are looked up by themselves at most."""
MOST_FAILED = 4096
"""Pages that are remembered to have failed."""


class PageStore:
    """See the module. Methods may be called from any thread, and raise what the client raises.

    Args:
        client: Of the node.
        model: What is stored, registered with it.
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
        self._promises = Promises(options.promises, clock)
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        self._failed_lock = threading.Lock()
        self.page_tokens = model.namespace.page_tokens

    @property
    def _chunk_pages(self) -> int:
        return -(-self.client.chunk_tokens // self.page_tokens)

    def needed_from(self, prefix: int) -> int:
        """Of a prefix of so many pages, the first that has to be told: those in front of it may be left out."""
        return max(0, prefix // self._chunk_pages - 1) * self._chunk_pages

    @property
    def promises(self) -> int:
        """How many look-ups are kept."""
        return len(self._promises)

    # Finding

    def exists(self, keys: Sequence[bytes], prefix: Sequence[bytes] = ()) -> int:
        """How many of these pages can be read, from the first on. They are kept until they have been read, or the time
        has passed in which the engine reads them.

        Args:
            keys: Of the pages.
            prefix: Keys of those in front of them, from the prompt's start or as `needed_from` says. None where that is
                not known.
        """
        keys = keys[: self._first_failed(keys)]
        if not keys:
            return 0
        promise = self._find(keys, prefix, self._clock() + self._options.lookup_timeout, counted=True)
        pages = len(promise.keys)
        if pages:
            self._promises.add(promise)
        return pages

    def _read_seconds(self, pages: int) -> float:
        tokens = pages * self.page_tokens
        return self._options.read_timeout + self._options.read_timeout_per_ki_token * tokens / 1024

    def _find(self, keys: Sequence[bytes], prefix: Sequence[bytes], deadline: float, *, counted: bool) -> Promise:
        lead = list(prefix[len(prefix) // self._chunk_pages * self._chunk_pages :])
        run = [*lead, *keys]
        segments: list[Segment] = []
        reached, first = 0, -len(lead)
        try:
            while reached < len(keys) and len(segments) < MOST_SEGMENTS:
                held = self._hold(run[first + len(lead) :], deadline, counted=counted)
                counted = False
                if first + held.pages > reached:
                    segments.append(Segment(first, held))
                    reached = first = first + held.pages
                    if held.pages % self._chunk_pages == 0:
                        break  # no chunk begins there, or it would have been found
                    continue
                self.client.release(held)
                if first == reached:
                    break
                first = reached  # without the pages in front of it
        except BaseException:  # whatever it is, nothing stays leased
            for segment in segments:
                self.client.release(segment.held)
            raise
        until = self._clock() + self._read_seconds(reached)
        return Promise(self.client, keys[:reached], segments, until)

    def _hold(self, keys: Sequence[bytes], deadline: float, *, counted: bool) -> Held:
        held = self.client.hold(self._model, keys, counted=counted)
        if held.asked is not None:
            self.client.release(held)
            result_of(held.asked, deadline - self._clock())
            held = self.client.hold(self._model, keys, counted=counted)
        return held

    # Reading

    def get(self, keys: Sequence[bytes], view: KVView, prefix: Sequence[bytes] = ()) -> int:
        """Copy these pages into those of the view, page `i` into page `i`. Returns how many, from the first on, are
        there: whole, and as they were stored."""
        if not keys:
            return 0
        deadline = self._clock() + self._read_seconds(len(keys))
        done = 0
        taken = self._promises.take(keys)
        if taken is not None:
            done = self._read_kept(*taken, len(keys), view, deadline)
        if done < len(keys) and self._clock() < deadline:
            promise = self._find(keys[done:], [*prefix, *keys[:done]], deadline, counted=taken is None)
            try:
                done += self._read(promise, 0, len(keys) - done, view, done, deadline)
            finally:
                promise.release()
        if done < len(keys):
            self._note_failed(keys[done])
        return done

    def _read_kept(self, promise: Promise, at: int, pages: int, view: KVView, deadline: float) -> int:
        whole = False
        try:
            done = self._read(promise, at, pages, view, 0, deadline)
            whole = done == pages
            return done
        finally:
            self._promises.give_back(promise, keep=whole)

    def _read(self, promise: Promise, at: int, pages: int, view: KVView, to: int, deadline: float) -> int:
        """Copy `pages` pages from number `at` of a promise to number `to` of the view and on."""
        end = min(at + pages, len(promise.keys))
        done = at
        started = time.perf_counter()
        copied = 0
        tiers: dict[str, int] = {}
        for segment in promise.segments:
            for number, part in enumerate(segment.held.parts):
                first = segment.first + part.first
                last = first + part.pages
                if number < segment.consumed or first >= end:
                    continue
                if last <= done:
                    self._consume(segment, number)
                    continue
                grant = self._granted(segment, number, deadline)
                if grant is None or grant.source is None or self._clock() >= deadline:
                    break
                page_bytes = len(grant.source) // part.pages
                count = min(last, end) - done
                start = (done - first) * page_bytes
                view.scatter(0, to + done - at, count, grant.source[start : start + count * page_bytes])
                copied += count * page_bytes
                tiers[grant.tier] = tiers.get(grant.tier, 0) + count
                done += count
                promise.read = done
                if done == last:
                    self._consume(segment, number)
            if done < min(segment.end, end):
                break
        if copied:
            self.client.count("copied_bytes", "to_engine", copied)
            self.client.count("copy_seconds", "to_engine", time.perf_counter() - started)
        for tier, count in tiers.items():
            self.client.count("retrieved_tokens", tier, count * self.page_tokens)
        return done - at

    def _consume(self, segment: Segment, number: int) -> None:
        segment.granted.pop(number, None)
        self.client.consume(segment.held, number + 1 - segment.consumed)
        segment.consumed = number + 1

    def _granted(self, segment: Segment, number: int, deadline: float) -> Grant | None:
        """Access to a part; None if it cannot be had in time."""
        grant = segment.granted.get(number)
        while grant is None or grant.source is None:
            if grant is not None and (grant.wait is None or not result_of(grant.wait, deadline - self._clock())):
                return None
            segment.granted.pop(number, None)
            granted = self.client.grant(segment.held, number, AHEAD)
            if not granted:
                return None
            for place, each in enumerate(granted, number):
                segment.granted[place] = each
            grant = granted[0]
        return grant

    # Storing

    def set(self, keys: Sequence[bytes], view: KVView, prefix: Sequence[bytes] = ()) -> int:
        """Store these pages, page `i` from page `i` of the view; those that are stored already stay as they are.
        Returns how many, from the first on, are stored now."""
        if not keys:
            return 0
        self._forget_failed(keys)
        step = self._chunk_pages
        front = list(prefix[len(prefix) // step * step :])
        parent = list(prefix[max(0, len(prefix) - len(front) - step) : len(prefix) - len(front)])
        if len(parent) < step:
            parent = []
        stored = self._store(keys, view, parent, front)
        if stored is None and parent:  # the chunk in front of it is gone
            stored = self._store(keys, view, [], front)
        if stored is None:
            stored = self._store(keys, view, [], [])
        return stored or 0

    def _store(
        self, keys: Sequence[bytes], view: KVView, parent: Sequence[bytes], front: Sequence[bytes]
    ) -> int | None:
        """Store a run behind the chunk `parent`, in chunks of which the first begins with the pages `front`. None if
        that cannot be, since those are not to be had."""
        head = self._front(front) if front else None
        if front and head is None:
            return None
        try:
            offered = [*parent, *front, *keys]
            storing = self.client.begin_store(self._model, offered, first_page=len(parent))
            if not storing.rooms and storing.dropped and storing.present < len(parent):
                self.client.finish_store(storing)
                return None
            try:
                self._fill(storing, view, len(parent), len(front), head)
            finally:
                finished = self.client.finish_store(storing)
        finally:
            if head is not None:
                head.release()
        tokens = self.page_tokens
        self.client.count("stored_tokens", "store", finished.pages * tokens)
        self.client.count("present_tokens", "store", storing.present * tokens)
        rooms = sum(room.part.pages for room in storing.rooms)
        if not storing.dropped and finished.pages == rooms:
            return len(keys)
        run = [*front, *keys]
        return max(0, self.client.lookup(self._model, run, quiet=True).pages - len(front))

    def _fill(self, storing: Storing, view: KVView, parent: int, front: int, head: _Front | None) -> None:
        copied = 0
        started = time.perf_counter()
        for room in storing.rooms:
            part = room.part
            first = part.first - parent - front  # counted from the run's start
            there = max(0, -first)
            page_bytes = len(room.target) // part.pages
            if there:
                assert head is not None
                head.copy(first + front, room.target[: there * page_bytes])
                head.release()  # or the chunk that it lies in could not be replaced by this one
            if part.pages > there:
                view.gather(0, first + there, part.pages - there, room.target[there * page_bytes :])
            copied += len(room.target)
            self.client.filled(room)
        if copied:
            self.client.count("copied_bytes", "from_engine", copied)
            self.client.count("copy_seconds", "from_engine", time.perf_counter() - started)

    def _front(self, keys: Sequence[bytes]) -> _Front | None:
        """The pages in front of a run in its chunk, if all of them are here in time."""
        deadline = self._clock() + self._options.store_timeout
        promise = self._find(keys, (), deadline, counted=False)
        front = _Front(promise)
        try:
            whole = len(promise.keys) == len(keys) and all(
                self._granted(segment, number, deadline) is not None
                for segment in promise.segments
                for number in range(len(segment.held.parts))
            )
        except BaseException:  # whatever it is, nothing stays leased
            front.release()
            raise
        if not whole:
            front.release()
            return None
        return front

    # Failures

    def _first_failed(self, keys: Sequence[bytes]) -> int:
        now = self._clock()
        with self._failed_lock:
            while self._failed and next(iter(self._failed.values())) <= now:
                self._failed.popitem(last=False)
            if not self._failed:
                return len(keys)
            return next((place for place, key in enumerate(keys) if key in self._failed), len(keys))

    def _note_failed(self, key: bytes) -> None:
        with self._failed_lock:
            self._failed.pop(key, None)
            self._failed[key] = self._clock() + self._options.retry_after
            if len(self._failed) > MOST_FAILED:
                self._failed.popitem(last=False)

    def _forget_failed(self, keys: Sequence[bytes]) -> None:
        with self._failed_lock:
            if self._failed:
                for key in keys:
                    self._failed.pop(key, None)

    # The rest

    def clear(self) -> int:
        """Take all that is stored of this model out of all tiers. Returns how many chunks."""
        self._promises.clear()
        return self.client.clear(self._model)

    def close(self) -> None:
        """Let go of what is kept."""
        self._promises.clear()


class _Front:
    """Pages that share a chunk with those behind them."""

    def __init__(self, promise: Promise) -> None:
        self._promise = promise

    def copy(self, first: int, target: memoryview) -> None:
        """Copy those from number `first` on."""
        rows = np.frombuffer(target, np.uint8)
        at = 0
        for segment in self._promise.segments:
            for number, part in enumerate(segment.held.parts):
                source = segment.granted[number].source
                assert source is not None, "only made of what is there"
                skip = max(0, first - segment.first - part.first) * (len(source) // part.pages)
                piece = np.frombuffer(source, np.uint8)[skip:]
                rows[at : at + len(piece)] = piece
                at += len(piece)

    def release(self) -> None:
        self._promise.release()


def result_of(future: Future[Any], seconds: float) -> bool:
    """What a future says, or False if it doesn't in time."""
    try:
        return bool(future.result(max(0.0, seconds)))
    except (TimeoutError, CancelledError):  # the latter: the node is being closed
        return False
