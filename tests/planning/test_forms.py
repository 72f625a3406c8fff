"""The closed forms, against arithmetic of their own and figures that are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import UsageError
from lmcache_core.planning.forms import Engine, Layers, Link, Shape, crossover, loading_pays

LLAMA_8B = Shape((Layers(32, 4096, 8192),), 8.03e9)
"""32 layers, 8 KV heads of 128 numbers of 2 bytes, 32 query heads of 128; parameters with embedding and head."""
H100 = Engine(989e12, 0.5)


def brute_flop(shape: Shape, tokens: int) -> float:
    """Pair by pair: each query with each key that it sees, a pair on the diagonal being half a one."""
    flop = 2.0 * shape.parameters * tokens
    for each in shape.layers:
        for query in range(tokens):
            seen = min(query + 0.5, tokens if each.window is None else each.window)
            flop += each.count * 2 * each.width * seen
    return flop


# Transfers


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert Link(8e9, 1e-3).seconds(16_000_000) == pytest.approx(3e-3)
    assert Link(8e9).seconds(16_000_000) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "n90", "n95"),
    [
        (2.3e-6, 50e9, 1_035_000, 2_185_000),  # 0.99 and 2.08 MiB
        (4.65e-6, 25e9, 1_046_250, 2_208_750),  # 1.00 and 2.11 MiB
        (1e-3, 8e9, 72_000_000, 152_000_000),
        (0.0, 8e9, 0, 0),
    ],
)
def test_the_size_that_reaches_a_share(latency: float, bandwidth: float, n90: float, n95: float) -> None:
    link = Link(bandwidth, latency)
    assert link.size_for(0.9) == pytest.approx(n90)
    assert link.size_for(0.95) == pytest.approx(n95)


@pytest.mark.parametrize(("tokens", "percent"), [(16, 36.3), (64, 69.5), (256, 90.1), (1024, 97.3)])
def test_the_share_that_a_chunk_reaches(tokens: int, percent: float) -> None:
    """Chunks of one layer of Llama-3.1-8B over 400 Gbps, 2.3 µs each."""
    assert Link(50e9, 2.3e-6).share(tokens * 4096) * 100 == pytest.approx(percent, abs=0.05)


@given(st.floats(1e3, 1e12), st.floats(1e-9, 1e2), st.floats(0.01, 0.99))
def test_a_size_for_a_share_has_that_share(bandwidth: float, latency: float, share: float) -> None:
    link = Link(bandwidth, latency)
    size = link.size_for(share)
    assert link.share(size) == pytest.approx(share)
    assert size / link.seconds(size) == pytest.approx(share * bandwidth)


def test_a_prefix_is_loaded_in_chunks() -> None:
    link = Link(131072 * 1000.0, 0.25)  # a thousand tokens a second
    assert link.load_seconds(LLAMA_8B, 256, 256) == pytest.approx(0.25 + 0.256)
    assert link.load_seconds(LLAMA_8B, 257, 256) == pytest.approx(0.5 + 0.257)
    assert link.load_seconds(LLAMA_8B, 1024, 256) == pytest.approx(1.0 + 1.024)


# Prefill


def test_work_of_a_prefill_by_hand() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131072
    assert LLAMA_8B.linear_flop(1000) == 2 * 8.03e9 * 1000
    assert LLAMA_8B.attention_flop(1000) == 2 * 32 * 4096 * 1000**2
    seconds = (2 * 8.03e9 * 4096 + 2 * 32 * 4096 * 4096**2) / 494.5e12
    assert H100.seconds(LLAMA_8B, 4096) == pytest.approx(seconds)
    assert seconds == pytest.approx(0.1419, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 7, 10, 11, 40, 300])
def test_work_of_a_prefill_pair_by_pair(tokens: int) -> None:
    shape = Shape((Layers(3, 8, 10), Layers(2, 8, 6, window=10), Layers(1, 8, 4, window=100)), 50.0)
    assert shape.prefill_flop(tokens) == pytest.approx(brute_flop(shape, tokens), rel=2e-2)
    full = Shape((Layers(3, 8, 10),), 50.0)
    assert full.prefill_flop(tokens) == pytest.approx(brute_flop(full, tokens))


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    shape = Shape((Layers(3, 100, 10), Layers(2, 10, 6, window=128)), 50.0)
    assert shape.kv_bytes_per_token == 320
    assert [shape.kv_bytes(tokens) for tokens in (1, 128, 129, 1000)] == [320, 40960, 41260, 302560]


# Crossover


def by_hand(gbps: float) -> float:
    """L* for Llama-3.1-8B on an H100 at half its peak: where what a token takes to load is what it takes to compute."""
    load_a_token = 131072 / (gbps * 1e9 / 8)
    weights_a_token = 2 * 8.03e9 / 494.5e12
    attention_a_token_squared = 262144 / 494.5e12
    return max((load_a_token - weights_a_token) / attention_a_token_squared, 0.0)


@pytest.mark.parametrize(
    ("gbps", "tokens"),
    [(32, 548.46), (64, 0), (128, 0), (400, 0), (16, 62_360), (8, 185_984)],
)
def test_the_crossover_of_llama_8b_on_one_h100(gbps: float, tokens: float) -> None:
    found = crossover(LLAMA_8B, H100, Link(gbps * 1e9 / 8), 256)
    assert found == pytest.approx(by_hand(gbps))
    assert found == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize(
    ("mfu", "gbps", "thousands"),
    [(0.5, 32, 433.2), (0.5, 64, 186.0), (0.5, 128, 62.4), (0.5, 400, 0), (0.3, 128, 12.9), (1.0, 400, 17.9)],
)
def test_the_crossover_on_eight_h100(mfu: float, gbps: float, thousands: float) -> None:
    found = crossover(LLAMA_8B, Engine(8 * 989e12, mfu), Link(gbps * 1e9 / 8), 256)
    assert found is not None
    assert found / 1e3 == pytest.approx(thousands, abs=0.05)


def test_the_crossover_of_llama_70b_on_eight_h100() -> None:
    shape = Shape((Layers(80, 4096, 16384),), 70.6e9)
    found = crossover(shape, Engine(8 * 989e12, 0.5), Link(4e9), 256)
    assert found == pytest.approx(139.5e3, rel=1e-3)


def test_a_latency_of_each_chunk_puts_the_crossover_off() -> None:
    """A millisecond for 256 tokens is as 2/3 of a bandwidth, roughly, of chunks that take two."""
    link = Link(256 * 131072 / 2e-3, 1e-3)
    slower = Link(256 * 131072 / 3e-3)
    engine = Engine(8 * 989e12, 0.5)
    assert crossover(LLAMA_8B, engine, link, 256) == pytest.approx(crossover(LLAMA_8B, engine, slower, 256))
    assert crossover(LLAMA_8B, engine, link, 512) != pytest.approx(crossover(LLAMA_8B, engine, slower, 512))


def test_with_windows_alone_there_may_be_no_crossover() -> None:
    shape = Shape((Layers(4, 1000, 10, window=100),), 50.0)
    engine = Engine(1e6, 1.0)
    # Beyond the window nothing more is loaded; 4 chunks of 25 tokens cost their latency each.
    assert crossover(shape, engine, Link(1e9), 25) == 0.0
    assert crossover(shape, engine, Link(1e9, 1.0), 25) is None


@pytest.mark.parametrize("bandwidth", [1e3, 1.2e4, 2.5e4, 6e4])
def test_beyond_the_windows_both_take_the_same_at_the_crossover(bandwidth: float) -> None:
    shape = Shape((Layers(1, 100, 10), Layers(3, 100, 10, window=64), Layers(2, 100, 10, window=256)), 50.0)
    engine, link = Engine(1e5, 1.0), Link(bandwidth)
    found = crossover(shape, engine, link, 1)
    assert found is not None
    assert engine.seconds(shape, found) == pytest.approx(shape.kv_bytes(found) / bandwidth)


small_layers = st.builds(
    Layers, st.integers(1, 4), st.integers(1, 1000), st.integers(1, 100), st.one_of(st.none(), st.integers(1, 300))
)


@given(
    st.lists(small_layers, min_size=1, max_size=3),
    st.floats(1, 1e4),
    st.floats(1e3, 1e9),
    st.floats(1e3, 1e9),
    st.floats(0, 1e-2),
)
def test_loading_pays_from_the_crossover_on_and_not_before(
    layers: list[Layers], parameters: float, peak: float, bandwidth: float, latency: float
) -> None:
    shape, engine, link = Shape(tuple(layers), parameters), Engine(peak, 1.0), Link(bandwidth, latency)
    chunk = 16
    found = crossover(shape, engine, link, chunk)
    for chunks in (1, 2, 5, 10, 30, 100, 1000, 100_000):
        tokens = chunks * chunk
        computed, loaded = engine.seconds(shape, tokens), link.load_seconds(shape, tokens, chunk)
        if math.isclose(computed, loaded, rel_tol=1e-6):
            continue
        assert loading_pays(shape, engine, link, tokens, chunk) == (found is not None and tokens > found)


# What cannot be meant


@pytest.mark.parametrize("peak", [0.0, -1.0, math.inf, math.nan])
def test_an_engine_needs_a_peak(peak: float) -> None:
    with pytest.raises(UsageError, match="peak of an engine must be more than 0"):
        Engine(peak, 0.5)


@pytest.mark.parametrize("mfu", [0.0, -0.1, 1.01, math.nan])
def test_an_mfu_is_a_part(mfu: float) -> None:
    with pytest.raises(UsageError, match="MFU is above 0 and at most 1"):
        Engine(1e12, mfu)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (math.inf, 0), (1, -1), (1, math.inf), (1, math.nan)])
def test_a_link_has_a_bandwidth_and_a_latency(bandwidth: float, latency: float) -> None:
    with pytest.raises(UsageError, match=r"a (bandwidth must|latency is)"):
        Link(bandwidth, latency)


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan])
def test_a_share_is_between_none_and_all(share: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        Link(1e9).size_for(share)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(UsageError, match="tokens of a chunk must be more than 0"):
        crossover(LLAMA_8B, H100, Link(1e9), 0)
    with pytest.raises(UsageError, match="tokens of a chunk must be more than 0"):
        Link(1e9).load_seconds(LLAMA_8B, 16, 0)
