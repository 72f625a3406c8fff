"""Copies beside the engine, on a device whose streams pause at random: in any order of events nothing is wrong, and
what would be wrong is found."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from lmcache_core.connectors.vllm.plan import Load
from lmcache_core.connectors.vllm.streaming import StepLoad, StepStore, StreamedLoading
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ClosedError, TransferError
from lmcache_core.streaming import Copying, Layer, LayerLoad
from lmcache_transfer import cpu
from lmcache_transfer.hostdevice import HostStream
from lmcache_transfer.pipeline import Inward
from lmcache_transfer.streamed import StreamedTransfer
from tests.connectors.vllm import world as world_module
from tests.connectors.vllm.test_machine import FEW, ConnectorMachine, HybridMachine, RanksMachine
from tests.connectors.vllm.world import open_world, prompt
from tests.node.kv import until
from tests.transfer.jitter import KeepingDevice, jittered


def device(seed: int) -> KeepingDevice:
    """Its streams pause; the engine's work is done at once, on the engine's thread, which waits for events itself."""
    made = jittered(seed, mapped=bool(seed % 2))
    made._engine.close()
    made._engine = HostStream()
    return made


@pytest.fixture(params=[True, False], ids=["layer by layer", "all together"], autouse=True)
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = itertools.count()
    monkeypatch.setattr(world_module, "LAYERWISE", request.param)
    monkeypatch.setattr(cpu, "HostDevice", lambda: device(next(seeds)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [ConnectorMachine, HybridMachine, RanksMachine])
def test_nothing_is_wrong_in_any_order_of_events(machine: type[ConnectorMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(FEW, max_examples=10))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set the device does nothing."""
    gate = threading.Event()
    gate.set()

    def slow() -> KeepingDevice:
        made = KeepingDevice(gate.wait)
        made._engine.close()
        made._engine = HostStream()
        return made

    monkeypatch.setattr(cpu, "HostDevice", slow)
    return gate


def test_blocks_are_not_used_again_before_they_have_been_read(beside: None, gate: threading.Event) -> None:
    with open_world() as world:
        engine = world.engine
        engine.add("a", prompt("abcd12"))
        gate.clear()
        running = threading.Thread(target=engine.run)
        running.start()
        running.join(0.3)
        assert running.is_alive(), "a step has ended whose blocks are still being read"
        gate.set()
        running.join(10)
        assert not running.is_alive()
        assert engine.done["a"] == engine.expected(prompt("abcd12"), 1)
        world.at_rest()


@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
def test_slots_stay_until_the_device_has_done_with_them(beside: None, gate: threading.Event) -> None:
    """Whoever clears the node, and whoever has given the load up."""
    with open_world() as world:
        world.generate("a", prompt("abcd12"))
        client, (worker,) = DirectClient(world.node), world.workers
        model = world.scheduler._model
        assert model is not None
        pool = world.index.pool
        for given_up in (False, True):
            world.generate(f"b{given_up}", prompt("abcd12"))
            world.forget()
            held = client.hold(model, world.keys(prompt("abcd")))
            assert held.pages == 4
            gate.clear()
            job = Load("x", client.share(held), 0, 4, 0, (tuple(range(1, 17)),), True, 5.0)
            loading = worker._loading(job)
            loading.run(None)
            assert isinstance(loading, StreamedLoading)
            worker._begin_load([loading])
            if given_up:
                loading.fail()
            client.release(held)
            client.clear()
            assert worker._step_load is not None
            load = worker._step_load._load
            assert not load.done.done()
            assert pool.slots == 2
            gate.set()
            load.done.result(10)
            until(lambda: pool.slots == 0)
            worker._settle()


def test_a_load_that_took_too_long_ends_when_nothing_is_written_any_more(beside: None, gate: threading.Event) -> None:
    """Its blocks are somebody else's then. It counts as failed, whatever has come of it."""
    with open_world() as world:
        world.generate("a", prompt("abcd12"))
        client, (worker,) = DirectClient(world.node), world.workers
        model = world.scheduler._model
        assert model is not None
        held = client.hold(model, world.keys(prompt("abcd")))
        job = Load("x", client.share(held), 0, 4, 0, (tuple(range(1, 17)),), False, 0.01)
        loading = worker._loading(job)
        gate.clear()
        running = threading.Thread(target=loading.run, args=(None,))
        running.start()
        running.join(0.1)
        assert running.is_alive(), "it has ended while its copies had not"
        gate.set()
        running.join(10)
        assert (loading.done, loading.failed, loading.pages) == (True, True, 0)
        client.release(held)
        world.at_rest()


