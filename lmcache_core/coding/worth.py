"""Whether compressing pays, for each namespace: where it hasn't, it is tried again only every now and then."""

from __future__ import annotations

LEAST_SAVING = 0.1
"""Part of the bytes that must be saved. Below it the time is worth more."""
TRIES = 4
"""Chunks in a row that save less before no more are tried."""
AGAIN = 64
"""Chunks that are stored plain before another one is tried."""


class Worth:
    """Learns from each chunk that was compressed. Namespaces are named by their digests."""

    def __init__(self) -> None:
        self._poor: dict[bytes, int] = {}
        """How many in a row have saved too little; no entry where the last one saved enough."""
        self._passed: dict[bytes, int] = {}
        """How many have been stored plain since."""

    def tries(self, space: bytes) -> bool:
        """Whether the next chunk shall be compressed."""
        if self._poor.get(space, 0) < TRIES:
            return True
        self._passed[space] = self._passed.get(space, 0) + 1
        if self._passed[space] <= AGAIN:
            return False
        del self._passed[space]
        return True

    def learn(self, space: bytes, saving: float) -> None:
        """A chunk was compressed and saved that part of its bytes."""
        if saving >= LEAST_SAVING:
            self._poor.pop(space, None)
            self._passed.pop(space, None)
        else:
            self._poor[space] = self._poor.get(space, 0) + 1
