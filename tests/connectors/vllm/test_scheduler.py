"""What the scheduler's side promises, for how long it keeps it, and when it lets go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.connectors.vllm.options import RequestOptions
from lmcache_core.connectors.vllm.plan import Report, Step
from lmcache_core.wrappers import Slow
from tests.connectors.vllm.engine import Request
from tests.connectors.vllm.world import World, open_world, prompt
from tests.node.kv import until
from tests.node.shelf import Shelf

LEASE = 30.0


@pytest.fixture
def world() -> Iterator[World]:
    """With 64 tokens of `abcd` in the node, and a request for more that has come and was not asked for yet."""
    with open_world(lease_seconds=LEASE) as world:
        world.generate("a", prompt("abcd12"))
        world.forget()
        come(world, "b", "abcd12")
        world.client.calls.clear()
        yield world


def come(world: World, request_id: str, text: str) -> Request:
    request = Request(request_id, prompt(text))
    world.scheduler.begin(request)
    return request


def blocks(tokens: int) -> list[list[int]]:
    return [list(range(1, tokens // 4 + 2))]


def left(world: World) -> tuple[int, int]:
    """Leases of the node, and those that the scheduler's side holds."""
    return len(world.index.leases), len(world.client.holding)


def test_what_was_found_is_kept_however_often_the_engine_asks(world: World) -> None:
    assert {world.scheduler.match("b", 0) for _ in range(200)} == {(64, False)}
    assert (world.client.called("hold"), left(world)) == (1, (1, 1))
    world.scheduler.end("b")
    assert (left(world), world.scheduler.idle) == ((0, 0), True)


def test_the_local_count_may_shrink_and_grow(world: World) -> None:
    found = [world.scheduler.match("b", local)[0] for local in (60, 48, 16, 0, 4, 32, 0)]
    assert found == [4, 16, 48, 64, 60, 32, 64]
    assert (world.client.called("hold"), left(world)) == (1, (1, 1))
    world.scheduler.allocated("b", blocks(66), 64)
    (job,) = world.scheduler.take_loads()
    assert (job.first_page, job.pages, job.skip_tokens) == (0, 4, 0)


@pytest.mark.parametrize("local", [64, 65])
def test_nothing_is_promised_where_the_engine_has_more_itself(world: World, local: int) -> None:
    assert world.scheduler.match("b", local) == (0, False)
    assert left(world) == (0, 0)


def test_a_load_within_the_step_leaves_a_token_to_compute_and_one_beside_it_none() -> None:
    for sync, found in ((1e9, 63), (0.0, 64)):
        with open_world(options={"sync_load": sync}) as world:
            world.generate("a", prompt("abcd12"))
            come(world, "b", "abcd")
            assert world.scheduler.match("b", 0) == (found, not sync)
            assert world.scheduler.match("b", 48) == (found - 48, not sync)
            assert world.scheduler.match("b", 63) == (0, False)
            world.scheduler.end("b")
            assert world.scheduler.idle


@pytest.mark.parametrize("text", ["1", "a", "12345678", "xyz"])
def test_what_nobody_has_stored_is_not_promised(world: World, text: str) -> None:
    come(world, "c", text)
    assert {world.scheduler.match("c", 0) for _ in range(50)} == {(15 if text == "a" else 0, False)}
    assert world.client.called("hold") <= 1


def test_a_miss_is_looked_up_again_after_a_while(world: World) -> None:
    come(world, "c", "xyz1")
    assert world.scheduler.match("c", 0) == (0, False)
    world.generate("d", prompt("xyz1"))
    world.client.calls.clear()
    world.clock.now += 0.6
    assert world.scheduler.match("c", 0) == (48, False)
    world.scheduler.end("c")


def test_a_hit_is_renewed_before_its_lease_ends(world: World) -> None:
    for _ in range(10):
        assert world.scheduler.match("b", 0) == (64, False)
        world.clock.now += LEASE / 3
    assert world.client.called("hold") == 5
    assert left(world) == (1, 1)
    world.scheduler.end("b")
    assert left(world) == (0, 0)


