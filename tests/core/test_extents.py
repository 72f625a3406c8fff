"""ExtentAllocator against a map of units, and the choices it promises."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lmcache_core.errors import UsageError
from lmcache_core.extents import ExtentAllocator

UNIT = 4096


def test_best_fit_and_lowest_offset() -> None:
    extents = ExtentAllocator(100 * UNIT)
    places = [extents.allocate(n * UNIT) for n in (10, 1, 4, 1, 4, 1)]
    assert places == [0, 10 * UNIT, 11 * UNIT, 15 * UNIT, 16 * UNIT, 20 * UNIT]
    extents.free(16 * UNIT, 4 * UNIT)
    extents.free(0, 10 * UNIT)
    extents.free(11 * UNIT, 4 * UNIT)
    assert extents.allocate(3 * UNIT) == 11 * UNIT, "the smaller gap, and of two the lower"
    assert extents.allocate(4 * UNIT) == 16 * UNIT
    assert extents.allocate(5 * UNIT) == 0
    assert extents.largest == 79 * UNIT
    assert extents.free_bytes == (5 + 1 + 79) * UNIT


def test_sizes_are_rounded_up() -> None:
    extents = ExtentAllocator(3 * UNIT + 1)
    assert extents.capacity == 3 * UNIT
    assert extents.allocate(1) == 0
    assert extents.allocate(UNIT + 1) == UNIT
    assert extents.allocate(1) is None
    extents.free(UNIT, 2 * UNIT)  # the same number of units
    assert extents.free_bytes == 2 * UNIT


def test_neighbours_join() -> None:
    extents = ExtentAllocator(3 * UNIT)
    for _ in range(3):
        extents.allocate(UNIT)
    extents.free(0, UNIT)
    extents.free(2 * UNIT, UNIT)
    assert extents.largest == UNIT
    extents.free(UNIT, UNIT)
    assert extents.largest == 3 * UNIT
    extents.grow(2 * UNIT)
    assert extents.allocate(5 * UNIT) == 0


def test_misuse_is_refused_and_changes_nothing() -> None:
    extents = ExtentAllocator(8 * UNIT)
    assert extents.allocate(4 * UNIT) == 0
    for offset, nbytes in ((0, 3 * UNIT), (UNIT, UNIT), (4 * UNIT, UNIT), (0, 0), (-UNIT, UNIT)):
        with pytest.raises(UsageError):
            extents.free(offset, nbytes)
    for offset, nbytes in ((0, UNIT), (3 * UNIT, 2 * UNIT), (7 * UNIT, 2 * UNIT), (-UNIT, UNIT), (5, 1), (4 * UNIT, 0)):
        with pytest.raises(UsageError):
            extents.take(offset, nbytes)
    with pytest.raises(UsageError):
        extents.allocate(0)
    with pytest.raises(UsageError):
        extents.grow(-1)
    with pytest.raises(UsageError):
        ExtentAllocator(UNIT, unit=0)
    extents.free(0, 4 * UNIT)
    with pytest.raises(UsageError):
        extents.free(0, 4 * UNIT)
    assert extents.free_bytes == extents.largest == 8 * UNIT


def test_nothing_is_kept_of_extents_that_were_joined() -> None:
    extents = ExtentAllocator(1 << 30)
    for n in range(1, 20_000):
        nbytes = n % 50 * UNIT + 1
        place = extents.allocate(nbytes)
        assert place == 0
        extents.free(place, nbytes)
    assert sum(map(len, extents._buckets.values())) == 1
    assert extents.largest == 1 << 30


@pytest.mark.parametrize("unit", [1, 3, UNIT])
def test_sizes_of_many_magnitudes(unit: int) -> None:
    """Best fit holds within a bucket of sizes and from one to the next."""
    sizes = [unit * size for power in range(1, 40, 3) for size in {1 << power, (1 << power) + 1, (1 << power) * 3 // 2}]
    extents = ExtentAllocator(sum(sizes) + unit * (len(sizes) + 1), unit)
    gaps = {}
    for size in sizes:
        place, wall = extents.allocate(size), extents.allocate(unit)
        assert wall == (place or 0) + size
        gaps[size] = place
    assert extents.allocate(unit) is not None
    for size, place in gaps.items():
        assert place is not None
        extents.free(place, size)
    assert extents.largest == max(sizes)
    for size in sorted(sizes, reverse=True):
        assert extents.allocate(size) == gaps[size]
    assert extents.free_bytes == extents.largest == 0


class Against(RuleBasedStateMachine):
    """A model that knows each unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentAllocator(unit=UNIT)
        self.taken: list[bool] = []

    held = Bundle("held")

    def gaps(self) -> list[tuple[int, int]]:
        """Free runs of units as (length, start)."""
        found, start = [], None
        for at, taken in enumerate([*self.taken, True]):
            if not taken and start is None:
                start = at
            elif taken and start is not None:
                found.append((at - start, start))
                start = None
        return found

    @rule(units=st.integers(0, 20))
    def grow(self, units: int) -> None:
        self.extents.grow(units * UNIT)
        self.taken += [False] * units

    @rule(target=held, units=st.integers(1, 8), short=st.integers(0, UNIT - 1))
    def allocate(self, units: int, short: int):  # type: ignore[no-untyped-def]
        place = self.extents.allocate(units * UNIT - short)
        best = min((gap for gap in self.gaps() if gap[0] >= units), default=None)
        if best is None:
            assert place is None
            return multiple()
        assert place == best[1] * UNIT
        self.taken[best[1] : best[1] + units] = [True] * units
        return best[1], units

    @rule(target=held, start=st.integers(0, 60), units=st.integers(1, 8))
    def take(self, start: int, units: int):  # type: ignore[no-untyped-def]
        if start + units <= len(self.taken) and not any(self.taken[start : start + units]):
            self.extents.take(start * UNIT, units * UNIT)
            self.taken[start : start + units] = [True] * units
            return start, units
        with pytest.raises(UsageError):
            self.extents.take(start * UNIT, units * UNIT)
        return multiple()

    @rule(extent=consumes(held))
    def free(self, extent: tuple[int, int]) -> None:
        start, units = extent
        self.extents.free(start * UNIT, units * UNIT)
        self.taken[start : start + units] = [False] * units
        with pytest.raises(UsageError):
            self.extents.free(start * UNIT, units * UNIT)

    @invariant()
    def sums_agree(self) -> None:
        assert self.extents.capacity == len(self.taken) * UNIT
        assert self.extents.free_bytes == self.taken.count(False) * UNIT
        assert self.extents.largest == max((length for length, _ in self.gaps()), default=0) * UNIT


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_many_extents_are_taken_at_once() -> None:
    one_by_one, at_once = ExtentAllocator(40 * UNIT), ExtentAllocator(40 * UNIT)
    held = [(0, UNIT), (2 * UNIT, UNIT + 1), (4 * UNIT, 3 * UNIT), (39 * UNIT, UNIT)]
    for offset, nbytes in held:
        one_by_one.take(offset, nbytes)
    at_once.take_all(held)
    for extents in (one_by_one, at_once):
        assert extents.free_bytes == 33 * UNIT
        assert extents.largest == 32 * UNIT
        assert extents.allocate(UNIT) == UNIT
        extents.free(2 * UNIT, 2 * UNIT)
        assert extents.allocate(33 * UNIT) is None
        assert extents.allocate(2 * UNIT) == 2 * UNIT
    full = ExtentAllocator(2 * UNIT)
    full.take_all([(0, 2 * UNIT)])
    assert full.largest == full.free_bytes == 0
    empty = ExtentAllocator(2 * UNIT)
    empty.take_all([])
    assert empty.largest == 2 * UNIT


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 2 * UNIT), (UNIT, UNIT)],
        [(2 * UNIT, UNIT), (0, UNIT)],
        [(0, UNIT), (0, UNIT)],
        [(3 * UNIT, 2 * UNIT)],
        [(5, UNIT)],
        [(0, 0)],
    ],
)
def test_extents_that_cannot_all_be_taken_are_refused(extents: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError):
        ExtentAllocator(4 * UNIT).take_all(extents)
    used = ExtentAllocator(4 * UNIT)
    used.allocate(UNIT)
    with pytest.raises(UsageError):
        used.take_all([(2 * UNIT, UNIT)])