@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
def test_requests_of_one_step_are_loaded_together(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of all of them before the next: the engine comes to the first layer of all of them first."""
    loads: list[tuple[int, int]] = []
    load = StreamedTransfer.load

    def noted(self: StreamedTransfer, copies: Sequence[Copying], order: Sequence[Layer] = ()) -> LayerLoad:
        loads.append((sum(each.pages for each in copies), len(order)))
        return load(self, copies, order)

    monkeypatch.setattr(StreamedTransfer, "load", noted)
    with open_world(budget=1000, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.generate("b", prompt("xy12"))
        world.forget()
        engine = world.engine
        for name, text in (("c", "abcd34"), ("d", "xy34")):
            engine.add(name, prompt(text))
        engine.run()
        assert (engine.loaded["c"], engine.loaded["d"]) == (64, 32)
        assert [each for each in loads if each[0]] == [(6, 2)]
        world.at_rest()


@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
def test_an_engine_that_does_not_tell_when_it_comes_to_a_layer(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded for such a step is computed again, once; then the engine waits for all layers at once."""
    monkeypatch.setattr(WorkerSide, "wait_layer", lambda self, name: None)
    with open_world(budget=1000, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        for name, loaded in (("b", 0), ("c", 64)):
            world.forget()
            world.engine.tolerant = True  # the step was computed with what was not there yet
            assert world.engine.generate(name, prompt("abcd34")) == loaded
            world.engine.tolerant = False
            world.settle()
        assert world.engine.done["c"] == world.engine.expected(prompt("abcd34"), 1)
        assert [line.split(":")[0] for line in world.warnings] == ["layers"]
        world.at_rest()


@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
def test_a_device_that_fails_to_copy_is_told_and_counted(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_world(budget=1000, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.forget()

        def fails(*_: Any) -> None:
            raise TransferError("the device is gone")

        with monkeypatch.context() as broken:
            broken.setattr(Inward, "submit", fails)
            assert world.engine.generate("b", prompt("abcd34")) == 0
        assert world.engine.done["b"] == world.engine.expected(prompt("abcd34"), 1)
        world.settle()
        world.engine.step()  # late reports come with a step's output
        counts = world.scheduler.counts
        assert (counts["loaded_tokens", "cpu"], counts["failed_tokens", ""]) == (0, 64)
        assert "load: KV of a request could not be loaded: the device is gone" in world.warnings
        world.at_rest()


@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
def test_an_engine_that_moves_its_cache(beside: None) -> None:
    """What copied the old one ends."""
    with open_world() as world:
        (worker,) = world.workers
        old = worker._kv
        assert old is not None
        assert isinstance(old.streams, StreamedTransfer)
        layers, memory = world.engine.groups[0], world.engine.memory[0][0]
        worker.register([layers.geometry(memory)], "cpu", backend="FAKE", isa="")
        with pytest.raises(ClosedError):
            old.streams.thread.put(lambda: None)
        world.generate("a", prompt("abcd12"))
        world.forget()
        assert world.generate("b", prompt("abcd12")) == 64
        world.at_rest()


Patch = Callable[[pytest.MonkeyPatch], None]


def nobody_waits_for_layers(patch: pytest.MonkeyPatch) -> None:
    def wait(self: StepLoad, layer: Layer) -> bool:
        self._left.discard(layer)
        return True

    patch.setattr(StepLoad, "wait", wait)


def what_is_stored_is_shown_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    def end(self: StepStore, *, worthless: bool) -> None:
        self._give_back(filled=not worthless)
        if self._store is not None:
            self._store.end()

    patch.setattr(StepStore, "end", end)


BUGS: list[Patch] = [
    nobody_waits_for_layers,
    what_is_stored_is_shown_before_it_is_there,
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("beside", [True], ids=["layer by layer"], indirect=True)
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_the_machine_catches(plant: Patch, beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    many = settings(FEW, max_examples=120, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError, Flaky)):
        run_state_machine_as_test(ConnectorMachine, settings=many)
