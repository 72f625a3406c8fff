"""Kernels without hardware against a copy one element at a time: parts in any order and at any distance, pages that lie
apart, more of them than the buffer between holds, some that are not there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lmcache_transfer import hostkernels
from lmcache_transfer.device import Part
from lmcache_transfer.hostdevice import HostStream
from lmcache_transfer.hostkernels import HostKernels
from lmcache_transfer.paged import Layout, PagedLayout
from tests.transfer.naive import Engine, block_tables, engines


class Case(NamedTuple):
    engine: Engine
    layout: Layout
    page_tokens: int
    block_ids: list[int]
    missing: set[int]
    """Pages of which one unit is not there."""
    cuts: list[int]
    """Where pages are cut into parts."""
    order: list[int]
    """Of the parts in memory."""
    gaps: list[int]
    """Bytes in front of each part there."""
    stride: int
    """Bytes between pages beside their own."""
    layers: range
    at_a_time: int
    """Pages for which there is room in the buffer between; with less than two it is not used."""
    shortest_row: int
    gather: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    engine = draw(engines())
    layout: Layout = draw(st.sampled_from(["native", "canonical"]))
    page_tokens = (engine.block_tokens if layout == "native" else 1) * draw(st.integers(1, 3))
    block_ids = draw(block_tables(engine))
    pages = len(block_ids) * engine.block_tokens // page_tokens
    assume(pages)
    cuts = sorted(draw(st.sets(st.integers(0, pages), max_size=4)) | {0, pages})
    parts = len(cuts) - 1
    count = len(engine.layers)
    one = draw(st.none() | st.integers(0, count - 1))
    return Case(
        engine,
        layout,
        page_tokens,
        block_ids,
        draw(st.sets(st.integers(0, pages - 1), max_size=2)),
        cuts,
        draw(st.permutations(range(parts))),
        draw(st.lists(st.sampled_from([0, 1, 64, 512]), min_size=parts, max_size=parts)),
        draw(st.sampled_from([0, 16, 96, 1024])),
        range(count) if one is None else range(one, one + 1),
        draw(st.sampled_from([0, 2, 3, 100])),
        draw(st.sampled_from([1, 16])),
        draw(st.booleans()),
    )


@given(case=cases())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(case: Case) -> None:
    engine = case.engine
    laid = PagedLayout(engine.layers, dims=engine.dims, page_tokens=case.page_tokens, layout=case.layout)
    nbytes = len(case.layers) * laid.page_layer_bytes
    distance = nbytes + case.stride
    numbers = laid.units_of(case.block_ids).astype(np.int64)
    elements = engine.payload(case.layout, case.page_tokens, case.block_ids)
    pages = len(numbers)
    # [page, element of the layers]: what belongs together
    of_layers = elements.reshape(pages, laid.layers, -1)[:, case.layers.start : case.layers.stop].reshape(pages, -1)
    whole = [page for page in range(pages) if page not in case.missing]
    for page in case.missing:
        numbers[page, 0] = -1
    sizes = [end - start for start, end in zip(case.cuts, case.cuts[1:], strict=False)]
    places, at = [0] * len(sizes), 0
    for part in case.order:
        at += case.gaps[part]
        places[part] = at
        at += sizes[part] * distance
    generator = np.random.default_rng(11)
    memory = generator.integers(0, 256, at + 64, np.uint8)
    before, host_before = engine.memory().copy(), memory.copy()
    parts = [Part(size, memory.ctypes.data + place) for size, place in zip(sizes, places, strict=True)]
    starts = [place + page * distance for size, place in zip(sizes, places, strict=True) for page in range(size)]

    kernels = HostKernels(laid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostkernels, "BUFFER", case.at_a_time * nbytes + nbytes // 2)
        patch.setattr(hostkernels, "SHORTEST_ROW", case.shortest_row)
        copy = kernels.gather if case.gather else kernels.scatter
        copy(case.layers, numbers.ctypes.data, parts, distance, HostStream())
        kernels.close()

    expected, host_expected = before.copy(), host_before.copy()
    for page in whole:
        one = slice(starts[page], starts[page] + nbytes)
        if case.gather:
            host_expected[one] = before[of_layers[page]].reshape(-1)
        else:
            expected[of_layers[page]] = host_before[one].reshape(-1, engine.itemsize)
    after = engine.memory()
    touched = np.ones(len(after), bool)
    for page in case.missing if laid.page_units > 1 else ():  # a part of these is copied; `test_streamed` has that
        touched[of_layers[page]] = False
        host_expected[starts[page] : starts[page] + nbytes] = memory[starts[page] : starts[page] + nbytes]
    np.testing.assert_array_equal(after[touched], expected[touched])
    np.testing.assert_array_equal(memory, host_expected)
