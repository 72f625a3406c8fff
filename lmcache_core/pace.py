"""How fast a tier is read, as learned: seconds a call costs whatever its size, and seconds a byte. Pure.

Calls of different sizes tell the two apart: they are fitted by least squares in which a call counts a tenth less with
each one after it. While all are of one size, all their time goes to the bytes. The spread is the mean distance from the
fit, averaged in the same way; four of them above the fit are rarely seen by chance (as TCP's retransmission timer has
it, Jacobson 1988).
"""

from __future__ import annotations

__all__ = ["Pace"]

WEIGHT = 0.1
"""Of the last call."""
LONG_RUN = 0.005
"""The same where what is usual is to be known."""
SPREADS = 4.0
FEWEST = 8
"""Calls before which nothing is known."""
_ALIKE = 1e-4
"""Below this part of the mean's square, the variance of sizes tells nothing."""


class Pace:
    """Of one tier. Guarded by the index's mutex.

    Args:
        weight: Of the last call, beside all before it.
    """

    __slots__ = ("_bytes", "_bytes_seconds", "_bytes_squared", "_seconds", "_weight", "calls", "measured", "spread")

    def __init__(self, weight: float = WEIGHT) -> None:
        self._weight = weight
        self.calls = 0
        self.spread = 0.0
        """Seconds that calls are off what is expected of them, on average."""
        self.measured = 0.0
        """When the last call ended, by the index's clock."""
        # Moving averages
        self._bytes = 0.0
        self._seconds = 0.0
        self._bytes_squared = 0.0
        self._bytes_seconds = 0.0

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """A call that read `nbytes` took `seconds` and has ended `now`."""
        if nbytes < 1 or seconds < 0:
            return
        self.calls += 1
        weight = max(self._weight, 1 / self.calls)  # a plain average at first
        off = abs(seconds - self._fit(nbytes)) if self.calls > 1 else seconds / 2
        self.spread += weight * (off - self.spread)
        self._bytes += weight * (nbytes - self._bytes)
        self._seconds += weight * (seconds - self._seconds)
        self._bytes_squared += weight * (nbytes * nbytes - self._bytes_squared)
        self._bytes_seconds += weight * (nbytes * seconds - self._bytes_seconds)
        self.measured = now

    @property
    def known(self) -> bool:
        """Whether there have been enough calls."""
        return self.calls >= FEWEST

    @property
    def seconds_a_byte(self) -> float:
        """0 while there was no call."""
        if not self._bytes:
            return 0.0
        whole = self._seconds / self._bytes
        variance = self._bytes_squared - self._bytes * self._bytes
        if variance < _ALIKE * self._bytes * self._bytes:
            return whole
        slope = (self._bytes_seconds - self._bytes * self._seconds) / variance
        return min(max(slope, 0.0), whole)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second besides the latency; None if bytes take no time that could be measured."""
        slope = self.seconds_a_byte
        return 1 / slope if slope else None

    @property
    def latency(self) -> float:
        """Seconds of a call without its bytes."""
        return max(self._seconds - self.seconds_a_byte * self._bytes, 0.0)

    def expected(self, nbytes: int) -> float | None:
        """Seconds that reading `nbytes` takes; None while nothing is known."""
        return self._fit(nbytes) if self.known else None

    def longest(self, nbytes: int) -> float | None:
        """Seconds that reading `nbytes` hardly ever exceeds; None while nothing is known."""
        return self._fit(nbytes) + SPREADS * self.spread if self.known else None

    def _fit(self, nbytes: int) -> float:
        return self.latency + self.seconds_a_byte * nbytes
