"""Log lines for faults: one per kind and interval, never written on the event loop, which a full pipe would stop."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol


class LineWriter(Protocol):
    """Writes log lines for those that must not block."""

    def write(self, logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
        """Have a line written soon."""
        ...

    def close(self) -> None:
        """Write what waits."""
        ...


class RateLog:
    """Warnings of one logger, at most one per `kind` in `interval` seconds. Calls may come from any thread."""

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = 10.0,
        *,
        writer: LineWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lines are written by `writer` if there is one, else by the caller."""
        self._logger = logger
        self._interval = interval
        self._writer = writer
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object) -> bool:
        """Log, unless a line of that kind was logged in this interval. Returns whether it was."""
        now = self._clock()
        last = self._last.get(kind)
        if last is not None and now < last + self._interval:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._last[kind] = now
        left_out = self._left_out.pop(kind, 0)
        if left_out and last is not None:
            message += f" ({left_out} more of this kind in the last {math.ceil(now - last)} s)"
        self._write(logging.WARNING, message, args)
        return True

    def info(self, message: str, *args: object) -> None:
        """Log a line that needs no bound."""
        self._write(logging.INFO, message, args)

    def _write(self, level: int, message: str, args: tuple[object, ...]) -> None:
        if self._writer is None:
            self._logger.log(level, message, *args)
        else:
            self._writer.write(self._logger, level, message, args)


class LogWriter:
    """A daemon thread that writes log lines for threads that must not block."""

    MOST = 1000
    """Lines that may wait; more are lost."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[logging.Logger, int, str, tuple[object, ...]] | None] = queue.Queue(self.MOST)
        self._thread = threading.Thread(target=self._run, name="lmcache-log", daemon=True)
        self._thread.start()

    def write(self, logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
        """Have a line written soon."""
        with contextlib.suppress(queue.Full):  # whoever reads the log is stuck; the counters still tell
            self._lines.put_nowait((logger, level, message, args))

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            logger, level, message, args = line
            logger.log(level, message, *args)

    def close(self, wait: float = 2.0) -> None:
        """Write what waits, for at most `wait` seconds."""
        try:
            self._lines.put(None, timeout=wait)
        except queue.Full:
            return
        self._thread.join(wait)
