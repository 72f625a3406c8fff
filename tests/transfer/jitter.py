"""A device whose streams really run beside each other, each pausing now and then: what nobody waits for comes too
late, or too early, for some seed. And waits that can be left out, each by the line of code that waits."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_transfer.device import Numbers, Piece
from lmcache_transfer.hostdevice import HostDevice, HostEvent, HostMemory, HostStream, ThreadStream
from lmcache_transfer.streams import _Latch

__all__ = ["Site", "Waits", "jittered"]

Site = tuple[str, int]
"""File and line."""

JITTER = 0.002
MOST_NUMBERS = 64
PACES = 0.1, 0.5, 1.0, 3.0


def jittered(seed: int, **options: Any) -> KeepingDevice:
    """A device whose streams pause before each piece of work for some milliseconds, mostly much less; some of them are
    slow, and some quick."""
    random_number = random.Random(seed)
    lock = threading.Lock()

    def stream() -> Callable[[], None]:
        with lock:
            pace = random_number.choice(PACES)

        def pause() -> None:
            with lock:
                drawn = random_number.random()
            time.sleep(drawn**3 * JITTER * pace)

        return pause

    return KeepingDevice(stream(), pauses=stream, **options)


class JitterStream(ThreadStream):
    """It is slow to be told, too: what was told in the wrong order is seen. Nobody waits for it when it is closed, as a
    driver forgets a stream at once and still does what it has to do."""

    def record(self, event: Any) -> None:
        self._pause()
        super().record(event)

    def close(self) -> None:
        self._work.put(None)

    def ended(self) -> None:
        """Wait until it has done all."""
        self._thread.join()


class KeepingDevice(HostDevice):
    """Frees nothing: what is used too late is read and written where others can see it, and no memory breaks."""

    def __init__(
        self,
        threaded: Callable[[], object],
        *,
        pauses: Callable[[], Callable[[], object]] | None = None,
        **options: Any,
    ) -> None:
        self.kept: list[NDArray[Any]] = []
        self.streams: list[JitterStream] = []
        self._pauses = pauses
        self._unused: list[SentNumbers] = []
        self._lock = threading.Lock()
        super().__init__(threaded, **options)

    def stream(self) -> HostStream:
        pause = self._threaded if self._pauses is None else self._pauses()
        assert pause is not None
        stream = JitterStream(pause)
        self.streams.append(stream)
        return stream

    def memory(self, nbytes: int) -> HostMemory:
        memory = HostMemory(nbytes)
        self.kept.append(memory._array)
        return memory

    def numbers(self, count: int) -> Numbers:
        with self._lock:
            if self._unused:
                return self._unused.pop()
        return SentNumbers(self)


class SentNumbers:
    """Numbers that a stream sends, from memory of the host, into room that is used again: as on a GPU. Others' numbers
    are there before."""

    def __init__(self, device: KeepingDevice) -> None:
        self._device = device
        self._host, self._there = np.zeros((2, MOST_NUMBERS), np.int64)
        device.kept += [self._host, self._there]
        self.address = address(self._there)

    def send(self, numbers: NDArray[np.int64], stream: Any) -> None:
        count = len(numbers)
        self._host[:count] = numbers
        stream.copy_all([Piece(self.address, address(self._host), 8 * count)])

    def close(self) -> None:
        with self._device._lock:
            self._device._unused.append(self)


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


class Waits:
    """Where this project's code waits for something, and which of these places do not."""

    def __init__(self) -> None:
        self.seen: set[Site] = set()
        self.left_out: Site | None = None

    def _skips(self) -> bool:
        frame = sys._getframe(2)
        site = (Path(frame.f_code.co_filename).name, frame.f_lineno)
        if "lmcache_transfer" not in frame.f_code.co_filename or site[0] == "hostdevice.py":
            return False
        self.seen.add(site)
        return site == self.left_out

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is entered waits are seen, and left out."""

        def wrap(kind: type[Any], name: str, instead: Any) -> Callable[..., Any]:
            original = getattr(kind, name)

            def waiting(this: Any, *arguments: Any) -> Any:
                return instead if self._skips() else original(this, *arguments)

            return waiting

        with pytest.MonkeyPatch.context() as patch:
            for kind, name, instead in (
                (HostStream, "wait", None),
                (HostEvent, "synchronize", None),
                (_Latch, "wait", True),
            ):
                patch.setattr(kind, name, wrap(kind, name, instead))
            yield