@pytest.mark.parametrize("how", ["finished", "aborted", "nothing external"])
def test_what_is_held_is_let_go_of(world: World, how: str) -> None:
    assert world.scheduler.match("b", 0) == (64, False)
    if how == "nothing external":
        world.scheduler.allocated("b", blocks(66), 0)
    else:
        world.scheduler.end("b")
    assert (left(world), world.scheduler.idle) == ((0, 0), True)
    assert world.scheduler.take_loads() == []


def test_stores_of_a_step_that_cannot_be_planned_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong: no worker hears of them, so nothing would ever end them."""
    with open_world(blocks=200) as world:
        world.generate("before", prompt("12"))
        client: Any = world.scheduler.client
        begin = client.begin_store
        begun: list[Any] = []

        def begin_store(*arguments: Any, **options: Any) -> Any:
            if begun:
                raise RuntimeError("a defect")
            begun.append(begin(*arguments, **options))
            return begun[-1]

        tokens = {name: come(world, name, text).num_tokens for name, text in (("a", "abcd12"), ("b", "efgh12"))}
        with monkeypatch.context() as patch:
            patch.setattr(client, "begin_store", begin_store)
            with pytest.raises(RuntimeError, match="a defect"):
                world.scheduler.step(tokens, lambda name: blocks(tokens[name]))
        assert begun[0].rooms
        assert not world.scheduler._savings
        assert client.stats().staged == 0


def test_blocks_that_come_in_two_parts_are_one_load(world: World) -> None:
    assert world.scheduler.match("b", 0) == (64, False)
    world.scheduler.allocated("b", blocks(64), 64)
    world.scheduler.allocated("b", blocks(66), 0)
    (job,) = world.scheduler.take_loads()
    assert job.blocks == (tuple(range(1, 17)),)
    assert world.scheduler.match("b", 0) == (0, False)
    assert left(world) == (1, 1)


def test_a_request_that_ends_while_it_is_loaded_keeps_its_lease_until_then(world: World) -> None:
    world.scheduler.match("b", 0)
    world.scheduler.allocated("b", blocks(66), 64)
    step = Step(16, world.scheduler.take_loads())
    world.scheduler.end("b")
    assert (left(world), world.scheduler.idle) == ((1, 1), False)
    (worker,) = world.workers
    worker.start(step, busy=False)
    report = worker.report()
    assert report is not None
    world.scheduler.report(report)
    assert (left(world), world.scheduler.idle) == ((0, 0), True)


def test_unknown_requests_are_nobodys(world: World) -> None:
    assert world.scheduler.match("who", 0) == (0, False)
    world.scheduler.allocated("who", blocks(66), 0)
    world.scheduler.end("who")
    assert world.scheduler.step({"who": 5}, lambda request_id: None) == Step(16, known=True, computes=True)


def test_a_promise_of_which_nothing_is_known_any_more_is_told_to_be_broken(world: World) -> None:
    assert world.scheduler.match("b", 0) == (64, False)
    world.scheduler.turn_off("for a reason")
    world.scheduler.allocated("b", blocks(66), 64)
    world.scheduler.allocated("who", blocks(66), 32)
    known, unknown = world.scheduler.take_loads()
    assert (known.request, known.number, known.pages, known.blocks) == ("b", 0, 4, (tuple(range(1, 17)),))
    assert (unknown.request, unknown.number, unknown.pages, unknown.now) == ("who", 0, 2, False)
    assert left(world) == (0, 0)


def test_nothing_is_stored_of_a_request_that_is_gone_though_its_load_goes_on(world: World) -> None:
    """Its name may be another one's by then."""
    assert world.scheduler.match("b", 0) == (64, False)
    world.scheduler.allocated("b", blocks(66), 64)
    world.scheduler.end("b")
    other = Request("b", prompt("wxyz12"))
    world.scheduler.begin(other)
    step = world.scheduler.step({"b": 66}, lambda request_id: blocks(66))
    assert ([load.request for load in step.loads], step.saves) == (["b"], [])


def test_what_comes_from_where_is_told_without_asking_again() -> None:
    with open_world(Shelf()) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        world.generate("first", prompt("ab1"))  # brings its chunk to memory
        world.engine.forget()
        come(world, "b", "abcd12")
        assert world.scheduler.match("b", 0) == (64, True)
        world.client.calls.clear()
        assert world.scheduler.sources("b", 64) == {"cpu": 32, "t0": 32}
        assert world.scheduler.sources("who", 64) == {}
        assert world.client.calls == {}


