"""Bandwidths, speeds of computing and large numbers, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from lmcache_core.units import UnitError, parse_size

__all__ = ["format_bandwidth", "parse_bandwidth", "parse_flops", "parse_number"]

_NUMBER = re.compile(r"\s*(\d{1,24}(?:\.\d{1,24})?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z/]*)\s*", re.ASCII)
_BITS = {"bps": 1, "kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12}
_BITS_BY_CASE = {unit.lower(): factor for unit, factor in _BITS.items()}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "p": 10**15, "e": 10**18}
_LONGEST = 64
_FASTEST = 10**18
"""Bytes a second; FLOP a second are at most a thousand times as many."""
_SLOWEST = 10**9
"""FLOP a second. Less is a figure whose unit was left out."""


def parse_bandwidth(text: str) -> float:
    """Bytes a second of text such as `64Gbps` (bits, powers of 1000), `8GB/s` or `7.5GiB/s`.

    Raises:
        UnitError: It is none; the message says what to write.
    """
    advice = "write bits a second as in 64Gbps, or bytes a second as in 8GB/s"
    number, unit = _split(text, "bandwidth", advice)
    if unit.lower() in _BITS_BY_CASE:
        rate = number * _BITS_BY_CASE[unit.lower()] / 8
    elif unit.lower().endswith("b/s"):
        if unit.endswith("b/s"):
            raise UnitError(f"{text!r} is no bandwidth: b is bits or bytes; {advice}")
        rate = Fraction(parse_size(f"1{unit[:-2]}")) * number
    else:
        raise UnitError(f"{text!r} is no bandwidth: there is no unit {unit!r}; {advice}")
    return _within(text, "bandwidth", rate, _FASTEST, advice)


def parse_flops(text: str) -> float:
    """FLOP a second of text such as `990T`, `1.98PFLOPS` or `9.9e14`.

    Raises:
        UnitError: It is none; the message says what to write.
    """
    advice = "write FLOP a second as in 990T, 1.98P or 9.9e14"
    number, unit = _split(text, "speed of computing", advice)
    prefix = re.sub(r"flop(s|/s)?$", "", unit, flags=re.IGNORECASE).lower()
    if prefix not in _DECIMAL or prefix == "b":
        raise UnitError(f"{text!r} is no speed of computing: there is no unit {unit!r}; {advice}")
    speed = _within(text, "speed of computing", number * _DECIMAL[prefix], 1000 * _FASTEST, advice)
    if speed < _SLOWEST:
        raise UnitError(f"{text!r} is no speed of computing: no processor is that slow; {advice}")
    return speed


def parse_number(text: str) -> float:
    """A number such as `8.03B`, `70.6G`, `4k` or `405e9`, with prefixes of powers of 1000.

    Raises:
        UnitError: It is none; the message says what to write.
    """
    advice = "write a number as in 8.03B, 350M, 16k or 405e9"
    number, unit = _split(text, "number", advice)
    if unit.lower() not in _DECIMAL:
        raise UnitError(f"{text!r} is no number: there is no unit {unit!r}; {advice}")
    return _within(text, "number", number * _DECIMAL[unit.lower()], _FASTEST, advice)


def format_bandwidth(bytes_a_second: float) -> str:
    """Shortest text for a bandwidth, in bits as networks are named: `64Gbps`."""
    bits = bytes_a_second * 8
    unit = max((unit for unit, factor in _BITS.items() if bits >= factor), key=_BITS.__getitem__, default="bps")
    return f"{bits / _BITS[unit]:.4g}{unit}"


def _split(text: str, kind: str, advice: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        shown = repr(text) if len(text) <= _LONGEST else f"text of {len(text)} characters"
        raise UnitError(f"{shown} is no {kind}; {advice}")
    return Fraction(match[1]), match[2]


def _within(text: str, kind: str, value: Fraction, most: int, advice: str) -> float:
    if value <= 0:
        raise UnitError(f"{text!r} is no {kind}: it must be more than 0; {advice}")
    if value > most:
        raise UnitError(f"{text!r} is no {kind}: it is more than there can be; {advice}")
    return float(value)
