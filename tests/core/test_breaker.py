"""The circuit breaker opens after failures in a row and is probed ever less often."""

from lmcache_core.breaker import Breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures=3)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.open
    assert not breaker.failed(), "it opens once"


def test_probes_become_rarer_up_to_a_bound() -> None:
    breaker = Breaker(failures=1, cooldown=1, max_cooldown=5)
    assert breaker.failed()
    assert [breaker.next_probe() for _ in range(5)] == [1, 2, 4, 5, 5]


def test_after_a_good_probe_and_a_success_it_starts_afresh() -> None:
    breaker = Breaker(failures=2, cooldown=1, max_cooldown=8)
    breaker.trip()
    breaker.next_probe()
    breaker.next_probe()
    breaker.close()
    assert not breaker.open
    breaker.succeeded()
    assert not breaker.failed()
    assert breaker.failed()
    assert breaker.next_probe() == 1


def test_what_answers_probes_only_is_probed_ever_less_often() -> None:
    breaker = Breaker(failures=1, cooldown=1, max_cooldown=8)
    waits = []
    for _ in range(5):
        breaker.failed()
        waits.append(breaker.next_probe())
        breaker.close()
    assert waits == [1, 2, 4, 8, 8]


def test_tripping_opens_at_once_and_says_so_once() -> None:
    breaker = Breaker(failures=100)
    assert breaker.trip()
    assert not breaker.trip()
