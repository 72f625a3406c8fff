"""What a worker writes, what it stores, and what it says of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from lmcache_core.connectors.vllm.plan import Load, Report, Save, Step
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.direct import DirectClient
from lmcache_core.wrappers import Slow
from tests.connectors.vllm import world as world_module
from tests.connectors.vllm.world import World, open_world, prompt
from tests.node.shelf import Shelf


@pytest.fixture(params=[None, True, False], ids=["by the worker", "layer by layer", "on streams"], autouse=True)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies, and in whatever order: the engine sees the same."""
    monkeypatch.setattr(world_module, "LAYERWISE", request.param)


LAYOUTS = ["f", "k", "o", "p", "fw", "fb"]


def clear(world: World) -> None:
    """An operator takes away everything, leased or not."""
    DirectClient(world.node).clear()


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("through", ["direct", "socket"])
def test_what_was_computed_once_is_loaded_from_memory_and_from_a_tier(
    groups: str, through: str, tmp_path: Path
) -> None:
    with open_world(Shelf(), groups=groups, socket=tmp_path if through == "socket" else None) as world:
        assert world.generate("a", prompt("abcd12"), 3) == 0
        world.forget()
        assert world.generate("b", prompt("abcd12"), 3) == 64
        world.forget("cpu")
        assert world.generate("c", prompt("abcdef12"), 3) == 64
        world.forget("cpu")
        assert world.generate("d", prompt("abcdef12"), 3) == 96
        world.at_rest()
        assert world.warnings == []