def test_a_request_may_ask_for_no_load_or_no_store() -> None:
    with open_world() as world:
        assert world.generate("a", prompt("abcd12"), wanted=RequestOptions(store=False)) == 0
        assert world.check_stored() == 0
        assert world.generate("b", prompt("abcd12")) == 0
        world.forget()
        assert world.generate("c", prompt("abcd12"), wanted=RequestOptions(load=False)) == 0
        world.forget()
        assert world.generate("d", prompt("abcd12")) == 64
        world.at_rest()


def test_a_request_may_ask_for_a_part_and_for_some_tiers() -> None:
    with open_world(Shelf()) as world:
        world.generate("a", prompt("abcd12"))
        for number, (options, tokens) in enumerate(
            [
                (RequestOptions(max_load_tokens=40), 32),
                (RequestOptions(max_load_tokens=0), 0),
                (RequestOptions(tiers=["t0"]), 64),
                (RequestOptions(tiers=["cpu"]), 64),
            ]
        ):
            world.forget()
            assert world.generate(f"b{number}", prompt("abcd12"), wanted=options) == tokens
        world.forget("cpu")
        assert world.generate("c", prompt("abcd12"), wanted=RequestOptions(tiers=["cpu"])) == 0
        world.at_rest()


def test_tenants_share_nothing() -> None:
    with open_world() as world:
        world.generate("a", prompt("abcd12"), salt="one")
        assert world.generate("b", prompt("abcd12"), salt="two") == 0
        assert world.generate("c", prompt("abcd12")) == 0
        world.forget()
        assert world.generate("d", prompt("abcd12"), salt="two") == 64
        world.at_rest()


def test_nothing_old_is_found_after_a_reset() -> None:
    with open_world(Shelf(), budget=8) as world:
        engine = world.engine
        world.generate("a", prompt("abcd12"))
        engine.forget()
        assert world.scheduler.match("b", 0) == (0, False)
        engine.add("b", prompt("abcd12"), 3)
        engine.add("c", prompt("abxy12"), 3)
        engine.step()
        assert engine.reset()
        engine.run()
        assert engine.loaded["c"] == 0
        assert engine.done["c"] == engine.expected(prompt("abxy12"), 3)
        world.settle()
        stored = world.check_stored()
        assert world.generate("d", prompt("abcd12")) == 0
        assert world.check_stored() == stored + 8
        world.forget()
        assert world.generate("e", prompt("abcd12")) == 64
        world.at_rest()


def test_a_tier_that_must_be_asked_is_waited_for_until_its_deadline() -> None:
    slow = Slow(CpuBackend(CpuOptions()))
    with open_world(slow, options={"lookup_timeout": 2.0}) as world:
        world.generate("a", prompt("abcd12"))
        slow.hang("contains")
        come(world, "b", "wxyz12")
        assert world.scheduler.match("b", 0) == (None, False)
        assert slow.wait_until_hanging()
        world.client.calls.clear()
        assert {world.scheduler.match("b", 0) for _ in range(200)} == {(None, False)}
        assert (world.client.called("hold"), left(world)) == (0, (0, 0))
        world.scheduler.step({}, lambda request_id: None)
        world.clock.now += 2.1
        assert world.scheduler.match("b", 0) == (0, False)
        assert left(world) == (0, 0)
        slow.release()


def test_what_a_tier_answers_is_found() -> None:
    slow = Slow(CpuBackend(CpuOptions()))
    with open_world(slow) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        come(world, "b", "abcd12")
        slow.hang("contains")
        with world.node.guard.mutex:
            for space in world.index.spaces.values():
                world.index.clear(list(space.chunks.values()), 1)
        first = world.scheduler.match("b", 0)
        slow.release()
        until(lambda: world.scheduler.match("b", 0)[0] is not None)
        assert first[0] in (None, 64)
        assert world.scheduler.match("b", 0)[0] == 64
        world.scheduler.end("b")
        assert world.scheduler.idle


