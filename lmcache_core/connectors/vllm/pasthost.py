"""Loads past host memory: chunks go from a tier that can do that to the device, and are copied to blocks from there.

Memory of the device for that is taken once and used again. What a read that was given up may still write to is kept out
of use until the read has ended, however late. Whatever cannot be read like this is read through host memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

from lmcache_core.client import AHEAD, DirectReading, Grant, Held, PastHost, ReadsPastHost
from lmcache_core.errors import LMCacheError
from lmcache_core.protocols import ReadResult
from lmcache_core.streaming import DeviceRoom, DeviceRooms
from lmcache_core.units import format_size

__all__ = ["DeviceMemory", "PastHostLoad"]

MOST = 256 << 20
"""Bytes of the device's memory."""
AT_ONCE = 4
"""Reads at a time: a backend needs threads of its own for reads through host memory, also where these hang."""


class DeviceMemory:
    """Rooms on a device, of one size after some time: that of a chunk.

    Args:
        device: Whose they are.
        warn: Logs a line, at most one a kind and interval.
        most: Bytes of all of them.
    """

    def __init__(self, device: DeviceRooms, warn: Callable[[str, str], object], most: int = MOST) -> None:
        self._device = device
        self._warn = warn
        self._most = most
        self._lock = threading.Lock()
        self._unused: list[tuple[int, DeviceRoom]] = []
        self._size = 0
        self._taken = 0
        """Bytes of all rooms, those in use too."""
        self._reading = 0
        """Reads that have not ended."""
        self._late = 0
        """Reads that were given up and have not ended."""
        self._closed = False

    def take(self, nbytes: int) -> tuple[int, DeviceRoom] | None:
        """A room of at least so many bytes to read to; None if there is none now, enough is being read, or a medium
        hangs."""
        with self._lock:
            if self._late or self._reading >= AT_ONCE:
                return None
            if nbytes > self._most:
                most = format_size(self._most)
                self._warn(
                    "past host",
                    f"a chunk of {format_size(nbytes)} is read through host memory, as there is {most} of the device's "
                    "for past_host; a smaller chunk_tokens makes smaller ones",
                )
                return None
            self._size = max(self._size, nbytes)
            while self._unused:
                size, room = self._unused.pop()
                if size >= nbytes:
                    return size, room
                self._taken -= size
                with contextlib.suppress(LMCacheError):
                    room.close()
            if self._closed or self._taken + self._size > self._most:
                return None
            size = self._size
            try:
                room = self._device.room(size)
            except LMCacheError as error:  # it has no more; what there is must do
                self._most = self._taken
                there = format_size(self._taken)
                self._warn(
                    "past host",
                    f"the device has no more than {there} for past_host, and what does not fit there is read through "
                    f"host memory; leave it more, as by a smaller gpu_memory_utilization: {error}",
                )
                return None
            self._taken += size
            return size, room

    def begun(self, ended: Future[list[ReadResult]]) -> None:
        """A read has begun."""
        with self._lock:
            self._reading += 1

        def end(_: Future[list[ReadResult]]) -> None:
            with self._lock:
                self._reading -= 1

        ended.add_done_callback(end)

    def give(self, taken: tuple[int, DeviceRoom]) -> None:
        """Nothing reads or writes a room any more."""
        with self._lock:
            if not self._closed:  # else its device is gone
                self._unused.append(taken)

    def late(self, ended: Future[list[ReadResult]], taken: tuple[int, DeviceRoom]) -> None:
        """A read is no longer waited for. Until it has ended nothing else is read like this: through host memory a tier
        that hangs costs its deadline once."""
        with self._lock:
            self._late += 1

        def end(_: Future[list[ReadResult]]) -> None:
            with self._lock:
                self._late -= 1
            self.give(taken)

        ended.add_done_callback(end)

    def copy_back(self, address: int, into: memoryview) -> None:
        """A `CopyBack`."""
        self._device.copy_back(address, into)

    def close(self) -> None:
        """Free what is not in use. What is stays: a read that is under way writes to it."""
        with self._lock:
            self._closed = True
            unused, self._unused = self._unused, []
        for _, room in unused:
            with contextlib.suppress(LMCacheError):  # the device is lost, and its memory with it
                room.close()


