"""What `lmcache-core bench tier` has measured, as links: latency and bandwidth by the least squares of t = o + n/B."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_core.errors import ConfigError
from lmcache_core.planning.forms import Link

__all__ = ["Measured", "fit", "read_measured"]

_GB = 1e9
_LARGEST_FILE = 16 << 20


class Measured(NamedTuple):
    """A tier, as it was measured."""

    tier: str
    link: Link
    concurrency: int
    """Chunks that were under way at once."""
    sizes: int
    """Of how many sizes; with one alone all its time went to the bytes."""
    off: float
    """The furthest that the line is off a measurement, as a part of that."""


def fit(points: Iterable[tuple[float, float]]) -> Link:
    """The link for measured pairs of bytes and seconds of a transfer. Each counts by how far it is off as a part of
    itself, so that small transfers, which tell the latency, weigh as much as large ones. A latency or a time for bytes
    below zero is noise: it is 0, and the other one is fitted alone.

    Raises:
        ConfigError: There is nothing to fit, or bytes take no time.
    """
    known = [(nbytes, seconds) for nbytes, seconds in points if nbytes > 0 and seconds > 0]
    if not known:
        raise ConfigError("nothing was measured; measure it again with lmcache-core bench tier")
    # Of o/t + G n/t = 1: sums of u = 1/t and v = n/t
    uu = sum(1 / t**2 for _, t in known)
    uv = sum(n / t**2 for n, t in known)
    vv = sum((n / t) ** 2 for n, t in known)
    u, v = sum(1 / t for _, t in known), sum(n / t for n, t in known)
    proportional = Link(vv / v)
    if len({n for n, _ in known}) < 2:
        return proportional
    determinant = uu * vv - uv * uv
    latency, a_byte = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if latency <= 0:
        return proportional
    if a_byte <= 0:
        raise ConfigError("larger chunks take no longer; measure larger --sizes to learn a bandwidth")
    return Link(1 / a_byte, latency)


def read_measured(path: Path, nbytes: float) -> list[Measured]:
    """Every tier of the JSON that `lmcache-core bench tier --json` writes, as it is read: with as many chunks at once
    as load chunks of `nbytes` fastest, by the lines through what was measured.

    Raises:
        ConfigError: It is no such file, or has no tier that was measured.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    advice = "write one with lmcache-core bench tier --json FILE"
    if len(text) > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than such a file can be; {advice}")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; {advice}") from None
    rows = whole.get("rows") if isinstance(whole, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} has no rows of tiers; {advice}")
    reads: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for number, row in enumerate(rows):
        if row.get("verb") == "get" and row.get("gbs") is not None:
            tier, concurrency, point = _point(row, f"{path}: row {number}", advice)
            reads.setdefault(tier, {}).setdefault(concurrency, []).append(point)
    if not reads:
        raise ConfigError(f"{path} has no tier that was read; {advice}")
    return [_best(tier, by_concurrency, path, nbytes) for tier, by_concurrency in reads.items()]


def _point(row: Mapping[str, Any], where: str, advice: str) -> tuple[str, int, tuple[float, float]]:
    tier, size, concurrency, rate = (row.get(name) for name in ("tier", "size", "concurrency", "gbs"))
    if not isinstance(tier, str) or type(size) is not int or type(concurrency) is not int:
        raise ConfigError(f"{where} has no tier, size and concurrency; {advice}")
    if type(rate) not in (int, float) or not 1e-9 <= rate <= 1e9:  # type: ignore[operator]  # it is a number here
        raise ConfigError(f"{where} has no rate in gbs; {advice}")
    if not 1 <= size <= 1 << 50 or concurrency < 1:
        raise ConfigError(f"{where} has a size or a concurrency that cannot be; {advice}")
    return tier, concurrency, (float(size), size / (float(rate) * _GB))  # type: ignore[arg-type]


def _best(tier: str, by_concurrency: Mapping[int, list[tuple[float, float]]], path: Path, nbytes: float) -> Measured:
    """Of those concurrencies that were measured with most sizes."""
    sizes = {concurrency: len({n for n, _ in points}) for concurrency, points in by_concurrency.items()}
    found: list[Measured] = []
    for concurrency, points in sorted(by_concurrency.items()):
        if sizes[concurrency] < max(sizes.values()):
            continue
        try:
            link = fit(points)
        except ConfigError as error:
            raise ConfigError(f"{path}: tier {tier!r}, {concurrency} at once: {error}") from None
        off = max(abs(link.seconds(n) / t - 1) for n, t in points)
        found.append(Measured(tier, link, concurrency, sizes[concurrency], off))
    return min(found, key=lambda each: each.link.seconds(nbytes))
