"""Counters of the backend, for operators."""

from __future__ import annotations

from lmcache_core import tally

__all__ = ["Tally"]

NAMES = (
    "buffered_fallback",  # files that the file system opens without O_DIRECT only
    "bytes_read",
    "bytes_written",
    "full",  # writes for which file system or quota had no room
    "values_of_another_size",
)


class Tally(tally.Tally):
    """Counts those."""

    def __init__(self) -> None:
        super().__init__(NAMES)
