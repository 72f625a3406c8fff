"""Gather and scatter against a copy one element at a time, on engines made up at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_transfer import plans
from lmcache_transfer.cpu import Layout, PagedKV
from tests.transfer.naive import Content, Engine, block_tables, contents, engines

several = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def copies(draw: st.DrawFn) -> tuple[Engine, Layout, int, list[int]]:
    """An engine, a layout, tokens a page that it allows, and a block table."""
    engine = draw(engines())
    layout: Layout = draw(st.sampled_from(["native", "canonical"]))
    unit = engine.block_tokens if layout == "native" else 1
    page_tokens = unit * draw(st.integers(1, 4))
    return engine, layout, page_tokens, draw(block_tables(engine))


@pytest.fixture(params=["rows if long", "rows", "strided"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy must do for any engine; which is used is a matter of speed."""
    shortest = {"rows if long": plans.SHORTEST_ROW, "rows": 1, "strided": math.inf}[request.param]
    monkeypatch.setattr(plans, "SHORTEST_ROW", shortest)


@pytest.mark.usefixtures("plan")
class TestAgainstNaive:
    @given(copies(), st.data())
    @settings(several, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_gather(self, copy: tuple[Engine, Layout, int, list[int]], data: st.DataObject) -> None:
        engine, layout, page_tokens, block_ids = copy
        kv = PagedKV(engine.layers, dims=engine.dims, page_tokens=page_tokens, layout=layout)
        numbers = engine.payload(layout, page_tokens, block_ids)
        expected = engine.memory()[numbers].tobytes()
        view = kv.view(block_ids)
        assert view.pages * kv.page_bytes == len(expected)
        assert kv.page_layer_bytes * kv.layers == kv.page_bytes
        first, last = sorted(data.draw(st.tuples(st.integers(0, view.pages), st.integers(0, view.pages))))
        got = bytearray(b"\xaa" * ((last - first) * kv.page_bytes))
        view.gather(0, first, last - first, memoryview(got))
        assert got == expected[first * kv.page_bytes : last * kv.page_bytes]

    @given(copies(), st.data())
    @settings(several, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_scatter_writes_these_pages_and_nothing_else(
        self, copy: tuple[Engine, Layout, int, list[int]], data: st.DataObject
    ) -> None:
        engine, layout, page_tokens, block_ids = copy
        kv = PagedKV(engine.layers, dims=engine.dims, page_tokens=page_tokens, layout=layout)
        view = kv.view(block_ids)
        first, last = sorted(data.draw(st.tuples(st.integers(0, view.pages), st.integers(0, view.pages))))
        size = (last - first) * kv.page_bytes
        source = np.random.default_rng(7).integers(0, 256, size, np.uint8).tobytes()
        numbers = engine.payload(layout, page_tokens, block_ids)
        touched = numbers[first * kv.page_bytes // engine.itemsize : last * kv.page_bytes // engine.itemsize]
        expected = engine.memory()
        expected[touched] = np.frombuffer(source, np.uint8).reshape(-1, engine.itemsize)
        view.scatter(0, first, last - first, memoryview(source))
        np.testing.assert_array_equal(engine.memory(), expected)

    @given(copies())
    @settings(several, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_moving_to_other_blocks_keeps_every_byte(self, copy: tuple[Engine, Layout, int, list[int]]) -> None:
        engine, layout, page_tokens, block_ids = copy
        kv = PagedKV(engine.layers, dims=engine.dims, page_tokens=page_tokens, layout=layout)
        there, back = kv.view(block_ids), kv.view([engine.blocks - 1 - block for block in block_ids])
        payload, again = (bytearray(there.pages * kv.page_bytes) for _ in range(2))
        there.gather(0, 0, there.pages, memoryview(payload))
        back.scatter(0, 0, there.pages, memoryview(payload))
        back.gather(0, 0, there.pages, memoryview(again))
        assert again == payload


@given(contents(), st.data())
@several
def test_engines_of_one_model_exchange_canonical_kv(content: Content, data: st.DataObject) -> None:
    one, other = data.draw(engines(content)), data.draw(engines(content))
    page_tokens = data.draw(st.sampled_from([1, 2, 3, 6]))
    kv, there = (PagedKV(e.layers, dims=e.dims, page_tokens=page_tokens, layout="canonical") for e in (one, other))
    assert (kv.page_layer_bytes, kv.layers) == (there.page_layer_bytes, there.layers)
    source_ids, target_ids = data.draw(block_tables(one)), data.draw(block_tables(other))
    source, target = kv.view(source_ids), there.view(target_ids)
    pages = min(source.pages, target.pages)
    payload = bytearray(pages * kv.page_bytes)
    source.gather(0, 0, pages, memoryview(payload))
    target.scatter(0, 0, pages, memoryview(payload))
    elements = len(payload) // one.itemsize
    sent = one.memory()[one.payload("canonical", page_tokens, source_ids)[:elements]]
    received = other.memory()[other.payload("canonical", page_tokens, target_ids)[:elements]]
    np.testing.assert_array_equal(received, sent)
