"""How to copy pages between planes in host memory and a buffer, by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_transfer.layout import Plane
from lmcache_transfer.rows import RowPlan, gather_rows, scatter_rows
from lmcache_transfer.strided import StridedPlan

__all__ = ["Plan", "plan_copies"]

SHORTEST_ROW = 16
"""Rows shorter than this are slower than strided copies."""


class Plan(Protocol):
    """How to copy pages. An index says which ones: one entry of `page_index_size` numbers for each page."""

    @property
    def page_index_size(self) -> int: ...
    def index(self, units: NDArray[np.intp]) -> NDArray[np.intp]: ...
    def gather(self, index: NDArray[np.intp], into: memoryview) -> None: ...
    def scatter(self, index: NDArray[np.intp], source: memoryview) -> None: ...


def plan_copies(planes: Sequence[Plane], page_units: int, owners: object) -> tuple[Plan, Plan]:
    """How to gather and how to scatter; one object where it is the same."""
    gather, scatter = gather_rows(planes), scatter_rows(planes)
    if gather.row < SHORTEST_ROW:
        strided = StridedPlan(planes, page_units, owners)
        return strided, strided if scatter.row < SHORTEST_ROW else RowPlan(planes, page_units, scatter, owners)
    plan = RowPlan(planes, page_units, gather, owners)
    return plan, plan if scatter == gather else RowPlan(planes, page_units, scatter, owners)
