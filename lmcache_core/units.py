"""Sizes and durations as people write them, and the types of option fields that accept them.

Annotate a field of a `msgspec.Struct` with `ByteSize`, `Duration` or `Secret`. To Python and type checkers they are
`int`, `float` and `str`; read through `lmcache_core.config.convert` (as all configuration is) the first two also take
text with a unit, and the last is masked wherever it would be printed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated

import msgspec

from lmcache_core.errors import ConfigError

__all__ = [
    "ByteSize",
    "Duration",
    "Secret",
    "UnitError",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_size",
]

ByteSize = Annotated[int, msgspec.Meta(extra={"unit": "bytes"})]
"""A number of bytes, never negative; accepts text such as `20GiB`. `Annotated[ByteSize, Meta(ge=…)]` limits it."""

Duration = Annotated[float, msgspec.Meta(extra={"unit": "seconds"})]
"""Seconds; accepts text such as `250ms`."""

Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
"""Text that is never printed."""

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {unit.lower(): factor for unit, factor in (_BINARY | _DECIMAL).items()}
_AMBIGUOUS = {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB", "p": "PiB"}
_SECONDS = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_NUMBER = re.compile(r"\s*([+-]?\d{1,24}(?:\.\d{1,24})?(?:[eE][+-]?\d{1,2})?)\s*([^\W\d_]*)\s*", re.ASCII)
_LARGEST_SIZE = 2**63 - 1
_LARGEST_DURATION = 10**9


class UnitError(ConfigError, ValueError):
    """Not a size or duration; the message says how to write one."""


def _split(value: object, kind: str, advice: str) -> tuple[Fraction, str]:
    """Number and unit of what a user wrote."""
    if isinstance(value, str) and len(value) > 64:
        raise UnitError(f"text of {len(value)} characters is not a {kind}; {advice}")
    if isinstance(value, bool):
        word = str(value).lower()
        raise UnitError(f"{word} is not a {kind} (YAML reads yes, no, on and off as true and false); {advice}")
    if not isinstance(value, int | float | str):
        raise UnitError(f"{value!r} is not a {kind}; {advice}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnitError(f"{value!r} is not a {kind}; {advice}")
    if not isinstance(value, str):
        return Fraction(value), ""
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise UnitError(f"{value!r} is not a {kind}; {advice}")
    return Fraction(match[1]), match[2]


def parse_size(value: int | float | str) -> int:
    """Bytes of a size such as `20GiB`, `500 MB`, `"1.5TiB"` or `1024`. A number without a unit is bytes.

    Raises:
        UnitError: It isn't a size; the message says what to write.
    """
    advice = "write a number of bytes or a size such as 512MiB, 20GiB or 1.5TB"
    number, unit = _split(value, "size", advice)
    if unit.lower() in _AMBIGUOUS:
        binary = _AMBIGUOUS[unit.lower()]
        raise UnitError(f"{value!r} is not a size: write {binary} (powers of 1024) or {binary[0]}B (powers of 1000)")
    factor = _SIZES.get(unit.lower() or "b")
    if factor is None:
        raise UnitError(f"{value!r} is not a size: there is no unit {unit!r}; {advice}")
    if number < 0:
        raise UnitError(f"{value!r} is not a size: it must not be negative; {advice}")
    result = number * factor
    if result > _LARGEST_SIZE:
        raise UnitError(f"{value!r} is not a size: at most {_LARGEST_SIZE} bytes (8 EiB) can be used; {advice}")
    if not unit and result.denominator != 1:
        raise UnitError(f"{value!r} is not a size: it is not a whole number of bytes; {advice}")
    return int(result)


def format_size(nbytes: int) -> str:
    """Shortest text for a size, exact where one decimal is enough: `20GiB`, `500GB`, `117.7MiB`."""
    if nbytes == 0:
        return "0B"
    for units in (_BINARY, _DECIMAL):
        fitting = [(unit, factor) for unit, factor in units.items() if nbytes >= factor]
        if fitting and nbytes * 10 % fitting[-1][1] == 0:
            unit, factor = fitting[-1]
            return f"{nbytes / factor:.15g}{unit}"
    unit, factor = [(unit, factor) for unit, factor in _BINARY.items() if nbytes >= factor][-1]
    return f"{nbytes / factor:.1f}{unit}"


def parse_duration(value: int | float | str) -> float:
    """Seconds of a duration such as `250ms`, `2s`, `1.5m` or `3`. A number without a unit is seconds.

    Raises:
        UnitError: It isn't a duration; the message says what to write.
    """
    units = ", ".join(_SECONDS)
    advice = f"write a number of seconds or a duration such as 250ms, 2s, 1.5m, 1h or 7d (units are {units})"
    number, unit = _split(value, "duration", advice)
    factor = _SECONDS.get(unit or "s")
    if factor is None:
        raise UnitError(f"{value!r} is not a duration: there is no unit {unit!r}; {advice}")
    if number < 0:
        raise UnitError(f"{value!r} is not a duration: it must not be negative; {advice}")
    if number * factor > _LARGEST_DURATION:
        raise UnitError(f"{value!r} is not a duration: at most {_LARGEST_DURATION} seconds can be used; {advice}")
    return float(number * factor)


def format_duration(seconds: float) -> str:
    """Shortest text for a duration: `250ms`, `2s`, `1.5m`, `1h`."""
    for unit, factor in (("h", 3600.0), ("m", 60.0)):
        if seconds >= factor and seconds * 10 % factor == 0:
            return f"{seconds / factor:g}{unit}"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.9g}s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.9g}ms"
    return f"{seconds * 1e6:.9g}us"
