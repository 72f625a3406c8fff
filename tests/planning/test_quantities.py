"""Bandwidths, speeds and numbers, as people write them."""

from __future__ import annotations

import pytest

from lmcache_core.planning.quantities import format_bandwidth, parse_bandwidth, parse_flops, parse_number
from lmcache_core.units import UnitError


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [
        ("64Gbps", 8e9),
        ("64 gbps", 8e9),
        ("0.4Tbps", 5e10),
        ("100Mbps", 1.25e7),
        ("8GB/s", 8e9),
        ("7.5GiB/s", 7.5 * 2**30),
        ("900MiB/s", 900 * 2**20),
    ],
)
def test_a_bandwidth_is_in_bits_or_in_bytes(text: str, bytes_a_second: float) -> None:
    assert parse_bandwidth(text) == bytes_a_second


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no bandwidth; write bits"),
        ("fast", "is no bandwidth; write bits"),
        ("64", "there is no unit ''"),
        ("64G", "there is no unit 'G'"),
        ("64Gb/s", "b is bits or bytes"),
        ("8XB/s", "there is no unit 'XB'"),
        ("0Gbps", "must be more than 0"),
        ("-1Gbps", "is no bandwidth; write bits"),
        ("9e99Gbps", "more than there can be"),
        ("1" * 65 + "Gbps", "text of 69 characters"),
    ],
)
def test_what_is_no_bandwidth_is_refused(text: str, why: str) -> None:
    with pytest.raises(UnitError, match=why):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "flop"),
    [("990T", 9.9e14), ("1.98P", 1.98e15), ("989 TFLOPS", 9.89e14), ("2PFLOP/s", 2e15), ("9.9e14", 9.9e14)],
)
def test_speeds_of_computing(text: str, flop: float) -> None:
    assert parse_flops(text) == flop


@pytest.mark.parametrize("text", ["990B", "990 TB/s", "T", "0T", "nan", "inf", "1e30E"])
def test_what_is_no_speed_of_computing_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match=r"is no speed of computing.*write FLOP a second as in 990T"):
        parse_flops(text)


@pytest.mark.parametrize("text", ["989", "989.5", "1e3", "999999999", "900M"])
def test_a_speed_that_lacks_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UnitError) as refused:
        parse_flops(text)
    assert str(refused.value) == (
        f"{text!r} is no speed of computing: no processor is that slow; write FLOP a second as in 990T, 1.98P or 9.9e14"
    )
    assert parse_flops("1e9") == 1e9


@pytest.mark.parametrize(("text", "number"), [("8.03B", 8.03e9), ("350M", 3.5e8), ("16k", 16e3), ("405e9", 4.05e11)])
def test_large_numbers(text: str, number: float) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "8.03X", "0", "-3", "1e99"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match=r"is no number.*write a number as in 8\.03B"):
        parse_number(text)


@pytest.mark.parametrize(
    ("rate", "text"), [(8e9, "64Gbps"), (5e10, "400Gbps"), (1.25e11, "1Tbps"), (1.5e6, "12Mbps"), (0.01, "0.08bps")]
)
def test_bandwidths_are_shown_in_bits(rate: float, text: str) -> None:
    assert format_bandwidth(rate) == text
