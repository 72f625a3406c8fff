"""What is worth loading: speeds as they were measured, and what follows from them."""

from __future__ import annotations

from collections import Counter

import pytest

from lmcache_core.connectors.vllm.plan import Report, Timing
from lmcache_core.connectors.vllm.rates import Rates
from lmcache_core.pace import FEWEST
from tests.connectors.vllm.test_scheduler import come
from tests.connectors.vllm.world import World, open_world, prompt
from tests.node.shelf import Shelf


def test_nothing_is_known_at_first() -> None:
    rates = Rates()
    assert rates.prefill_seconds(0, 1000) is None
    assert rates.bytes_a_second("disk") is None
    assert rates.load_seconds({"disk": 1}) is None
    assert rates.load_seconds({}) == 0


def test_prefill_takes_longer_behind_a_long_context() -> None:
    rates = Rates()
    rates.computed(1000, 0, 1.0)
    rates.computed(1000, 4000, 4.0)
    assert rates.prefill_seconds(0, 1000) == pytest.approx(1.0)
    assert rates.prefill_seconds(4500, 5000) == pytest.approx(2.0)
    assert rates.prefill_seconds(0, 0) == 0


def test_a_step_of_few_tokens_says_nothing_of_prefill() -> None:
    rates = Rates()
    rates.computed(8, 0, 1.0)
    assert rates.prefill_seconds(0, 1000) is None


def test_speeds_follow_what_is_measured_last() -> None:
    rates = Rates()
    rates.loaded("disk", 1000, 1.0)
    assert rates.bytes_a_second("disk") == pytest.approx(1000)
    for _ in range(30):
        rates.loaded("disk", 1000, 10.0)
    assert rates.bytes_a_second("disk") == pytest.approx(100, rel=0.01)
    assert rates.load_seconds({"disk": 500}) == pytest.approx(5, rel=0.01)


def learned(world: World, *, token_seconds: float, byte_seconds: float) -> None:
    """Have the scheduler's side know how long things take."""
    page = 16
    world.scheduler.report(
        Report(
            computed=[(1000, 0, 1000 * token_seconds)],
            loaded=Counter(["earlier"]),
            timings=[Timing("earlier", 0, (("t0", 1),), page, page * byte_seconds, alone=True, missing=0)],
        )
    )


def world_with_a_prompt_on_a_tier(world: World) -> None:
    world.generate("a", prompt("abcd12"))
    world.forget("cpu")
    come(world, "b", "abcd12")


def test_what_pays_is_loaded_for_as_long_as_it_pays() -> None:
    with open_world(Shelf()) as world:
        world_with_a_prompt_on_a_tier(world)
        learned(world, token_seconds=1.0, byte_seconds=1e-9)
        assert world.scheduler.match("b", 0) == (64, True)
        assert world.scheduler._requests["b"].patience == pytest.approx(10.0)  # `load_timeout`, below 64 s
        assert world.scheduler.counts["declined_tokens", "t0"] == 0


def test_a_tier_that_the_engine_has_not_read_yet_is_as_fast_as_the_node_knows_it() -> None:
    """An engine that has just been started, beside a node that has been used by others."""
    for seconds, answer in ((1e-9, (64, True)), (1e6, (0, False))):
        with open_world(Shelf()) as world:
            world_with_a_prompt_on_a_tier(world)
            world.scheduler.report(Report(computed=[(1000, 0, 1000.0)], loaded=Counter(), timings=[]))
            pace = world.node.guard.index.tiers[0].pace
            for _ in range(FEWEST):
                pace.add(1 << 20, seconds, 0.0)
            assert world.scheduler.match("b", 0) == answer
            assert bool(world.scheduler.counts["declined_tokens", "t0"]) is (answer == (0, False))


def test_what_does_not_pay_is_computed_and_brought_to_memory_meanwhile() -> None:
    with open_world(Shelf()) as world:
        world_with_a_prompt_on_a_tier(world)
        learned(world, token_seconds=1e-6, byte_seconds=1.0)
        assert {world.scheduler.match("b", 0) for _ in range(20)} == {(0, False)}
        assert world.scheduler.counts["declined_tokens", "t0"] == 64
        world.scheduler.end("b")
        warming = world.scheduler._weighing._warming
        assert warming is not None
        assert warming.result(10) == 4
        come(world, "c", "abcd12")
        assert world.scheduler.match("c", 0) == (64, False)


def test_what_is_in_memory_is_loaded_though_what_is_behind_it_does_not_pay() -> None:
    with open_world(Shelf()) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        world.generate("first", prompt("ab1"))  # brings its chunk to memory
        world.engine.forget()
        come(world, "b", "abcd12")
        learned(world, token_seconds=1e-6, byte_seconds=1.0)
        assert world.scheduler.match("b", 0) == (32, False)
        assert world.scheduler.counts["declined_tokens", "t0"] == 32


def test_a_tier_that_is_not_known_is_waited_for_a_part_of_what_computing_takes() -> None:
    with open_world(Shelf()) as world:
        world_with_a_prompt_on_a_tier(world)
        world.scheduler.report(Report(computed=[(1000, 0, 10.0)]))
        assert world.scheduler.match("b", 0) == (64, True)
        assert world.scheduler._requests["b"].patience == pytest.approx(0.3 * 64 * 0.01)


def test_a_load_that_came_to_nothing_makes_its_tier_a_slow_one() -> None:
    with open_world(Shelf()) as world:
        world_with_a_prompt_on_a_tier(world)
        world.scheduler.report(Report(computed=[(1000, 0, 10.0)]))
        assert world.scheduler.match("b", 0) == (64, True)
        timing = Timing("b", 0, (), 100, 5.0, alone=True, missing=4)
        world.scheduler.report(Report(timings=[timing], loaded=Counter(["b"])))
        assert world.scheduler._weighing.rates.bytes_a_second("t0") == pytest.approx(20)
        assert world.scheduler.counts["failed_tokens", ""] == 64


def test_what_a_rank_lacks_was_not_loaded_however_much_others_have() -> None:
    with open_world(Shelf(), ranks=2) as world:
        scheduler = world.scheduler
        one = Timing("c", 0, (("t0", 4),), 16, 1.0, alone=True, missing=0)
        other = Timing("c", 0, (("t0", 1),), 16, 2.0, alone=True, missing=3)
        scheduler.report(Report(timings=[one], loaded=Counter(["c"])))
        assert scheduler.counts["loaded_tokens", "t0"] == 0
        scheduler.report(Report(timings=[other], loaded=Counter(["c"])))
        assert (scheduler.counts["loaded_tokens", "t0"], scheduler.counts["failed_tokens", ""]) == (16, 48)
        assert scheduler.counts["load_seconds", ""] == 2.0