class Reading:
    """A part on its way to the device."""

    def __init__(self, found: PastHost, taken: tuple[int, DeviceRoom], read: DirectReading) -> None:
        self.found = found
        self.taken = taken
        self.answered: Future[bool] = Future()
        """Done when it is known whether there is a hit: then ask again."""
        self.answered.set_running_or_notify_cancel()
        self._ended = read.ended
        read.answered.add_done_callback(lambda _: self.answered.set_result(True))

    @property
    def hit(self) -> bool:
        """Whether the bytes are there."""
        ended = self._ended
        return ended.done() and ended.exception() is None and ended.result() == [ReadResult.HIT]

    def leave(self, memory: DeviceMemory) -> None:
        """Nobody waits for it any more: its room is given back when the read has ended, and if that has not been in
        time nothing else is read like this meanwhile."""
        if self._ended.done() or not self.answered.done():
            self._ended.add_done_callback(lambda _: memory.give(self.taken))
        else:
            memory.late(self._ended, self.taken)

    @property
    def memory(self) -> memoryview:
        """What was read."""
        return self.taken[1].memory[: self.found.nbytes]


class PastHostLoad:
    """Parts of one lease that are read past the host. Called by one thread.

    Args:
        memory: Where to.
        client: Of the node.
        held: The lease.
    """

    def __init__(self, memory: DeviceMemory, client: ReadsPastHost, held: Held) -> None:
        self._memory = memory
        self._client = client
        self._held = held
        self._readings: dict[int, Reading] = {}
        self._granted: set[int] = set()
        """Of those, what is being copied."""
        self._over = False
        """A part could not be read like this: the others are not tried."""
        self._done = 0

    def grants(self, start: int) -> list[Grant]:
        """As `Client.grant`: parts from `start` on that are on the device, or when to ask again. None of them if part
        `start` is to be had otherwise."""
        if self._has_failed(start):
            return []
        for number in self._next(start):
            if number not in self._readings and not self._over:
                self._begin(number)
        wanted = self._readings.get(start)
        if wanted is not None and not wanted.answered.done():
            return [Grant(None, wanted.found.tier, wanted.answered)]
        if self._has_failed(start):
            return []
        granted: list[Grant] = []
        while wanted is not None and wanted.hit:
            number = start + len(granted)
            self._granted.add(number)
            granted.append(Grant(wanted.memory, wanted.found.tier))
            wanted = self._readings.get(number + 1)
        return granted

    def _has_failed(self, start: int) -> bool:
        """Whether it is known of a part that it could not be read. Then nothing more is tried like this."""
        reading = self._readings.get(start)
        if reading is None or not reading.answered.done() or reading.hit:
            return False
        self._over = True
        failed = [n for n, each in self._readings.items() if n == start or (each.answered.done() and not each.hit)]
        for number in failed:
            self._readings.pop(number).leave(self._memory)
        return True

    def without(self, start: int) -> int:
        """How many parts from `start` on are not on their way to the device."""
        return next((number - start for number in self._next(start) if number in self._readings), AHEAD)

    def _next(self, start: int) -> range:
        return range(start, min(start + AHEAD, len(self._held.parts)))

    def _begin(self, number: int) -> None:
        found = self._client.past_host(self._held, number)
        taken = None if found is None else self._memory.take(found.nbytes)
        if found is None or taken is None:
            return
        try:
            read = self._client.read_past_host(found, taken[1].address, self._memory.copy_back)
        except LMCacheError:  # whoever reads has been closed: through the host, if that is there
            self._memory.give(taken)
            self._over = True
            return
        self._memory.begun(read.ended)
        self._readings[number] = Reading(found, taken, read)

    def consumed(self, parts: int) -> Callable[[], None]:
        """The next `parts` parts are being copied from where they are. What is returned gives back what of that is on
        the device, to be called when they have been copied."""
        used: list[tuple[int, DeviceRoom]] = []
        for number in range(self._done, self._done + parts):
            reading = self._readings.pop(number, None)
            if reading is not None and number in self._granted:
                used.append(reading.taken)
                self._client.count("past_host_bytes", reading.found.tier, reading.found.nbytes)
            elif reading is not None:  # it has come to the pool meanwhile, and is copied from there
                reading.leave(self._memory)
        self._done += parts

        def give() -> None:
            for taken in used:
                self._memory.give(taken)

        return give

    def close(self) -> None:
        """Nothing more is asked for. What is still being read is given back when that has ended."""
        for reading in self._readings.values():
            reading.leave(self._memory)
        self._readings.clear()