def test_facts_that_never_come_cost_requests_a_while_once() -> None:
    with open_world() as world:
        come(world, "a", "abcd")
        assert world.scheduler.match("a", 0) == (None, False)
        world.clock.now += 19.0
        assert world.scheduler.match("a", 0) == (None, False)
        world.clock.now += 1.1
        assert world.scheduler.match("a", 0) == (0, False)
        come(world, "b", "abcd")
        assert world.scheduler.match("b", 0) == (0, False)
        assert world.warnings == ["off: KV is neither loaded nor stored: no worker has told how its KV lies"]


def test_a_store_covers_whole_chunks_while_a_prompt_is_computed_and_its_tail_at_its_end() -> None:
    with open_world(budget=20) as world:
        world.generate("a", prompt("abc12"), 30)
        saves = [(save.first_page, len(save.blocks[0]) // 4) for step in world.engine.steps for save in step.saves]
        assert saves == [(0, 2), (2, 1), (2, 2)]
        world.at_rest()


def test_generated_tokens_are_stored_in_whole_chunks_unless_the_user_says_no() -> None:
    for wanted, pages in ((True, 6), (False, 3)):
        with open_world(options={"save_decode": wanted}) as world:
            world.generate("a", prompt("abc12"), 60)
            assert world.check_stored() == pages
            world.at_rest()


@pytest.mark.parametrize("later", [1.0, 0.0])
def test_a_request_that_is_preempted_is_loaded_again(later: float) -> None:
    with open_world(blocks=40, budget=256) as world:
        engine = world.engine
        engine.local_cache = False
        world.generate("warm", prompt("1"))
        engine.add("a", prompt("abcd1"), 30)
        engine.add("b", prompt("wxyz1"), 30)
        engine.step()
        world.clock.now += later
        engine.run()
        assert [engine.done[each] for each in "ab"] == [engine.expected(prompt(t), 30) for t in ("abcd1", "wxyz1")]
        world.at_rest()
        assert engine.loaded["b"] == 64


def test_what_is_not_stored_is_counted_once_however_many_steps_complete_it() -> None:
    with open_world() as world:
        world.node.guard.index.frozen = True
        for request, text in (("a", "abcdefgh"), ("b", "ijklmnop")):
            world.generate(request, prompt(text))
        assert world.scheduler.counts["dropped_tokens", ""] == 2 * 8 * 16


def test_a_request_for_a_tier_that_is_not_there_is_refused_and_that_is_said(world: World) -> None:
    world.scheduler.begin(Request("c", prompt("abcd12")), wanted=RequestOptions(tiers=["tape"]))
    assert {world.scheduler.match("c", 0) for _ in range(3)} == {(0, False)}
    assert world.scheduler.counts["refused_options", ""] == 1
    assert "request c: nothing is loaded or stored for it: there is no tier 'tape'" in world.warnings[-1]
    assert world.scheduler.match("b", 0) == (64, False)


def test_what_others_load_is_told_from_what_the_engine_has_and_what_we_load(world: World) -> None:
    side = world.scheduler
    assert side.match("b", 16) == (48, False)
    assert [side.is_foreign("b", computed) for computed in (0, 16, 17)] == [False, False, True]
    side.allocated("b", blocks(64), 48)
    assert [side.is_foreign("b", computed) for computed in (16, 64, 65)] == [False, False, True]
    assert [side.is_foreign("nobody", computed) for computed in (0, 1)] == [False, True]
    come(world, "c", "abcd12")
    assert side.match("c", 0)[0] == 64
    side.allocated("c", blocks(96), 0)  # another one's offer was taken
    assert [side.is_foreign("c", computed) for computed in (0, 64)] == [False, True]


def test_until_what_others_loaded_is_known_to_be_there_nothing_is_stored() -> None:
    with open_world(blocks=200) as world:
        world.generate("before", prompt("12"))
        tokens = {"a": come(world, "a", "abcd12").num_tokens}
        side = world.scheduler

        def planned(*, foreign: bool = False) -> tuple[int, int]:
            step = side.step(tokens, lambda name: blocks(tokens[name]), foreign=foreign)
            return step.number, len(step.saves)

        first, saves = planned(foreign=True)
        assert saves == 0
        side.report(Report(ended=first - 1))
        assert planned() == (first + 1, 0)
        side.report(Report(loaded=Counter({"x": 1})))
        assert planned() == (first + 2, 0)
        side.report(Report(ended=first))
        assert planned() == (0, 1)
