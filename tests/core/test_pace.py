"""What is learned of a tier's speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.pace import FEWEST, SPREADS, Pace

MIB = 2**20


def learned(*calls: tuple[int, float]) -> Pace:
    pace = Pace()
    for number, (nbytes, seconds) in enumerate(calls):
        pace.add(nbytes, seconds, float(number))
    return pace


def test_nothing_is_known_of_few_calls() -> None:
    pace = learned(*[(MIB, 0.01)] * (FEWEST - 1))
    assert (pace.known, pace.expected(MIB), pace.longest(MIB)) == (False, None, None)
    pace.add(MIB, 0.01, 7.0)
    assert pace.known
    assert pace.measured == 7.0
    assert pace.expected(MIB) == pytest.approx(0.01)


def test_latency_and_bandwidth_are_told_apart_by_calls_of_different_sizes() -> None:
    """2 ms and 1 GiB/s."""
    sizes = [MIB, 2 * MIB, 4 * MIB, MIB, 3 * MIB, 4 * MIB, 2 * MIB, MIB] * 4
    pace = learned(*((size, 0.002 + size / 2**30) for size in sizes))
    assert pace.latency == pytest.approx(0.002, rel=1e-6)
    assert pace.bandwidth == pytest.approx(2**30, rel=1e-6)
    assert pace.expected(64 * MIB) == pytest.approx(0.002 + 64 / 1024, rel=1e-6)


def test_calls_of_one_size_are_all_bandwidth() -> None:
    pace = learned(*[(4 * MIB, 0.02)] * FEWEST)
    assert pace.latency == pytest.approx(0.0, abs=1e-12)
    assert pace.bandwidth == pytest.approx(200 * MIB)


def test_a_tier_that_becomes_slow_is_known_as_such_soon() -> None:
    pace = learned(*[(MIB, 0.01)] * 50, *[(MIB, 1.0)] * 10)
    expected = pace.expected(MIB)
    assert expected is not None
    assert expected == pytest.approx(1.0 - 0.99 * 0.9**10, rel=1e-6)


def test_the_spread_is_the_mean_distance_from_what_was_expected() -> None:
    pace = learned(*[(MIB, 0.01), (MIB, 0.03)] * 100)
    assert pace.spread == pytest.approx(0.01, rel=0.1)
    assert pace.longest(MIB) == pytest.approx((pace.expected(MIB) or 0) + SPREADS * pace.spread)


def test_what_cannot_be_a_call_teaches_nothing() -> None:
    pace = learned((0, 1.0), (MIB, -1.0))
    assert pace.calls == 0


@given(st.lists(st.tuples(st.integers(1, 2**34), st.floats(0, 1e4)), min_size=1, max_size=60), st.integers(1, 2**34))
def test_nothing_is_ever_below_zero(calls: list[tuple[int, float]], nbytes: int) -> None:
    pace = learned(*calls)
    assert pace.latency >= 0
    assert pace.seconds_a_byte >= 0
    assert pace.spread >= 0
    longest, expected = pace.longest(nbytes), pace.expected(nbytes)
    if pace.known:
        assert longest is not None
        assert expected is not None
        assert longest >= expected >= 0
