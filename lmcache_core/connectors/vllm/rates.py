"""How fast this engine computes and this node loads, as measured; and so, whether a load pays.

Prefill takes longer a token the more tokens lie in front of it, so its speed is kept by the length of the context, in
powers of two. A tier's speed is that of whole loads, from the first request for a chunk to the last copied byte.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Rates"]

WEIGHT = 0.3
"""Of a new measurement, beside all before it."""
FEWEST_TOKENS = 64
"""Steps with fewer tokens tell nothing of prefill: they take as long as a step takes."""


class Rates:
    """Moving averages. Nothing is known at first, and what is not known pays."""

    def __init__(self) -> None:
        self._prefill: dict[int, float] = {}
        """Seconds a token, by the bits of the context's length."""
        self._tiers: dict[str, float] = {}
        """Seconds a byte: averaged as such, so that a slow load weighs what it costs."""

    def computed(self, tokens: int, context: int, seconds: float) -> None:
        """A step took `seconds` for `tokens` tokens of prefill behind `context` others."""
        if tokens >= FEWEST_TOKENS and seconds > 0:
            bits = (context + tokens // 2).bit_length()
            self._prefill[bits] = _moved(self._prefill.get(bits), seconds / tokens)

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` from a tier took `seconds`."""
        if nbytes > 0 and seconds > 0:
            self._tiers[tier] = _moved(self._tiers.get(tier), seconds / nbytes)

    def bytes_a_second(self, tier: str) -> float | None:
        """Of a tier; None while nothing is known."""
        known = self._tiers.get(tier)
        return None if known is None else 1 / known

    def prefill_seconds(self, first: int, end: int) -> float | None:
        """What computing tokens `[first, end)` of a prompt takes; None while nothing is known."""
        if not self._prefill:
            return None
        seconds = 0.0
        while first < end:
            bits = (first + 1).bit_length()
            stop = min(end, (1 << bits) - 1)
            seconds += (stop - first) * self._a_token(bits)
            first = stop
        return seconds

    def load_seconds(self, nbytes: Mapping[str, int]) -> float | None:
        """What loading so many bytes from these tiers takes; None if one of them is not known."""
        if any(tier not in self._tiers for tier in nbytes):
            return None
        return sum(count * self._tiers[tier] for tier, count in nbytes.items())

    def _a_token(self, bits: int) -> float:
        """Of the nearest length of context that is known."""
        return self._prefill[min(self._prefill, key=lambda known: (abs(known - bits), known))]


def _moved(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
