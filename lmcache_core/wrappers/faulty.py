"""Faults on a schedule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

from lmcache_core.errors import BackendError
from lmcache_core.protocols import StorageBackend
from lmcache_core.wrappers.base import DATA_VERBS, Wrapper

__all__ = ["Faulty", "Schedule", "always", "every", "first", "nth", "randomly"]

T = TypeVar("T")

Schedule = Callable[[str, int], bool]
"""Told a verb and the number of the call, counted from 1 for each verb: whether that call fails."""


def always(verb: str, call: int) -> bool:
    """Every call fails."""
    return True


def nth(*calls: int) -> Schedule:
    """The calls of these numbers fail."""
    return lambda verb, call: call in calls


def first(count: int) -> Schedule:
    """The first calls fail, later ones don't."""
    return lambda verb, call: call <= count


def every(step: int) -> Schedule:
    """Each call whose number is a multiple of `step` fails."""
    return lambda verb, call: call % step == 0


def randomly(probability: float, seed: object = 0) -> Schedule:
    """Calls fail with this probability; which ones follows from the seed."""
    return lambda verb, call: random.Random(f"{seed!r} {verb} {call}").random() < probability


class Faulty(Wrapper):
    """Raises instead of calling `inner`, or after having called it, as the schedule says.

    A schedule alone is for all verbs but `open` and `close`; a mapping gives each verb its own.
    """

    def __init__(
        self,
        inner: StorageBackend,
        faults: Schedule | Mapping[str, Schedule] = always,
        *,
        error: Callable[[str], Exception] = BackendError,
        when: Literal["before", "after"] = "before",
    ) -> None:
        """`error` makes what is raised from a text; backends of others may raise more than `BackendError`."""
        super().__init__(inner)
        self.active = True
        """While False, calls are neither counted nor failed. May be changed at any time, as may the others."""
        self.faults = faults if isinstance(faults, Mapping) else dict.fromkeys(DATA_VERBS, faults)
        self.error = error
        self.when = when
        self.calls: Counter[str] = Counter()
        """Calls of each verb."""
        self.raised: Counter[str] = Counter()
        """Calls of each verb that failed here."""

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        fails = self._fails(verb)
        text = f"injected fault: call {self.calls[verb]} of {verb}"
        if fails and self.when == "before":
            raise self.error(text)
        result = await call()
        if fails:
            raise self.error(text)
        return result

    def _fails(self, verb: str) -> bool:
        if not self.active:
            return False
        self.calls[verb] += 1
        schedule = self.faults.get(verb)
        fails = schedule is not None and schedule(verb, self.calls[verb])
        self.raised[verb] += fails
        return fails