@pytest.mark.parametrize("groups", ["f", "fw"])
@pytest.mark.parametrize("through", ["direct", "socket"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 2)])
def test_each_rank_stores_and_loads_its_part(
    groups: str, through: str, ranks: int, replicas: int, tmp_path: Path
) -> None:
    socket = tmp_path if through == "socket" else None
    with open_world(Shelf(), groups=groups, socket=socket, ranks=ranks, replicas=replicas) as world:
        assert world.generate("a", prompt("abcd12")) == 0
        world.forget("cpu")
        assert world.generate("b", prompt("abcd34")) == 64
        world.at_rest()
        assert {world.index.spaces[digest].known.shards for digest in world.spaces} == {ranks // replicas}


@pytest.mark.parametrize("sync", [True, False])
def test_a_hit_that_begins_inside_a_page_leaves_the_blocks_in_front_alone(sync: bool) -> None:
    """The engine checks that no byte of blocks that were there changes, not even its noise."""
    with open_world(options={"sync_load": 1e9 if sync else 0.0}) as world:
        world.generate("a", prompt("abcd12"))
        engine = world.engine
        hashes = engine.chains(0)[0][2]
        for tokens in (4, 20, 36):  # of the last two pages, what lies behind so many tokens
            for name, block in list(engine.pool.cached.items()):
                if hashes.index(name[1]) >= tokens:
                    engine.pool.forget(block)
            assert world.generate(f"b{tokens}", prompt("abcd12")) == 64 - tokens
        (job,) = [job for step in engine.steps for job in step.loads][-1:]
        assert (job.first_page, job.pages, job.skip_tokens, job.now) == (2, 4, 4, sync)
        world.at_rest()


def test_a_load_within_a_step_that_fails_is_computed_and_the_step_stores_nothing() -> None:
    with open_world(budget=256) as world:
        world.generate("a", prompt("abcd12"))
        world.forget()
        engine = world.engine
        engine.between.append(lambda: clear(world))
        request = engine.add("b", prompt("abcdef12"))
        engine.step()
        (bad,) = engine.invalid
        (save,) = engine.steps[-1].saves
        assert bad == set(request.blocks[0][:16])
        assert request.num_computed_tokens == 0
        assert (save.first_page, len(save.blocks[0])) == (4, 8)
        world.settle()
        world.check_stored()
        assert world.index.pool.slots == 0
        engine.run()
        assert engine.loaded["b"] == 0
        world.forget()
        assert world.generate("c", prompt("abcdef34")) == 96
        world.at_rest()


def test_what_others_compute_in_a_spoilt_step_is_stored_in_a_later_one() -> None:
    with open_world(budget=256, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.forget()
        engine = world.engine
        engine.between.append(lambda: clear(world))
        engine.add("b", prompt("abcd12"))
        engine.add("c", prompt("xy12"), 2)
        engine.run()
        world.forget()
        assert world.generate("d", prompt("xy12")) == 32
        world.at_rest()


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_defect_while_a_step_is_stored_leaves_nothing_open(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests are stored by one step, and one of the stores meets a defect of ours: those in front of it are
    there, and the others have ended."""
    with open_world(budget=256, blocks=200, options={"layerwise": None}) as world:
        worker = world.workers[0]
        save, before, tried = worker.save, WorkerSide._save, []

        def defect(self: WorkerSide, job: Save) -> None:
            tried.append(job)
            if len(tried) == fails + 1:
                raise RuntimeError("a defect")
            before(self, job)

        def guarded(step: Step) -> None:
            with suppress(RuntimeError):
                save(step)

        monkeypatch.setattr(WorkerSide, "_save", defect)
        monkeypatch.setattr(worker, "save", guarded)
        for name, text in (("a", "ab12"), ("b", "cd12"), ("c", "ef12")):
            world.engine.add(name, prompt(text))
        world.engine.run()
        assert len(tried) == fails + 1
        assert not world.scheduler._savings
        monkeypatch.undo()
        world.forget()
        found = [world.generate(text, prompt(text)) for text in ("ab12", "cd12", "ef12")]
        assert found == [32] * fails + [0] * (3 - fails)
        world.at_rest()


def test_blocks_that_the_engine_keeps_though_they_were_lost_spread_nothing() -> None:
    """vLLM leaves lost blocks in its own prefix cache, since the request that lost them computes them anew; if that one
    is aborted first, they stay there as they are, and others compute with them."""
    with open_world(budget=256, blocks=200, evicts=False) as world:
        world.generate("a", prompt("abcd12"))
        world.forget()
        engine = world.engine
        engine.tolerant = True
        engine.between.append(lambda: clear(world))
        engine.add("b", prompt("abcd12"))
        engine.add("c", prompt("abcdefgh12"))
        engine.step()
        assert len(engine.invalid) == 1
        engine.abort("b")
        engine.run()
        world.at_rest()


@pytest.mark.parametrize("broken", ["abcd", "cd"])
def test_a_load_beside_the_steps_that_fails_half_way_reports_just_what_is_missing(broken: str) -> None:
    """The chunk of `cd`, or all, is gone from the tier when the load comes to it."""
    shelf = Shelf()
    with open_world(shelf) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        gone = world.keys(prompt("abcd"))[1 if broken == "abcd" else 3 :]
        shelf.values = {key: value for key, value in shelf.values.items() if key.page not in gone}
        engine = world.engine
        request = engine.add("b", prompt("abcd12"))
        there = 0 if broken == "abcd" else 8
        engine.step()
        table = list(request.blocks[0])
        while not engine.invalid:
            engine.step()
        assert engine.invalid == [set(table[there:16])]
        engine.run()
        assert engine.loaded["b"] == 4 * there
        assert engine.done["b"] == engine.expected(prompt("abcd12"), 1)
        world.at_rest()


@pytest.mark.parametrize("groups", ["f", "fw"])
def test_a_tier_that_hangs_costs_a_request_its_load_timeout_and_nobody_else_anything(groups: str) -> None:
    slow = Slow(Shelf())
    options = {"load_timeout": 1.0}
    with open_world(slow, groups=groups, options=options, tiers=[{"read_timeout": 60.0}], blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        slow.hang("read")
        engine = world.engine
        engine.add("b", prompt("abcd12"))
        engine.add("c", prompt("xyz1"), 5)
        while "c" not in engine.done:
            engine.step()
        assert "b" not in engine.done
        assert slow.wait_until_hanging()
        assert world.warnings == []
        world.worker_clock.now += 1.1
        engine.run()
        assert [warning.split(":")[0] for warning in world.warnings] == ["slow"]
        assert engine.done["b"] == engine.expected(prompt("abcd12"), 1)
        assert engine.loaded["b"] == 0
        slow.release()
        world.at_rest()


def test_loads_beside_the_steps_take_slices_of_time() -> None:
    """The clock says that each look at it took a millisecond: a slice of three is over after a part."""
    with open_world(options={"sync_load": 0.0, "load_slice": 0.003}, chunk_tokens=16, blocks=200, budget=300) as world:
        world.generate("a", prompt("abcdefgh1"))
        world.forget()
        engine = world.engine
        engine.add("b", prompt("xyz1"), 40)
        engine.step()
        request = engine.add("c", prompt("abcdefgh2"))
        steps = 0
        while request.status in ("waiting", "remote") and request.num_computed_tokens != 128:
            engine.step()
        while request.status == "remote":
            before = world.worker_clock.now
            engine.step()
            steps += 1
            assert world.worker_clock.now - before < 0.02
        assert steps >= 2
        engine.run()
        assert engine.loaded["c"] == 128
        world.at_rest()


def test_several_loads_go_on_together() -> None:
    shelf = Shelf()
    with open_world(shelf, blocks=200, budget=300) as world:
        texts = {"a": "abcd1", "b": "bcde1", "c": "cdef1"}
        for request_id, text in texts.items():
            world.generate(request_id, prompt(text))
        world.forget("cpu")
        for request_id, text in texts.items():
            world.engine.add(f"again {request_id}", prompt(text))
        world.engine.step()
        assert [len(step.loads) for step in world.engine.steps[-1:]] == [3]
        world.engine.run()
        assert [world.engine.loaded[f"again {request_id}"] for request_id in texts] == [64, 64, 64]
        world.at_rest()


@pytest.mark.parametrize("when", ["told", "under way", "ended"])
def test_an_aborted_request_keeps_its_blocks_until_its_load_has_ended(when: str) -> None:
    slow = Slow(Shelf())
    with open_world(slow, tiers=[{"read_timeout": 60.0}]) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        engine = world.engine
        if when != "ended":
            slow.hang("read")
        request = engine.add("b", prompt("abcd12"))
        engine.step()
        if when == "ended":
            while not engine._received_by_all(request):
                engine.step()
        if when == "under way":
            assert slow.wait_until_hanging()
        engine.abort("b")
        assert ("b" in engine.requests) is (when != "ended")
        engine.add("c", prompt("wxyz1"))
        for _ in range(3):
            engine.step()
        slow.release()
        engine.run()
        world.at_rest()


def test_a_hybrid_model_loads_only_the_window_and_never_the_null_block() -> None:
    with open_world(groups="fw", blocks=200) as world:
        world.generate("a", prompt("abcdefgh12"))
        world.forget()
        null = [memory[:, 0].copy() for memory in world.engine.memory[0]]
        assert world.generate("b", prompt("abcdefgh34")) == 128
        (job,) = world.engine.steps[-2].loads or [each for step in world.engine.steps for each in step.loads][-1:]
        assert job.blocks[1].count(0) == (128 - 24 + 1) // 4
        assert all((memory[:, 0] == before).all() for memory, before in zip(world.engine.memory[0], null, strict=True))
        world.at_rest()


def test_a_node_that_is_not_there_is_computed_without(tmp_path: Path) -> None:
    with open_world(socket=tmp_path) as world:
        world.generate("a", prompt("abcd12"))
        world.engine.forget()
        for server in world.node.servers:
            server.close()
        assert world.engine.generate("b", prompt("abcd12")) == 0
        assert world.engine.done["b"] == world.engine.expected(prompt("abcd12"), 1)
        assert world.scheduler.idle


def test_a_job_that_nobody_knows_of_fails_and_ends() -> None:
    with open_world() as world:
        world.generate("a", prompt("abcd12"))
        (worker,) = world.workers
        worker.report()  # what had been stored
        worker.start(Step(16, [Load("x", 0, 0, 2, 0, (tuple(range(1, 9)),), False, 1.0)]), busy=False)
        worker.save(Step(16, saves=[Save("x", 999, 0, (tuple(range(1, 9)),))]))
        report = worker.report()
        assert report is not None
        assert (report.loaded, report.failed, report.saved) == ({"x": 1}, {"x"}, {999: 1})
        assert (worker.bad_blocks(), worker.ended()) == (set(range(1, 9)), ({"x"}, set()))
        assert (worker.report(), worker.bad_blocks(), worker.ended()) == (None, set(), (set(), set()))


def test_giving_up_ends_what_is_under_way() -> None:
    slow = Slow(Shelf())
    with open_world(slow, tiers=[{"read_timeout": 60.0}]) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        slow.hang("read")
        request = world.engine.add("b", prompt("abcd12"))
        world.engine.step()
        (worker,) = world.workers
        worker.give_up(Step(16, [Load("x", 0, 0, 1, 0, ((60, 61, 62, 63),), True, 1.0)]))
        assert worker.ended() == ({"b"}, set())
        assert worker.bad_blocks() == {60, 61, 62, 63, *request.blocks[0]}
        report = worker.report()
        assert report is not None
        assert report.failed == {"b", "x"}
        slow.release()


def test_reports_add_up() -> None:
    first, second = Report(), Report()
    assert not first + second
    first.loaded["a"] += 1
    first.saved[7] += 1
    second.loaded["a"] += 1
    second.loaded["b"] += 1
    second.saved[7] += 1
    second.failed.add("b")
    second.unsaved.add(7)
    total = first + second
    assert (total.loaded, total.saved) == ({"a": 2, "b": 1}, {7: 2})
    assert (total.failed, total.unsaved, total.refused) == ({"b"}, {7}, "")


def test_ranks_whose_kv_lies_in_different_ways_are_refused() -> None:
    with open_world(groups="f") as one, open_world(groups="k") as other:
        reports = [world.workers[0].report() for world in (one, one, other)]
        assert all(report is not None and report.facts is not None for report in reports)
        first, again, second = (report or Report() for report in reports)
        assert ((first + again).facts, (first + again).refused) == (first.facts, "")
        assert (first + second).refused == "the KV of its ranks lies in different ways"
        one.scheduler.report(first + second)
        one.engine.generate("a", prompt("abcd"))
        assert one.client.called("begin_store") == 0
        assert one.warnings == ["off: KV is neither loaded nor stored: the KV of its ranks lies in different ways"]
