"""Counters of the backend, for operators."""

from __future__ import annotations

from lmcache_core import tally

__all__ = ["Tally"]

NAMES = (
    "bytes_read",
    "bytes_written",
    "full",  # writes for which no host had room
    "objects_replaced",  # writes that found something else under the name
    "torn_reads",  # values that were replaced or evicted while they were read
    "values_of_another_size",
    "writes_spared",  # writes that found their value there already
)


class Tally(tally.Tally):
    """Counts those."""

    def __init__(self) -> None:
        super().__init__(NAMES)
