"""The window over free pages: what is offered, what may be taken, and how much there is twice, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.errors import UsageError
from lmcache_core.planning.window import Copy, OffloadWindow


def window_of(size: int, free: int) -> OffloadWindow[int]:
    window: OffloadWindow[int] = OffloadWindow(size)
    for page in range(free):
        window.freed(page)
    return window


def places(window: OffloadWindow[int]) -> tuple[int, int, int]:
    return window.start, window.current, window.end


def test_only_the_next_pages_are_offered_and_each_once() -> None:
    window = window_of(3, free=10)
    assert places(window) == (0, 0, 3)
    assert window.offer(2) == [0, 1]
    assert window.offer(9) == [2]
    assert window.offer(9) == []
    assert (window.free, window.duplicates) == (10, 3)


def test_start_current_and_end_move() -> None:
    window = window_of(3, free=5)
    window.offer(3)
    assert window.copied(1) is Copy.KEEP
    assert places(window) == (0, 0, 3), "the first is not there yet"
    assert window.copied(0) is Copy.KEEP
    assert places(window) == (0, 2, 3)
    assert window.take() == 0
    assert places(window) == (1, 2, 4)
    assert window.offer(9) == [3]
    assert (window.take(), window.take()) == (1, None)
    assert window.stalls == 1
    assert window.copied(2) is Copy.KEEP
    assert window.take() == 2
    assert places(window) == (3, 3, 5)


def test_an_engine_without_free_pages_does_not_stall_for_a_copy() -> None:
    window = window_of(3, free=0)
    assert window.take() is None
    assert window.stalls == 0


def test_what_is_taken_and_freed_again_is_another_page() -> None:
    window = window_of(2, free=2)
    window.offer(1)
    window.copied(0)
    assert window.take() == 0
    window.freed(0)
    assert window.offer(2) == [1, 0]


def test_a_page_that_is_used_again_is_not_offered_and_its_copy_goes() -> None:
    window = window_of(2, free=4)
    assert not window.reused(0)
    assert not window.reused(3)
    assert window.offer(9) == [1, 2]
    window.copied(1)
    assert window.reused(1)
    assert (window.free, window.duplicates) == (1, 1)
    assert window.start == 3


def test_a_copy_under_way_of_a_page_that_is_used_again_is_dropped() -> None:
    window = window_of(1, free=2)
    assert window.offer(1) == [0]
    assert not window.reused(0)
    assert window.offer(1) == [], "the copy under way is still one too many"
    assert window.copied(0) is Copy.DROP
    assert window.offer(1) == [1]


def test_a_page_that_is_freed_while_its_older_copy_is_made_waits_for_its_end() -> None:
    window = window_of(2, free=1)
    assert window.offer(1) == [0]
    window.reused(0)
    window.freed(0)
    assert window.offer(2) == []
    assert window.take(uncopied=True) is None, "it is being read"
    assert window.copied(0) is Copy.DROP
    assert window.offer(2) == [0]
    assert window.copied(0) is Copy.KEEP
    assert window.take() == 0


def test_a_page_that_cannot_be_copied_holds_nobody_up() -> None:
    window = window_of(2, free=2)
    window.offer(2)
    window.failed(0)
    assert window.duplicates == 1
    assert window.take() == 0
    window.failed(1)
    assert (window.take(), window.stalls) == (1, 0)


def test_an_engine_that_does_not_wait_loses_what_is_in_a_page_but_none_that_is_read() -> None:
    window = window_of(2, free=2)
    assert window.take(uncopied=True) == 0
    assert window.offer(1) == [1]
    assert window.take(uncopied=True) is None
    assert window.stalls == 1


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one page"):
        OffloadWindow[int](0)
    window = window_of(2, free=3)
    with pytest.raises(UsageError, match="page 2 is free already"):
        window.freed(2)
    with pytest.raises(UsageError, match="page 7 is not free"):
        window.reused(7)
    for page in (0, 7):
        with pytest.raises(UsageError, match=f"page {page} is not being copied"):
            window.copied(page)
        with pytest.raises(UsageError, match=f"page {page} is not being copied"):
            window.failed(page)
    window.offer(1)
    window.copied(0)
    with pytest.raises(UsageError, match="page 0 is not being copied"):
        window.copied(0)


class Engine(RuleBasedStateMachine):
    """An engine of 12 pages in any order of events, beside lists that are kept the simple way."""

    SIZE = 4

    def __init__(self) -> None:
        super().__init__()
        self.window: OffloadWindow[int] = OffloadWindow(self.SIZE)
        self.used = set(range(12))
        self.queue: list[int] = []
        self.copies: set[int] = set()
        """Of free pages."""
        self.under_way: list[tuple[int, bool]] = []
        """Pages being copied, and whether they have been free ever since."""
        self.given_up: set[int] = set()

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.used)))
        self.used.remove(page)
        self.queue.append(page)
        self.window.freed(page)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def use_again(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.queue))
        self.queue.remove(page)
        self.used.add(page)
        assert self.window.reused(page) == (page in self.copies)
        self.copies.discard(page)
        self.given_up.discard(page)
        self.under_way = [(each, free and each != page) for each, free in self.under_way]

    @rule(most=st.integers(0, 6))
    def copy(self, most: int) -> None:
        before = self.window.duplicates
        for page in (offered := self.window.offer(most)):
            assert page not in self.used
            assert page in self.queue[: self.SIZE]
            assert page not in self.copies | self.given_up
            assert page not in [each for each, _ in self.under_way]
            self.under_way.append((page, True))
        assert offered == sorted(offered, key=self.queue.index)
        wanted = [
            page
            for page in self.queue[: self.SIZE]
            if page not in self.copies | self.given_up | {each for each, _ in self.under_way}
        ]
        assert len(offered) == min(most, self.SIZE - before, len(offered) + len(wanted)), "all that may be is"

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), works=st.booleans())
    def end_a_copy(self, data: st.DataObject, works: bool) -> None:
        page, free = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if not works:
            self.window.failed(page)
            if free:
                self.given_up.add(page)
        else:
            assert self.window.copied(page) is (Copy.KEEP if free else Copy.DROP)
            if free:
                self.copies.add(page)

    @rule(uncopied=st.booleans())
    def take(self, uncopied: bool) -> None:
        page = self.window.take(uncopied=uncopied)
        if not self.queue:
            assert page is None
            return
        head = self.queue[0]
        read = head in [each for each, _ in self.under_way]
        may = not read and (uncopied or head in self.copies | self.given_up)
        assert page == (head if may else None)
        if may:
            self.queue.pop(0)
            self.used.add(head)
            self.copies.discard(head)
            self.given_up.discard(head)

    @invariant()
    def no_more_than_the_window_is_there_twice(self) -> None:
        assert self.window.duplicates == len(self.copies) + len(self.under_way)
        assert self.window.duplicates <= self.SIZE

    @invariant()
    def the_window_is_over_the_next_pages(self) -> None:
        assert self.window.free == len(self.queue)
        assert self.window.end - self.window.start == min(self.SIZE, len(self.queue))
        ready = next(
            (n for n, page in enumerate(self.queue[: self.SIZE]) if page not in self.copies | self.given_up),
            min(self.SIZE, len(self.queue)),
        )
        assert self.window.current - self.window.start == ready


Engine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = Engine.TestCase
