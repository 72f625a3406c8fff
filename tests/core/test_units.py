"""Sizes and durations: what is accepted, what is refused and what the refusal tells the user to write."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.config import load_config
from lmcache_core.errors import ConfigError
from lmcache_core.units import (
    ByteSize,
    Duration,
    UnitError,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

GIB = 2**30


@pytest.mark.parametrize("parse", [parse_size, parse_duration])
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_says_where_it_may_come_from(parse: Callable[[int | float | str], object], value: bool) -> None:
    with pytest.raises(UnitError, match=r"YAML reads yes, no, on and off as true and false.*write a number"):
        parse(value)
    with pytest.raises(UnitError, match=f"^{str(value).lower()} is not a"):
        parse(value)


@pytest.mark.parametrize("written", ["yes", "no", "on", "off", "true", "Yes", "OFF"])
def test_a_word_that_yaml_takes_for_a_truth_value_is_explained_with_its_line(written: str) -> None:
    with pytest.raises(ConfigError, match=r"<text>:2: cpu\.capacity: (true|false).*YAML reads yes, no, on and off"):
        load_config(f"cpu:\n  capacity: {written}\n", {})
    with pytest.raises(ConfigError, match=r"<text>:1: lease_timeout: (true|false).*YAML reads yes, no, on and off"):
        load_config(f"lease_timeout: {written}\n", {})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * GIB),
        ("500 MB", 500_000_000),
        (1024, 1024),
        ("1024", 1024),
        ("1.5TiB", 3 * 2**39),
        ("1e3 kb", 1_000_000),
        (2.0, 2),
        ("7b", 7),
        ("0", 0),
        (" 1 gib ", GIB),
        ("0.1GiB", 107374182),
    ],
)
def test_sizes(text: int | float | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20 bananas", "'20 bananas' is not a size: there is no unit 'bananas'; write a number of bytes or a size"),
        ("20G", "write GiB (powers of 1024) or GB (powers of 1000)"),
        ("-1GiB", "must not be negative"),
        (-5, "must not be negative"),
        ("", "such as 512MiB, 20GiB or 1.5TB"),
        ("GiB", "such as 512MiB, 20GiB or 1.5TB"),
        ("9" * 5000, "text of 5000 characters is not a size"),
        ("9EiB", "no unit 'EiB'"),
        ("100000PiB", "at most 9223372036854775807 bytes"),
        (1.5, "not a whole number of bytes"),
        (float("inf"), "inf is not a size"),
        (float("nan"), "nan is not a size"),
        (True, "true is not a size"),
        ("\u0661GiB", "is not a size"),
    ],
)
def test_what_is_no_size(text: int | float | str, says: str) -> None:
    with pytest.raises(UnitError) as error:
        parse_size(text)
    assert says in str(error.value)
    assert isinstance(error.value, ConfigError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (1000, "1000B"),
        (1536, "1.5KiB"),
        (20 * GIB, "20GiB"),
        (500_000_000_000, "500GB"),
        (123_456_789, "117.7MiB"),
        (2**63 - 1, "8192.0PiB"),
    ],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 2**60))
def test_a_formatted_size_is_close_and_exact_up_to_one_decimal(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.05 + 1


@given(st.integers(1, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_survive_a_round_trip(number: int, unit: str) -> None:
    assert format_size(parse_size(f"{number}{unit}")) == f"{number}{unit}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("2s", 2.0),
        (3, 3.0),
        ("1.5m", 90.0),
        ("2 min", 120.0),
        ("1h", 3600.0),
        ("10us", 1e-5),
        (0.5, 0.5),
    ],
)
def test_durations(text: int | float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2 fortnights", "'2 fortnights' is not a duration: there is no unit 'fortnights'; write a number of seconds"),
        ("-1s", "must not be negative"),
        ("soon", "such as 250ms, 2s, 1.5m, 1h or 7d (units are us, ms, s, m, min, h, d)"),
        ("7days", "there is no unit 'days'; write a number of seconds or a duration such as 250ms, 2s, 1.5m, 1h or 7d"),
        (False, "false is not a duration"),
        (float("inf"), "inf is not a duration"),
        ("99999999d", "at most 1000000000 seconds"),
    ],
)
def test_what_is_no_duration(text: int | float | str, says: str) -> None:
    with pytest.raises(UnitError) as error:
        parse_duration(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.25, "250ms"), (2.0, "2s"), (90.0, "1.5m"), (61.0, "61s"), (3600.0, "1h"), (1e-5, "10us")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(1e-6, 1e6))
def test_a_formatted_duration_is_close(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


def test_annotated_fields_are_plain_numbers_to_python() -> None:
    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        capacity: ByteSize = 2**20
        timeout: Duration = 2.0

    assert msgspec.convert({"capacity": 5, "timeout": 0.5}, Options) == Options(capacity=5, timeout=0.5)
