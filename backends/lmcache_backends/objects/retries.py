"""Repeating requests that failed in a way that may pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lmcache_backends.objects.faults import Fault
from lmcache_backends.objects.tally import Tally

__all__ = ["Retries"]

T = TypeVar("T")

_FIRST, _LONGEST = 0.05, 2.0
_COSTS = 10
"""What a repetition takes from the budget; a request that succeeds gives 1 back."""


class Retries:
    """After a random time of up to twice as much each time ("full jitter"), so that clients that failed together don't
    come back together. A budget that all requests share keeps a server that fails for all from being asked more."""

    def __init__(self, most: int, budget: int, tally: Tally) -> None:
        self._most = most
        self._budget = self._left = budget * _COSTS
        self._tally = tally

    async def run(self, request: Callable[[], Awaitable[T]]) -> T:
        """What `request` returns.

        Raises:
            Fault: It failed for good, or too often.
        """
        done = 0
        while True:
            try:
                result = await request()
            except Fault as fault:
                if not fault.passing or done >= self._most:
                    raise
                if self._left < _COSTS:
                    self._tally.add("retries_refused")
                    raise
                self._left -= _COSTS
                self._tally.add("retries")
                await asyncio.sleep(random.uniform(0, min(_LONGEST, _FIRST * 2**done)))
                done += 1
            else:
                self._left = min(self._budget, self._left + 1)
                return result
