"""Every layout that the transfer describes can be told to the kernels, and they copy what a copy by definition does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is missing: engines are made of its tensors")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_cuda.geometry import Payload, Planes, arrange
from lmcache_transfer.cudadevice import _units
from lmcache_transfer.layout import Plane, describe
from lmcache_transfer.paged import Layout
from tests.cuda.engines import address
from tests.cuda.host import HostKernels
from tests.transfer.naive import Engine, block_tables, engines


@given(engine=engines(), layout=st.sampled_from(["native", "canonical"]), data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_as_a_copy_one_element_at_a_time(
    kernels: HostKernels, engine: Engine, layout: Layout, data: st.DataObject
) -> None:
    unit = engine.block_tokens if layout == "native" else 1
    page_tokens = unit * data.draw(st.integers(1, 3))
    block_ids = data.draw(block_tables(engine))
    numbers = engine.payload(layout, page_tokens, block_ids)
    chunk = np.frombuffer(engine.memory()[numbers].tobytes(), np.uint8).copy()
    gathered = np.full_like(chunk, 0xAA)
    copy(kernels, "gather", engine, layout, page_tokens, block_ids, gathered)
    np.testing.assert_array_equal(gathered, chunk)
    chunk ^= 0x5A
    expected = engine.memory()
    expected[numbers] = chunk.reshape(-1, engine.itemsize)
    copy(kernels, "scatter", engine, layout, page_tokens, block_ids, chunk)
    np.testing.assert_array_equal(engine.memory(), expected)


def copy(
    kernels: HostKernels,
    direction: str,
    engine: Engine,
    layout: Layout,
    page_tokens: int,
    block_ids: list[int],
    chunk: NDArray[np.uint8],
) -> None:
    planes = list(planes_of(engine, layout, page_tokens))
    units_a_block = planes[0].shape.units
    page_units = page_tokens * units_a_block // engine.block_tokens
    pages = len(block_ids) * units_a_block // page_units
    parts = [plane.shape.unit_bytes * page_units for plane in planes]
    starts = np.cumsum([0, *parts])
    ids = np.array(block_ids, np.int64)
    numbers = np.add.outer(ids * units_a_block, np.arange(units_a_block)).ravel()[: pages * page_units].copy()
    if not pages:
        return
    # Planes of one shape that lie evenly in the chunk are one launch; here mostly that is all of them.
    for shape in dict.fromkeys(plane.shape for plane in planes):
        chosen = [i for i, plane in enumerate(planes) if plane.shape == shape]
        gaps = {int(starts[b] - starts[a]) for a, b in pairwise(chosen)}
        for group in [chosen] if len(gaps) < 2 else [[i] for i in chosen]:
            table = np.array([planes[i].address for i in group], np.uint64)
            payload = Payload(
                page_units, int(starts[-1]), max(gaps) if len(group) > 1 else parts[group[0]], shape.unit_bytes
            )
            call = arrange(
                _units(shape),
                payload,
                planes=Planes(address(table), len(group), Planes.alignment_of(table.tolist())),
                chunk=address(chunk) + int(starts[group[0]]),
                numbers=address(numbers),
                count=len(numbers),
            )
            kernels.launch(direction, call, 2, 64)


def planes_of(engine: Engine, layout: Layout, page_tokens: int) -> Iterator[Plane]:
    for layer in engine.layers:
        for tensor in layer if isinstance(layer, tuple) else (layer,):
            at, described, _ = describe(tensor, engine.dims)
            blocked = described.blocked(None)
            for plane in blocked.native_planes() if layout == "native" else blocked.canonical_planes(page_tokens):
                yield Plane(at + plane.address, plane.shape)
