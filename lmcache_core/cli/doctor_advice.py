"""What to change in a configuration, from what was measured of its tiers. Decides only; nothing here does I/O."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lmcache_core.cli.doctor_checks import Checked
from lmcache_core.config import TierConfig
from lmcache_core.units import format_duration, format_size

__all__ = ["advise", "memory_advice"]

_FASTER = 1.5
"""How much faster a lower tier must be before that is more than noise."""


def advise(tiers: Sequence[TierConfig], checked: Sequence[Checked]) -> None:
    """Add to `checked` what the tiers' settings and figures say together."""
    for tier, found in zip(tiers, checked, strict=True):
        _deadlines(tier, found)
    _order(checked)
    _same_place(tiers, checked)


def _deadlines(tier: TierConfig, found: Checked) -> None:
    for verb, key, seconds, limit in (
        ("read", "read_timeout", found.chunk_read_s, tier.read_timeout),
        ("written", "write_timeout", found.chunk_write_s, tier.write_timeout),
    ):
        if seconds is None:
            continue
        wants = f"{key}: {format_duration(max(0.1, round(4 * seconds, 1)))}"
        if seconds > limit:
            found.problems.append(
                f"a chunk of 8 MiB is {verb} in {seconds:.2g} s, later than {key} ({format_duration(limit)}): nothing "
                f"would ever arrive in time; write {wants}"
            )
        elif seconds > limit / 2:
            found.advice.append(
                f"a chunk of 8 MiB is {verb} in {seconds:.2g} s, which leaves little of {key} "
                f"({format_duration(limit)}) when several are under way; write {wants}"
            )


def _order(checked: Sequence[Checked]) -> None:
    measured = [found for found in checked if found.read_gbs]
    for upper, lower in itertools.pairwise(measured):
        assert upper.read_gbs is not None and lower.read_gbs is not None  # noqa: PT018
        if lower.read_gbs > _FASTER * upper.read_gbs:
            upper.advice.append(
                f"{lower.name}, below it, is read faster ({lower.read_gbs:.2g} GB/s, this one {upper.read_gbs:.2g}): "
                "tiers go from fast to slow; swap them, or leave this one out"
            )


def _same_place(tiers: Sequence[TierConfig], checked: Sequence[Checked]) -> None:
    seen: list[tuple[TierConfig, Checked]] = []
    for tier, found in zip(tiers, checked, strict=True):
        for other, before in seen:
            if found.drive is not None and found.drive == before.drive:
                found.advice.append(
                    f"it is on the same file system as {other.name}: it is no faster and no larger than that one; put "
                    "it on another drive, or make one tier of them"
                )
            elif tier.backend == other.backend != "cpu" and tier.options == other.options:
                found.advice.append(f"it is the same place as {other.name}; delete one of the two")
        seen.append((tier, found))


def memory_advice(capacity: int, free: int | None) -> str:
    """What to change if the host pool does not fit into the memory that is free; empty if it does."""
    if free is None or capacity <= free:
        return ""
    return (
        f"cpu.capacity: {format_size(capacity)} is more than the {format_size(free)} of memory that this machine has "
        "free; a node here would not start"
    )
