"""Counters of the backend, for operators. Requests and bytes are what is billed: each attempt counts."""

from __future__ import annotations

from lmcache_core import tally

__all__ = ["Tally"]

NAMES = (
    "bytes_received",  # of values
    "bytes_sent",
    "objects_replaced",  # writes that found something else under the name
    "requests_delete",
    "requests_get",
    "requests_head",
    "requests_list",
    "requests_put",
    "retries",
    "retries_refused",  # since the budget was used up
    "values_of_another_size",
    "writes_spared",  # writes that found their value there already
)


class Tally(tally.Tally):
    """Counts those."""

    def __init__(self) -> None:
        super().__init__(NAMES)
