"""Reads that take longer than a tier's reads do are begun on another tier too.

Source: Dean and Barroso, The Tail at Scale, Communications of the ACM, 2013.

What is under way is read twice then, so only a part of all reads may be. What still waits behind reads of which all are
overdue is read once: by then the other tier has it, or this one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.config import TierConfig
from lmcache_core.events import TierEvents
from lmcache_core.index.decisions import Load

__all__ = ["Hedging"]

EARNED = 0.1
"""Reads that may be made twice, for each read."""
MOST_EARNED = 16.0


class Hedging:
    """Of one tier. Runs on the event loop.

    Args:
        config: Its settings.
        events: Whom to tell.
        number: Which tier it is.
        waiting: What has not been begun.
    """

    def __init__(
        self, config: TierConfig, events: TierEvents, number: int, waiting: Callable[[], Iterable[Load]]
    ) -> None:
        self._on = config.hedge
        self._most = config.concurrency
        self._events = events
        self._number = number
        self._waiting = waiting
        self._overdue = 0
        """Calls under way that take longer than they should."""
        self._earned = MOST_EARNED

    @property
    def stuck(self) -> bool:
        """Whether all that may be under way is overdue."""
        return self._overdue >= self._most

    @contextmanager
    def watch(self, loads: Sequence[Load]) -> Iterator[None]:
        """While one call reads `loads`."""
        patience = None
        if self._on:
            self._earned = min(self._earned + EARNED * len(loads), MOST_EARNED)
            patience = self._events.patience(self._number, sum(load.entry.nbytes for load in loads))
        if patience is None:
            yield
            return
        late = False

        def tell() -> None:
            nonlocal late
            late = True
            self._overdue += 1
            for load in loads:
                if self._earned >= 1 and self._events.overdue(load):
                    self._earned -= 1
            if self.stuck:
                for load in list(self._waiting()):
                    self._events.overdue(load)

        timer = asyncio.get_running_loop().call_later(patience, tell)
        try:
            yield
        finally:
            timer.cancel()
            self._overdue -= late
