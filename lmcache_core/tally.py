"""Counters of a backend, for operators."""

from __future__ import annotations

import threading
from collections.abc import Iterable

__all__ = ["Tally"]


class Tally:
    """Counts by name, from any thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, number: int = 1) -> None:
        """Count one more, or so many."""
        with self._lock:
            self._counts[name] += number

    def counts(self) -> dict[str, int]:
        """What has been counted, by name."""
        return dict(self._counts)
