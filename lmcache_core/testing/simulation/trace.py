"""What happened in a run, as lines: a hash over all of them, and the last ones for people."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import NoReturn

__all__ = ["SimulationError", "Trace"]

KEPT = 80


class SimulationError(AssertionError):
    """Something that must never happen has happened."""


class Trace:
    """Lines of one run, each with its virtual time. With `keep_all` none is forgotten."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self.now = 0.0
        self.lines: deque[str] = deque(maxlen=None if keep_all else KEPT)
        self.count = 0
        self.failure: SimulationError | None = None
        """The first thing that must never happen and has; the product may have swallowed it."""
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, line: str) -> None:
        """One more thing has happened."""
        line = f"{self.now:10.4f} {line}"
        self.count += 1
        self.lines.append(line)
        self._hash.update(line.encode())

    def fail(self, message: str) -> NoReturn:
        """Something must never happen and has.

        Raises:
            SimulationError: This.
        """
        error = SimulationError(message)
        self.failure = self.failure or error
        raise error

    @property
    def digest(self) -> str:
        """The same for two runs in which the same happened in the same order."""
        return self._hash.hexdigest()
