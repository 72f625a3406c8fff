"""What callers give to the public interface, checked: an error says which argument, what it was and what to write."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from lmcache_core.errors import LayoutError, UsageError

LONGEST_WAIT = 1e8
"""Seconds, some three years."""


def kind(value: object) -> str:
    """Type of a value with its article: `a dict`, `an int`."""
    name = type(value).__name__
    return f"a{'n' * (name[:1].lower() in ('a', 'e', 'i', 'o', 'u'))} {name}"


def shown(value: object) -> str:
    """A value in an error: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  a value may be anything
        return kind(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def token_count(name: str, value: Any, advice: str = "") -> int:
    """A number of tokens, of any integer type.

    Raises:
        UsageError: It is none.
    """
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise UsageError(f"{name} is a whole number of tokens, not {shown(value)}{advice}") from None
    if value < 0:
        raise UsageError(f"{name} must not be negative: {shown(value)}{advice}")
    return int(value)


def token_counts(name: str, values: Any) -> list[int]:
    """Several numbers of tokens.

    Raises:
        UsageError: They are none.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise UsageError(f"{name} are places in tokens; write [32, 64], not {shown(values)}")
    try:
        given = list(values)
    except Exception as error:  # whatever keeps an object of the caller's from being read
        raise UsageError(f"{name} cannot be read: {kind(error)}: {error}") from error
    return [token_count(f"each of {name}", value) for value in given]


def tier_names(name: str, values: Any) -> Sequence[str] | None:
    """Names of tiers, or None for all. Text is one name.

    Raises:
        UsageError: They are none.
    """
    if values is None:
        return None
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, list | tuple | AbstractSet):
        raise UsageError(f"{name} has names of tiers; write ['cpu', 'disk'] or None for all, not {kind(values)}")
    for value in values:
        if not isinstance(value, str):
            raise UsageError(f"{name}: the name of a tier is text, not {shown(value)}")
    return tuple(values)


def tier_name(name: str, value: Any) -> str:
    """Name of one tier.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} is the name of one tier, such as 'cpu', not {shown(value)}")
    return value


def seconds(value: Any, name: str = "a timeout") -> float | None:
    """A timeout that every wait accepts: no longer than some years. None is for ever.

    Raises:
        UsageError: It is no number, or a negative one.
    """
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise UsageError(f"{name} is a number of seconds, or None to wait for as long as it takes; not {shown(value)}")
    if value < 0:
        raise UsageError(f"{name} must not be negative: {shown(value)}; write 0 to wait for nothing")
    return float(min(value, LONGEST_WAIT))


def view_that(view: Any, verb: str, arguments: str) -> None:
    """Make sure that a view has a method.

    Raises:
        LayoutError: It has none.
    """
    if not callable(getattr(view, verb, None)) or isinstance(view, type):
        raise LayoutError(
            f"a view of KV has a method {verb}({arguments}), see KVView; {kind(view)} has none: a view is made by "
            "register(...).view(blocks) of a transfer, or is an object of your own"
        )
