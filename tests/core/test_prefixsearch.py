"""Where a stored prefix ends, with few questions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.prefixsearch import QUESTIONS, PrefixSearch


def search(count: int, stored: list[bool], questions: int = QUESTIONS) -> tuple[int, int, int]:
    """What is found, and questions and rounds that it took."""
    searching = PrefixSearch(count, questions)
    asked = rounds = 0
    while numbers := searching.next():
        assert numbers == sorted(set(numbers))
        assert 0 <= numbers[0] <= numbers[-1] < count
        asked += len(numbers)
        rounds += 1
        searching.tell(numbers, [stored[number] for number in numbers])
    return searching.stored, asked, rounds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 511, 512])
def test_the_end_is_found_wherever_it_is(count: int) -> None:
    for end in range(count + 1):
        found, asked, _ = search(count, [number < end for number in range(count)])
        assert found == end
        assert asked <= QUESTIONS


def test_all_and_nothing_take_one_round() -> None:
    assert search(512, [True] * 512) == (512, 2, 1)
    assert search(512, [False] * 512) == (0, 2, 1)
    assert search(1, [True]) == (1, 1, 1)


def test_questions_are_asked_side_by_side_where_there_are_enough() -> None:
    rounds = [search(64, [number < end for number in range(64)])[2] for end in range(65)]
    assert max(rounds) == 5, "one after the other they would be 7"


@given(st.lists(st.booleans(), min_size=1, max_size=600), st.integers(0, 15))
def test_with_gaps_or_too_few_questions_it_ends_at_a_chunk_that_is_there(stored: list[bool], questions: int) -> None:
    found, asked, _ = search(len(stored), stored, questions)
    assert asked <= questions
    assert found == 0 or stored[found - 1]
