"""The kernels on the host: the same source, built by g++, against numpy's indexing."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lmcache_cuda.geometry import KvCopy, Payload, Planes, Units, arrange
from tests.cuda.engines import address, case
from tests.cuda.host import GRIDS, HostKernels, check

CASES = 600
MAP_NORESERVE = 0x4000


def test_both_sides_agree_about_the_argument(kernels: HostKernels) -> None:
    assert kernels.argument_bytes == ctypes.sizeof(KvCopy) == 168
    assert kernels.argument_fields == {name: getattr(KvCopy, name).offset for name, *_ in KvCopy._fields_}


def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(kernels: HostKernels) -> None:
    widths: Counter[int] = Counter()
    for seed in range(CASES):
        widths[check(kernels, case(seed), GRIDS[seed % len(GRIDS)])] += 1
    # Each of the kernels has had its share.
    assert set(widths) == {16, 8, 4, 2, 1}
    assert min(widths.values()) >= 15, widths


def far_memory(nbytes: int) -> NDArray[np.uint8]:
    """Of which almost nothing is ever touched."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=private), np.uint8)


def test_strides_beyond_what_32_bits_hold(kernels: HostKernels) -> None:
    """All that lies apart does so by more than 4 GiB: blocks, their tokens, heads of these; pages, planes, tokens."""
    far, run = 5 << 30, 4096
    memory, chunk = far_memory(8 * far), far_memory(8 * far)
    units = Units(blocks=2, block_stride=4 * far, block_units=2, unit_stride=2 * far, axes=((2, far),), run=run)
    payload = Payload(page_units=2, page_stride=4 * far, plane_stride=2 * far, unit_stride=far)
    planes = 2
    parts = np.random.default_rng(1).integers(0, 256, (4, planes, 2, run), np.uint8)
    numbers = np.array([2, 0, 3, 1], np.int64)

    def paged(number: int, plane: int, head: int) -> NDArray[np.uint8]:
        start = number // 2 * 4 * far + number % 2 * 2 * far + head * far + plane * run
        return memory[start : start + run]

    def flat(unit: int, plane: int, head: int) -> NDArray[np.uint8]:
        start = unit // 2 * 4 * far + plane * 2 * far + unit % 2 * far + head * run
        return chunk[start : start + run]

    every = list(product(range(4), range(planes), range(2)))
    for number, plane, head in every:
        paged(number, plane, head)[:] = parts[number, plane, head]
    table = np.array([address(memory), address(memory) + run], np.uint64)
    call = arrange(
        units,
        payload,
        planes=Planes(address(table), planes, 16),
        chunk=address(chunk),
        numbers=address(numbers),
        count=4,
    )
    kernels.launch("gather", call, 2, 64)
    for unit, plane, head in every:
        np.testing.assert_array_equal(flat(unit, plane, head), parts[numbers[unit], plane, head])
    for number, plane, head in every:
        paged(number, plane, head)[:] = 0
    kernels.launch("scatter", call, 2, 64)
    for number, plane, head in every:
        np.testing.assert_array_equal(paged(number, plane, head), parts[number, plane, head])
