"""Counters of the backend, for operators."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import tally

__all__ = ["Tally"]

NAMES = (
    "buffered_fallback",  # the file system takes no O_DIRECT
    "bytes_read",
    "bytes_written",
    "full",  # writes for which file system or quota had no room
    "leases_taken_over",  # of sweepers that have died
    "not_permitted",  # deletes, touches and descriptions that this user may not make
    "stale_retries",  # files opened again, since the server knew the first handle no more
    "sweeps",  # parts of the directory that this host has swept
    "sweeps_failed",
    "swept_bytes",
    "swept_chunks",
    "temporaries_removed",  # what crashes left half written
    "touches",
)


class Tally(tally.Tally):
    """Counts those, and what a backend that is made of this one has beside them."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        super().__init__((*NAMES, *more))
