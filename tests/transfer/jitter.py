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

import pytest
from numpy.typing import NDArray

from lmcache_transfer.hostdevice import HostDevice, HostEvent, HostMemory, HostNumbers, HostStream, ThreadStream
from lmcache_transfer.streams import _Latch

__all__ = ["Site", "Waits", "jittered"]

Site = tuple[str, int]
"""File and line."""

JITTER = 0.002
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
    """It is slow to be told, too: what was told in the wrong order is seen."""

    def record(self, event: Any) -> None:
        self._pause()
        super().record(event)


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
        self._pauses = pauses
        super().__init__(threaded, **options)

    def stream(self) -> HostStream:
        pause = self._threaded if self._pauses is None else self._pauses()
        return HostStream() if pause is None else JitterStream(pause)

    def memory(self, nbytes: int) -> HostMemory:
        memory = HostMemory(nbytes)
        self.kept.append(memory._array)
        return memory

    def numbers(self, count: int) -> HostNumbers:
        kept = self.kept

        class Reused(HostNumbers):
            def close(self) -> None:
                self._array[:] = 0  # somebody else's numbers

        numbers = Reused(count)
        kept.append(numbers._array)
        return numbers


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
