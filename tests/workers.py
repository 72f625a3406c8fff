"""Who runs what when several workers share the tests: `pytest -n 2`.

A file is run by one worker, so that what its tests share is made once. A folder whose files share servers is run by one
worker, too. What has most slow tests is begun first, so that no worker is left alone with it in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["ByUnit", "longest_first", "unit"]

TOGETHER = ("tests/backends/", "tests/cuda/")


def unit(nodeid: str) -> str:
    """What a test belongs to: all of it is run by one worker."""
    file = nodeid.partition("::")[0]
    return file.rpartition("/")[0] if file.startswith(TOGETHER) else file


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which they are begun: unit by unit, first those with most slow tests, then the largest."""
    items = list(items)
    slow = Counter(unit(item.nodeid) for item in items if item.get_closest_marker("slow"))
    every = Counter(unit(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[int, int, str]:
        name = unit(item.nodeid)
        return -slow[name], -every[name], name

    return sorted(items, key=rank)


class ByUnit(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Gives whoever has nothing left to do the next unit."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
