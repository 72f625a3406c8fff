"""Counters of the backend, for operators."""

from __future__ import annotations

from lmcache_backends.nfs import tally

__all__ = ["Tally"]

NAMES = (
    "direct_bytes_read",  # from files to a device's memory
    "direct_bytes_written",
    "direct_coded",  # frames that cannot be read past host memory, since they are coded
    "direct_corrupt",  # frames that are not what they should be, or did not arrive so
    "direct_verified_bytes",  # copied back to host memory, or read back from files, to be compared
)


class Tally(tally.Tally):
    """Counts those, and what all backends of such files count."""

    def __init__(self) -> None:
        super().__init__(NAMES)
