"""The kernels on the host: the same source, built by g++, against numpy's indexing."""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest

from lmcache_cuda.geometry import KvCopy
from tests.cuda.engines import case
from tests.cuda.host import COMPILER, GRIDS, WITHOUT_COMPILER, HostKernels, build, check

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)

CASES = 600


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    build(library)
    return HostKernels(library)


def test_both_sides_agree_about_the_argument(kernels: HostKernels) -> None:
    assert kernels.argument_bytes == ctypes.sizeof(KvCopy) == 168


def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(kernels: HostKernels) -> None:
    widths: Counter[int] = Counter()
    for seed in range(CASES):
        widths[check(kernels, case(seed), GRIDS[seed % len(GRIDS)])] += 1
    # Each of the kernels has had its share.
    assert set(widths) == {16, 8, 4, 2, 1}
    assert min(widths.values()) >= 15, widths
