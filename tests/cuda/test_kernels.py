"""The kernels on the host: the same source, built by g++, against numpy's indexing."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter

import numpy as np

from lmcache_cuda.geometry import KvCopy, Payload, Planes, Units, arrange
from tests.cuda.engines import address, case
from tests.cuda.host import GRIDS, HostKernels, check

CASES = 600
MAP_NORESERVE = 0x4000


def test_both_sides_agree_about_the_argument(kernels: HostKernels) -> None:
    assert kernels.argument_bytes == ctypes.sizeof(KvCopy) == 168


def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(kernels: HostKernels) -> None:
    widths: Counter[int] = Counter()
    for seed in range(CASES):
        widths[check(kernels, case(seed), GRIDS[seed % len(GRIDS)])] += 1
    # Each of the kernels has had its share.
    assert set(widths) == {16, 8, 4, 2, 1}
    assert min(widths.values()) >= 15, widths


def test_strides_beyond_what_32_bits_hold(kernels: HostKernels) -> None:
    """Blocks 3 GiB apart to pages 3 GiB apart, of which almost nothing is ever touched."""
    far, size = 3 << 30, 4096
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory, chunk = (np.frombuffer(mmap.mmap(-1, 2 * far + size, flags=private), np.uint8) for _ in range(2))
    parts = np.random.default_rng(1).integers(0, 256, (3, size), np.uint8)
    for block, part in enumerate(parts):
        memory[block * far : block * far + size] = part
    table, numbers = np.array([address(memory)], np.uint64), np.array([2, 0, 1], np.int64)
    units = Units(blocks=3, block_stride=far, block_units=1, unit_stride=0, axes=(), run=size)
    payload = Payload(page_units=1, page_stride=far, plane_stride=0, unit_stride=0)
    call = arrange(
        units, payload, planes=Planes(address(table), 1, 16), chunk=address(chunk), numbers=address(numbers), count=3
    )
    kernels.launch("gather", call, 2, 64)
    for page, block in enumerate(numbers):
        np.testing.assert_array_equal(chunk[page * far : page * far + size], parts[block])
        memory[block * far : block * far + size] = 0
    kernels.launch("scatter", call, 2, 64)
    for block, part in enumerate(parts):
        np.testing.assert_array_equal(memory[block * far : block * far + size], part)
