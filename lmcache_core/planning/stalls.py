"""How often an engine stalls for a page that is not copied yet, by the number of pages that are copied ahead.

Pages that were taken and whose place in the window is not filled again are a queue: taken at a rate, copied at another,
rho the first by the second, and at most w long, the window's size. An engine that takes a page while w are in the queue
stalls. The copies take an exponential time (M/M/1/w) or, as pages of one size over one link do, a constant one
(M/D/1/w). Two engines are told apart: one that goes on without (`lost`: the classical loss queue), and one that waits
for its page and asks for nothing meanwhile (`waiting`).

Sources: Kleinrock, Queueing Systems I, 1975, 3.6 for M/M/1/w; Gross and Harris, Fundamentals of Queueing Theory, 5.1,
for the chain embedded at departures of M/G/1/w. An engine that waits is a place more at which nothing arrives, so its
accepted arrivals see what departures of a queue with w + 1 places leave behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from lmcache_core.errors import UsageError

__all__ = ["LARGEST", "smallest_window", "stall_constant", "stall_constant_lost", "stall_exponential"]

LARGEST = 4096
"""Pages, or bursts of them: windows are searched up to here."""

_BUSIEST = 600.0
_HUGE = 1e200


def stall_exponential(rho: float, window: int) -> float:
    """Probability of a stall if copies take an exponential time, rho^w / (1 + rho + ... + rho^w). It is the same
    whether the engine waits or not: both see a geometric queue cut off behind w."""
    _check(rho, window)
    # With powers of what is below 1, so that none overflows
    if rho <= 1:
        return math.exp(window * math.log(rho)) / math.fsum(rho**k for k in range(window + 1))
    return 1 / math.fsum(rho**-k for k in range(window + 1))


def stall_constant(rho: float, window: int) -> float:
    """Probability that an engine that waits stalls, if copies take a constant time."""
    _check(rho, window)
    return next(islice(_waiting(rho), window - 1, None))


def stall_constant_lost(rho: float, window: int) -> float:
    """Probability that an engine that goes on without the page meets a full queue, if copies take a constant time:
    1 - 1 / (pi_0 + rho), right to about 1e-15."""
    _check(rho, window)
    return next(islice(_lost(rho), window - 1, None))


def smallest_window(
    arrivals: float, offloads: float, target: float, *, burst: int = 1, constant: bool = True, waits: bool = True
) -> int | None:
    """The fewest pages to keep copied ahead; None if no window up to `LARGEST` bursts is enough, as where pages are
    taken as fast as they are copied.

    Args:
        arrivals: Pages that the engine takes a second.
        offloads: Pages that can be copied a second.
        target: The most that stalls may be of all times that it takes pages; for an engine that does not wait, the
            most that those times may be at which it loses something.
        burst: Pages that it takes at a time, as a chunk of a prefill does. A burst is then what the queue has one of:
            it waits until there is room for all of it, which is when a whole burst has left.
        constant: Whether a copy takes a constant time, else an exponential one.
        waits: Whether the engine waits for a page, else it goes on without what is in it.

    Raises:
        UsageError: A rate, the target or the burst cannot be meant.
    """
    for name, rate in (("arrivals", arrivals), ("offloads", offloads)):
        if not 0 < rate < math.inf:
            raise UsageError(f"{name} are a number of pages a second, above 0, not {rate!r}")
    if not 0 < target < 1:
        raise UsageError(f"the target is a probability between 0 and 1, not {target!r}")
    if burst < 1:
        raise UsageError(f"a burst has at least one page, not {burst!r}")
    if (rho := arrivals / offloads) >= 1:
        return None
    found = (_waiting(rho) if waits else _lost(rho)) if constant else _geometric(rho)
    sizes = (size for size, each in zip(range(1, LARGEST + 1), found, strict=False) if each <= target)
    size = next(sizes, None)
    return None if size is None else size * burst


def _geometric(rho: float) -> Iterator[float]:
    """Of windows 1, 2, ... with exponential copies: p_w = rho p_(w-1) / (1 + rho p_(w-1))."""
    found = 1.0
    while True:
        found = rho * found / (1 + rho * found)
        yield found


def _waiting(rho: float) -> Iterator[float]:
    """Of windows 1, 2, ... with constant copies: what departures leave in a queue of w + 1 places, at w."""
    for left in islice(_left_behind(rho), 1, None):
        yield left.these / left.total


def _lost(rho: float) -> Iterator[float]:
    """Of windows 1, 2, ... with constant copies, where nobody waits."""
    for left in _left_behind(rho):
        yield max(1 - 1 / (left.none / left.total + rho), 0.0)


class _Left(NamedTuple):
    """How often departures leave something behind, in some unit."""

    none: float
    these: float
    total: float
    """These or fewer."""


def _left_behind(rho: float) -> Iterator[_Left]:
    """Of 0, 1, ... jobs. But for the unit it is the same for all sizes of the queue that are larger.

    Of j + 1 the chain goes down to j with no arrival; from below it goes up beyond j with enough of them. The two are
    as frequent, which gives each from those before it by sums of positive numbers alone.
    """
    tails = _tails(rho)
    none = math.exp(-rho)
    found = [1.0]
    total = 1.0
    while True:
        yield _Left(found[0], found[-1], total)
        j = len(found) - 1
        # From i jobs left, i - 1 + arrivals; from none, the first arrival is served before the next departure.
        oldest = max(1, j + 2 - len(tails) + 1)
        up = math.fsum(found[i] * tails[j - i + 2] for i in range(oldest, j + 1))
        if j + 1 < len(tails):
            up += found[0] * tails[j + 1]
        found.append(up / none)
        total += up / none
        if total > _HUGE:
            found = [each / total for each in found]
            total = 1.0


def _tails(rho: float) -> list[float]:
    """P(at least 0, 1, ... arrivals) while one page is copied, as far as that is not 0 in floating point."""
    terms: list[float] = []
    while not terms or terms[-1] or len(terms) < rho:
        n = len(terms)
        terms.append(math.exp(n * math.log(rho) - rho - math.lgamma(n + 1)))
    tails, tail = [], 0.0
    for term in reversed(terms[1:-1]):
        tail += term
        tails.append(tail)
    return [1.0, *reversed(tails)]


def _check(rho: float, window: int) -> None:
    if not 0 < rho <= _BUSIEST:
        raise UsageError(f"rho is pages taken by pages copied in a time, above 0 and at most {_BUSIEST}, not {rho!r}")
    if window < 1:
        raise UsageError(f"a window has at least one page, not {window!r}")
