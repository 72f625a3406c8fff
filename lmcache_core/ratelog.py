"""Log lines for faults: one per kind and interval, with the number of those left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLog:
    """Warnings of one logger, at most one per `kind` in `interval` seconds. Calls may come from any thread."""

    def __init__(
        self, logger: logging.Logger, interval: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object) -> bool:
        """Log, unless a line of that kind was logged in this interval. Returns whether it was."""
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._next[kind] = now + self._interval
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            message += f" ({left_out} more of this kind in the last {self._interval:g} s)"
        self._logger.warning(message, *args)
        return True
