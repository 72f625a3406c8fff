"""The queues behind a window's size, against other derivations of the same and against the window itself at work."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.planning.stalls import (
    smallest_window,
    stall_constant,
    stall_constant_lost,
    stall_exponential,
)
from lmcache_core.planning.window import OffloadWindow

# Against other derivations


@pytest.mark.parametrize(
    ("rho", "window", "stalls"),
    [(0.5, 1, 1 / 3), (0.5, 2, 1 / 7), (0.5, 3, 1 / 15), (1.0, 9, 0.1), (2.0, 1, 2 / 3), (2.0, 2, 4 / 7)],
)
def test_exponential_copies_by_hand(rho: float, window: int, stalls: float) -> None:
    assert stall_exponential(rho, window) == pytest.approx(stalls, rel=1e-12)


def test_exponential_copies_far_out() -> None:
    assert stall_exponential(0.5, 1000) == pytest.approx(0.5**1001, rel=1e-9)
    assert stall_exponential(500.0, 4000) == pytest.approx(0.998, rel=1e-9)


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 1.0, 3.0])
def test_with_one_page_only_the_mean_of_a_copy_counts(rho: float) -> None:
    """Erlang's loss formula holds for any service time."""
    assert stall_constant_lost(rho, 1) == pytest.approx(rho / (1 + rho))
    assert stall_exponential(rho, 1) == pytest.approx(rho / (1 + rho))


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 1.0, 3.0])
def test_an_engine_with_one_page_waits_if_it_comes_within_one_copy(rho: float) -> None:
    assert stall_constant(rho, 1) == pytest.approx(1 - math.exp(-rho))


def embedded_chain(rho: float, places: int) -> list[float]:
    """What departures of M/D/1/places leave behind, by iterating the chain's matrix."""
    arrivals = [math.exp(-rho) * rho**k / math.factorial(k) for k in range(places)]
    rows = []
    for left in range(places):
        start = max(left - 1, 0)
        row = [0.0] * start + arrivals[: places - 1 - start]
        rows.append([*row, 1 - math.fsum(row)])
    found = [1 / places] * places
    for _ in range(3000):
        found = [math.fsum(found[i] * rows[i][j] for i in range(places)) for j in range(places)]
    return found


@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8, 0.95, 1.0, 1.5])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 12])
def test_constant_copies_as_the_chain_has_it(rho: float, window: int) -> None:
    assert stall_constant(rho, window) == pytest.approx(embedded_chain(rho, window + 1)[window], rel=1e-6, abs=1e-12)
    lost = 1 - 1 / (embedded_chain(rho, window)[0] + rho)
    assert stall_constant_lost(rho, window) == pytest.approx(lost, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("rho", "window", "lost"),
    [(0.5, 2, 0.09627), (0.5, 4, 0.00768), (0.8, 8, 0.00879), (0.9, 16, 0.00434), (0.95, 32, 0.00215)],
)
def test_known_figures_of_constant_copies(rho: float, window: int, lost: float) -> None:
    assert stall_constant_lost(rho, window) == pytest.approx(lost, abs=5e-6)


def test_constant_copies_far_out_fall_by_one_factor() -> None:
    """The tail of M/D/1 is geometric: x with exp(rho (x - 1)) = x is what it falls by."""
    x = 5.0
    for _ in range(200):
        x -= (math.exp(0.5 * (x - 1)) - x) / (0.5 * math.exp(0.5 * (x - 1)) - 1)
    assert x == pytest.approx(3.5129, abs=1e-4)
    assert stall_constant(0.5, 41) * x == pytest.approx(stall_constant(0.5, 40), rel=1e-9)
    assert stall_constant(0.5, 200) == pytest.approx(stall_constant(0.5, 40) / x**160, rel=1e-9)


def test_busy_queues_do_not_overflow() -> None:
    assert stall_constant(600.0, 50) == pytest.approx(1.0)
    assert stall_constant_lost(600.0, 50) == pytest.approx(1 - 1 / 600)
    assert 0 < stall_constant(1e-6, 40) < 1e-200


# Against the window at work


