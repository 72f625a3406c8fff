"""The window over free pages: what is offered, what may be taken, and how much there is twice, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.errors import UsageError
from lmcache_core.planning.window import OffloadWindow


def window_of(size: int, free: int) -> OffloadWindow[int]:
    window: OffloadWindow[int] = OffloadWindow(size)
    window.look(range(free))
    return window


def test_only_the_next_pages_are_offered_and_each_once() -> None:
    window = window_of(3, free=10)
    assert window.offer(2) == [0, 1]
    assert window.offer(9) == [2]
    assert window.offer(9) == []
    assert window.duplicates == 3


def test_start_current_and_end_move() -> None:
    window = window_of(3, free=5)
    window.offer(3)
    assert window.copied(1)
    assert window.ready == 0, "the first is not there yet"
    assert window.copied(0)
    assert window.ready == 2
    window.look([1, 2, 3, 4])
    assert window.ready == 1
    assert window.offer(9) == [3], "2 is being copied"
    assert window.copied(2)
    assert (window.ready, window.duplicates) == (2, 3)


def test_a_page_that_is_used_again_is_not_offered_and_its_copy_is_another_s() -> None:
    window = window_of(2, free=4)
    assert window.offer(9) == [0, 1]
    assert window.copied(0)
    assert window.copied(1)
    window.look([2, 3])
    assert window.duplicates == 0
    window.look([1, 2])
    assert window.offer(9) == [1, 2], "whether there is still a copy of it, its owner tells"


def test_a_copy_under_way_of_a_page_that_is_used_again_counts_until_it_ends() -> None:
    window = window_of(1, free=1)
    assert window.offer(1) == [0]
    window.look([1])
    assert window.offer(1) == [], "the copy under way is still one too many"
    assert not window.copied(0)
    assert window.offer(1) == [1]


def test_a_page_that_is_free_again_while_it_is_copied_is_copied_once() -> None:
    window = window_of(2, free=1)
    assert window.offer(1) == [0]
    window.look([])
    window.look([0])
    assert window.offer(2) == []
    assert window.copied(0)
    assert window.ready == 1


def test_a_page_that_cannot_be_copied_holds_nobody_up() -> None:
    window = window_of(2, free=2)
    window.offer(2)
    window.failed(0)
    assert window.ready == 1
    assert window.offer(2) == [], "it is not tried again and again"
    window.failed(1)
    assert window.ready == 2


def test_what_is_withdrawn_or_forgotten_is_offered_again() -> None:
    window = window_of(3, free=3)
    assert window.offer(3) == [0, 1, 2]
    window.withdraw(1)
    window.copied(0)
    window.failed(2)
    assert (window.ready, window.duplicates) == (1, 2)
    assert window.offer(9) == [1]
    window.copied(1)
    window.forget([2, 7])
    assert (window.ready, window.offer(9), list(window)) == (2, [2], [0, 1, 2])


def test_a_window_changes_its_size() -> None:
    window = window_of(4, free=8)
    for page in window.offer(4):
        window.copied(page)
    window.size = 2
    window.look(range(8))
    assert (window.offer(9), window.ready, window.duplicates) == ([], 2, 2)
    window.size = 3
    window.look(range(8))
    assert window.offer(9) == [2]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one page"):
        OffloadWindow[int](0)
    window = window_of(2, free=3)
    with pytest.raises(UsageError, match="at least one page"):
        window.size = 0
    for page in (0, 7):
        with pytest.raises(UsageError, match=f"page {page} is not being copied"):
            window.copied(page)
        with pytest.raises(UsageError, match=f"page {page} is not being copied"):
            window.failed(page)
        with pytest.raises(UsageError, match=f"page {page} is not being copied"):
            window.withdraw(page)
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
        self.safe: set[int] = set()
        self.under_way: list[int] = []

    def look(self) -> None:
        self.window.look(self.queue)
        self.safe &= set(self.queue[: self.SIZE])

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.used)))
        self.used.remove(page)
        self.queue.append(page)
        self.look()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def use_again(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.queue))
        self.queue.remove(page)
        self.used.add(page)
        self.look()

    @rule(most=st.integers(0, 6))
    def copy(self, most: int) -> None:
        before = len(self.safe) + len(self.under_way)
        wanted = [each for each in self.queue[: self.SIZE] if each not in self.safe and each not in self.under_way]
        offered = self.window.offer(most)
        assert offered == wanted[: max(0, min(most, self.SIZE - before))], "all that may be is"
        self.under_way += offered

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), works=st.booleans())
    def end_a_copy(self, data: st.DataObject, works: bool) -> None:
        page = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        there = page in self.queue[: self.SIZE]
        if works:
            assert self.window.copied(page) == there
        else:
            self.window.failed(page)
        if there:
            self.safe.add(page)

    @invariant()
    def no_more_than_the_window_is_there_twice(self) -> None:
        assert self.window.duplicates == len(self.safe) + len(self.under_way) <= self.SIZE

    @invariant()
    def current_is_where_the_first_page_is_that_is_not_safe(self) -> None:
        window = self.queue[: self.SIZE]
        assert self.window.ready == next((n for n, page in enumerate(window) if page not in self.safe), len(window))


Engine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = Engine.TestCase
