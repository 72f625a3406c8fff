"""The kernels on the host: the same source, built by g++, against numpy's indexing."""

from __future__ import annotations

import ctypes
from collections import Counter

from lmcache_cuda.geometry import KvCopy
from tests.cuda.engines import case
from tests.cuda.host import GRIDS, HostKernels, check

CASES = 600


def test_both_sides_agree_about_the_argument(kernels: HostKernels) -> None:
    assert kernels.argument_bytes == ctypes.sizeof(KvCopy) == 168


def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(kernels: HostKernels) -> None:
    widths: Counter[int] = Counter()
    for seed in range(CASES):
        widths[check(kernels, case(seed), GRIDS[seed % len(GRIDS)])] += 1
    # Each of the kernels has had its share.
    assert set(widths) == {16, 8, 4, 2, 1}
    assert min(widths.values()) >= 15, widths