def simulate(rho: float, size: int, *, constant: bool, waits: bool, burst: int = 1, seed: int = 7) -> list[float]:
    """Stalls by takes, of 40 batches of 3,000 takes each, of an engine that takes bursts of pages at random times (a
    Poisson process) and frees each at once. One page is copied at a time and takes 1 (on average).

    An engine that waits takes the burst as soon as it can, and asks for nothing meanwhile.
    """
    chance = random.Random(seed)
    window: OffloadWindow[int] = OffloadWindow(size)
    pages = itertools.count()
    free = deque(itertools.islice(pages, size))
    window.look(free)
    for page in window.offer(size):
        assert window.copied(page)
    events: list[tuple[float, int, int]] = [(chance.expovariate(rho / burst), 0, -1)]
    order = itertools.count(1)
    pending = stalls = takes = 0
    stalled: list[float] = []

    def take() -> None:
        for _ in range(burst):
            free.popleft()
            free.append(next(pages))
        window.look(free)

    while len(stalled) < 41:
        now, _, page = heapq.heappop(events)
        if page >= 0:
            window.copied(page)
        else:
            takes += 1
            if window.ready < burst:
                stalls += 1
                pending = waits
            else:
                take()
            if not pending:
                heapq.heappush(events, (now + chance.expovariate(rho / burst), next(order), -1))
            if takes == 3000:
                stalled.append(stalls / takes)
                stalls = takes = 0
        if pending and window.ready >= burst:
            pending = False
            take()
            heapq.heappush(events, (now + chance.expovariate(rho / burst), next(order), -1))
        if not any(page >= 0 for _, _, page in events):
            for page in window.offer(1):
                seconds = 1.0 if constant else chance.expovariate(1.0)
                heapq.heappush(events, (now + seconds, next(order), page))
    return stalled[1:]


def assert_within_two_standard_errors(stalled: list[float], expected: float) -> None:
    mean = sum(stalled) / len(stalled)
    variance = sum((each - mean) ** 2 for each in stalled) / (len(stalled) - 1)
    error = math.sqrt(variance / len(stalled))
    assert error < 0.05 * expected, "too few takes to tell"
    assert abs(mean - expected) <= 2 * error, f"{mean} of takes stall, {expected} are expected, {error} is the error"


CASES = [(0.5, 2), (0.8, 4), (0.9, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "size"), CASES)
def test_a_window_stalls_as_often_as_exponential_copies_say(rho: float, size: int) -> None:
    for waits in (True, False):
        stalled = simulate(rho, size, constant=False, waits=waits)
        assert_within_two_standard_errors(stalled, stall_exponential(rho, size))


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "size"), CASES)
def test_a_window_stalls_as_often_as_constant_copies_say(rho: float, size: int) -> None:
    stalled = simulate(rho, size, constant=True, waits=True)
    assert_within_two_standard_errors(stalled, stall_constant(rho, size))
    stalled = simulate(rho, size, constant=True, waits=False)
    assert_within_two_standard_errors(stalled, stall_constant_lost(rho, size))


@pytest.mark.slow
def test_a_window_of_whole_bursts_stalls_as_often_as_one_of_so_many_pages() -> None:
    stalled = simulate(0.5, 2 * 4, constant=True, waits=True, burst=4)
    assert_within_two_standard_errors(stalled, stall_constant(0.5, 2))


# Sizes


@pytest.mark.parametrize("rho", [0.01, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    ("constant", "waits", "form"),
    [
        (True, True, stall_constant),
        (True, False, stall_constant_lost),
        (False, True, stall_exponential),
        (False, False, stall_exponential),
    ],
)
def test_the_smallest_window_is_enough_and_a_smaller_one_is_not(
    rho: float, constant: bool, waits: bool, form: Callable[[float, int], float]
) -> None:
    size = smallest_window(rho * 1000, 1000, 1e-3, constant=constant, waits=waits)
    assert size is not None
    assert form(rho, size) <= 1e-3
    assert size == 1 or form(rho, size - 1) > 1e-3


def test_known_sizes() -> None:
    sizes = [smallest_window(rho, 1, 1e-3, constant=False) for rho in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)]
    assert sizes == [6, 9, 16, 24, 44, 77]


def test_a_window_of_bursts() -> None:
    single = smallest_window(0.5, 1, 1e-3)
    assert single is not None
    assert smallest_window(0.5, 1, 1e-3, burst=16) == 16 * single


@pytest.mark.parametrize("constant", [True, False])
def test_no_window_is_enough_where_pages_are_taken_as_fast_as_copied(constant: bool) -> None:
    assert smallest_window(10, 10, 1e-3, constant=constant) is None
    assert smallest_window(11, 10, 0.9, constant=constant) is None
    assert smallest_window(0.999999, 1, 1e-4, constant=constant) is None, "larger than any that is searched"


@pytest.mark.parametrize(
    ("arrivals", "offloads", "target", "burst", "why"),
    [
        (0, 1, 0.1, 1, "arrivals are a number of pages"),
        (1, math.inf, 0.1, 1, "offloads are a number of pages"),
        (1, math.nan, 0.1, 1, "offloads are a number of pages"),
        (1, 2, 0, 1, "target is a probability"),
        (1, 2, 1, 1, "target is a probability"),
        (1, 2, 0.1, 0, "burst has at least one page"),
    ],
)
def test_what_cannot_be_meant_is_refused(arrivals: float, offloads: float, target: float, burst: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        smallest_window(arrivals, offloads, target, burst=burst)


@pytest.mark.parametrize("form", [stall_constant, stall_constant_lost, stall_exponential])
def test_what_is_no_queue_is_refused(form: object) -> None:
    assert callable(form)
    for rho in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="rho is pages taken"):
            form(rho, 3)
    with pytest.raises(UsageError, match="at least one page"):
        form(0.5, 0)
