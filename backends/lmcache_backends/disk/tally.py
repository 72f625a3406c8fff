"""Counters of the backend, for operators."""

from __future__ import annotations

from lmcache_core import tally

__all__ = ["Tally"]

NAMES = (
    "buffered_fallback",  # reads and writes that could not go past the page cache
    "compactions",  # logs rewritten
    "compactions_failed",
    "enospc",  # times the file system or quota was full
    "entries_lost",  # chunks that should be there, but their file is gone or too short
    "log_records_damaged",  # damaged places in logs, and records nobody writes, behind which reading went on
    "log_tails_cut",  # ends of logs that a crash left half written
    "min_free_reached",  # times the file system was too full for the capacity to be used
    "orphans_removed",  # files no log speaks of
    "reads_repeated",  # since they failed
    "segments_given_back",
    "segments_taken",
    "shards_adopted",  # left by processes that have ended
    "shards_evicted",  # the same, removed to make room
    "shards_unreadable",  # with logs of another version's format, or files that are not what they should be
    "values_damaged",  # reads that found a file too short, or not the value that was written there
    "values_unreadable",  # reads that failed, while the drive read other values of the same call
)


class Tally(tally.Tally):
    """Counts those."""

    def __init__(self) -> None:
        super().__init__(NAMES)
