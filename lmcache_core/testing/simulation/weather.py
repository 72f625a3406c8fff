"""What goes wrong at a medium, drawn: how long a verb takes, whether it fails, and how it lies."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Fate", "Plan", "Weather"]


class Fate(enum.Enum):
    """What becomes of a call. Where it says nothing to a verb, the call works."""

    WORKS = "works"
    FAILS = "fails"
    """An error, and nothing done."""
    FAILS_AFTER = "fails after"
    """An error, although it is done."""
    RAISES = "raises"
    """An error of a kind that no contract names."""
    CANCELS = "cancels"
    """It cancels itself."""
    HANGS = "hangs"
    """It ends when the weather is better."""
    LATE = "late"
    """It ends, long after anybody waits for it."""
    DAMAGES = "damages"
    """A bit of what is read is wrong."""
    TRUNCATES = "truncates"
    """The end of what is read is missing."""
    SWAPS = "swaps"
    """What is read is another chunk."""
    PRETENDS = "pretends"
    """It has not been done, and is said to be."""
    LOSES = "loses"
    """The value is gone for good."""
    FULL = "full"
    """No room is left."""
    ANSWERS_NONSENSE = "answers nonsense"


_READ = [Fate.DAMAGES, Fate.TRUNCATES, Fate.SWAPS, Fate.PRETENDS, Fate.LOSES, Fate.ANSWERS_NONSENSE]
_FATES = {
    "open": [Fate.FAILS, Fate.RAISES, Fate.LATE, Fate.HANGS],
    "close": [Fate.FAILS, Fate.LATE],
    "scan": [Fate.FAILS, Fate.LATE],
    "contains": [Fate.PRETENDS, Fate.LOSES, Fate.ANSWERS_NONSENSE],
    "read": _READ,
    "write": [Fate.FULL, Fate.FULL, Fate.FAILS_AFTER, Fate.ANSWERS_NONSENSE],
    "delete": [Fate.FAILS_AFTER],
}
_SLOW = [Fate.HANGS, Fate.LATE, Fate.LATE]
_ANY = [Fate.FAILS, Fate.FAILS, Fate.RAISES, Fate.CANCELS, Fate.HANGS, Fate.LATE, Fate.LATE]


class Plan(NamedTuple):
    """What becomes of one call, and when it ends."""

    fate: Fate
    seconds: float


class Weather:
    """Of one tier of one process. `mood` is the part of calls that go wrong; 1 is a medium that is gone."""

    def __init__(self, rng: random.Random, late: float) -> None:
        self.mood = 0.0
        self.late = late
        """Seconds that are too long for anybody."""
        self.longest = 40 * late
        """Seconds after which everything has ended that does not hang."""
        self._rng = rng
        self._calm = False
        self._kind = "mixed"
        """What goes wrong: anything, or nothing but slowness or lies, which a breaker sees less of."""
        self._hanging: list[Callable[[], None]] = []

    def change(self) -> float:
        """Better or worse from now on; what hangs goes on, mostly."""
        rng = self._rng
        self._kind = rng.choice(("mixed", "mixed", "slow", "lying"))
        self.mood = rng.choice((0.0, 0.05, 0.1, 0.3, 0.6, 1.0))
        if rng.random() < 0.7:
            self.release()
        return self.mood

    def clear_up(self) -> None:
        """All is well and fast from now on, but for what is under way."""
        self.mood = 0.0
        self._calm = True
        self.release()

    def release(self) -> None:
        """What hangs goes on."""
        hanging, self._hanging = self._hanging, []
        for go_on in hanging:
            go_on()

    def hang(self, go_on: Callable[[], None]) -> None:
        """Call this when what hangs goes on."""
        self._hanging.append(go_on)

    def _fates(self, verb: str) -> list[Fate]:
        own = _FATES.get(verb, [])
        if self._kind == "slow" and verb != "close":
            return _SLOW
        if self._kind == "lying" and verb in ("contains", "read", "write"):
            return own
        return own if verb in ("open", "close", "scan") else _ANY + own

    def plan(self, verb: str) -> Plan:
        """Draw what becomes of a call."""
        rng = self._rng
        if self._calm:
            return Plan(Fate.WORKS, 0.0001)
        seconds = rng.choice((0.0, 0.0005, 0.001, 0.002, 0.01, 0.05))
        if not self.mood or rng.random() >= self.mood:
            return Plan(Fate.WORKS, seconds)
        if self.mood == 1.0 and rng.random() < 0.8:
            return Plan(rng.choice((Fate.FAILS, Fate.FAILS, Fate.HANGS)), seconds)
        fate = rng.choice(self._fates(verb))
        if fate is Fate.LATE:
            seconds = self.late * rng.choice((0.9, 1.0, 1.5, 3.0, 5.0))
            if verb in ("open", "scan") and rng.random() < 0.3:
                seconds = self.longest
        return Plan(fate, seconds)
