"""Counters of the backend, for operators. Requests and bytes are what is billed: each attempt counts."""

from __future__ import annotations

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


class Tally:
    """Counts on the event loop."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def counts(self) -> dict[str, int]:
        return dict(self._counts)
