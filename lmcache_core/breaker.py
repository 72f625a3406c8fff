"""Circuit breaker: when to leave a failing tier alone, and when to try it again. Pure: starts nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Opens after `failures` failures in a row; the time until it may be probed doubles from `cooldown` to
    `max_cooldown` seconds while probes fail, or succeed and nothing else does afterwards."""

    failures: int = 3
    cooldown: float = 1.0
    max_cooldown: float = 30.0
    open: bool = False
    _row: int = 0
    _wait: float = 0.0

    def failed(self) -> bool:
        """Note a failure. Returns whether the breaker opened by it."""
        self._row += 1
        if self.open or self._row < self.failures:
            return False
        return self.trip()

    def trip(self) -> bool:
        """Open at once. Returns whether it was closed."""
        was_closed, self.open = not self.open, True
        if was_closed:
            self._wait = max(self._wait, self.cooldown)
        return was_closed

    def succeeded(self) -> None:
        """Note a success: failures before it don't count."""
        self._row = 0
        if not self.open:
            self._wait = 0.0

    def next_probe(self) -> float:
        """Seconds from now until the next probe; the one after that is later."""
        wait, self._wait = self._wait, min(self.max_cooldown, self._wait * 2)
        return wait

    def close(self) -> None:
        """A probe succeeded. Only a success of something else shows that all is well again."""
        self.open = False
        self._row = 0
