"""Loads past host memory: from a tier to the device, and from there to blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.connectors.vllm import pasthost
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError, ClosedError, TransferError
from lmcache_core.index import POOL
from lmcache_core.protocols import ChunkKey, ReadResult
from tests.connectors.vllm.world import World, open_world, prompt
from tests.node.directshelf import DirectShelf
from tests.node.kv import until
from tests.node.shelf import Shelf


class Absent(DirectShelf):
    has_device = False


PAST = {"past_host": True, "layerwise": True, "sync_load": 0.0}


def in_pool(world: World) -> int:
    with world.node.guard.mutex:
        return sum(bool(entry.where & POOL) for space in world.index.spaces.values() for entry in space.chunks.values())


def calls(shelf: Shelf, verb: str) -> int:
    """Of the node, and of workers beside it."""
    readers = getattr(shelf, "readers", [])
    return sum(count for each in (shelf, *readers) for name, count in each.calls if name == verb)


@pytest.fixture(params=[False, True], ids=["in the node's process", "beside"])
def beside(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where the node's socket is, if workers are in other processes."""
    return tmp_path if request.param else None


@pytest.mark.parametrize("groups", ["f", "k", "p", "fw"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hit_comes_past_the_pool(groups: str, ranks: int, beside: Path | None) -> None:
    shelf = DirectShelf()
    with open_world(shelf, groups=groups, ranks=ranks, options=PAST, blocks=200, socket=beside) as world:
        world.generate("a", prompt("abcde12"))
        world.forget("cpu")
        assert in_pool(world) == 0
        assert world.generate("b", prompt("abcde12")) == 80
        assert calls(shelf, "read") == 0
        assert calls(shelf, "read_direct") >= 3 * ranks
        assert in_pool(world) <= 1, "but for what the second one has stored"
        counts = DirectClient(world.node).stats().counts
        assert counts["retrieved_tokens"]["t0"] == 80
        nbytes = {"f": 5 * 1024, "k": 5 * 1536, "p": 5 * 1024, "fw": 5 * 1024 + 3 * 1024}[groups]
        assert counts["past_host_bytes"]["t0"] == ranks * nbytes
        assert len(shelf.readers) == (ranks if beside else 0)
        world.at_rest()


def test_what_the_engine_has_itself_is_left_alone(beside: Path | None) -> None:
    with open_world(DirectShelf(), options=PAST, blocks=200, socket=beside) as world:
        world.generate("a", prompt("abcd"))
        world.engine.forget()
        world.generate("head", prompt("ab1"))
        DirectClient(world.node).clear(None, ["cpu"])
        assert world.generate("b", prompt("abcd12")) == 64 - 32
        world.at_rest()


@pytest.mark.parametrize("fault", ["miss", "corrupt", "raise"])
def test_what_cannot_be_had_like_this_is_read_through_the_host(fault: str, beside: Path | None) -> None:
    shelf = DirectShelf([fault], probability=0.5, seed=1)
    with open_world(shelf, options=PAST, blocks=200, socket=beside) as world:
        world.generate("a", prompt("abcdefgh12"))
        world.forget("cpu")
        assert world.generate("b", prompt("abcdefgh12")) == 128
        assert 0 < calls(shelf, "read") < calls(shelf, "read_direct")
        world.at_rest()


def device_of(world: World) -> pasthost.DeviceMemory:
    device = world.workers[0]._device
    assert device is not None
    return device


def test_no_more_is_read_at_once_than_leaves_threads_for_others() -> None:
    shelf = DirectShelf()
    with open_world(shelf, options=PAST, blocks=300) as world:
        world.generate("a", prompt("abcdefghijklmnop12"))
        world.forget("cpu")
        hanging(world, shelf, True)
        world.engine.add("b", prompt("abcdefghijklmnop12"))
        world.engine.step()
        until(lambda: len(shelf.arrived) == pasthost.AT_ONCE, 5.0)
        assert device_of(world).take(1) is None
        hanging(world, shelf, False)
        world.engine.run()
        assert world.engine.loaded["b"] == 256
        world.at_rest()
        assert device_of(world)._reading == 0


def test_a_copy_that_cannot_be_begun_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_world(DirectShelf(), options=PAST, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        kv = world.workers[0]._kv
        assert kv is not None

        def refuse(copies: Any, order: Any = ()) -> Any:
            raise TransferError("the device is lost")

        with monkeypatch.context() as context:
            context.setattr(kv.streams, "load", refuse)
            world.engine.add("b", prompt("abcd12"))
            while "b" not in world.engine.done:
                world.engine.step()
        assert world.engine.loaded["b"] == 0
        device = device_of(world)
        until(lambda: sum(size for size, _ in device._unused) == device._taken, 5.0)
        world.at_rest()


def hanging(world: World, shelf: DirectShelf, hang: bool) -> None:
    async def switch() -> None:
        shelf.gate.clear() if hang else shelf.gate.set()

    asyncio.run_coroutine_threadsafe(switch(), world.node._loop.loop).result(5)  # type: ignore[attr-defined]


def test_a_read_that_is_given_up_writes_where_nobody_is() -> None:
    """There is memory for one chunk: while a read that was given up may still write there, it is nobody's."""
    shelf = DirectShelf()
    with open_world(shelf, options=PAST | {"load_timeout": 1.0}, blocks=200) as world:
        world.generate("a", prompt("ab12"))
        world.generate("c", prompt("cd12"))
        world.forget("cpu")
        device = world.workers[0]._device
        assert device is not None
        for size, room in device._unused:
            room.close()
            device._taken -= size
        device._unused.clear()
        device._most = 1 << 11
        hanging(world, shelf, True)
        engine = world.engine
        engine.add("b", prompt("ab12"))
        engine.step()
        until(lambda: len(shelf.arrived) == 1, 5.0)
        assert device.take(1) is None, "all of it is in use"
        world.worker_clock.now += 1.1
        engine.run()
        assert engine.done["b"] == engine.expected(prompt("ab12"), 1)
        assert engine.loaded["b"] == 0
        assert device.take(1) is None, "the read has not ended"
        assert world.generate("d", prompt("cd12")) == 32
        assert calls(shelf, "read") == 1, "through the host"
        hanging(world, shelf, False)
        until(lambda: bool(device._unused), 5.0)
        assert shelf.ended == 1
        taken = device.take(1)
        assert taken is not None
        assert taken[1].address == shelf.arrived[0], "now it can be used again"
        device.give(taken)
        world.at_rest()


class Gated(DirectShelf):
    """Reads to the device with these numbers fail, and the others wait, once `closed`; those to the host wait too."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.fails: set[int] = set()
        self.lets = asyncio.Event()
        self.lets_through = asyncio.Event()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        if self.closed:
            await self.lets_through.wait()
        return await super().read(keys, into)

    async def held(self, number: int) -> None:
        if number in self.fails:
            raise BackendError("the device does not want it")
        if self.closed:
            await self.lets.wait()


def test_what_comes_to_the_pool_while_it_is_read_is_copied_from_there() -> None:
    """The first part is read through the host, and the others come to the pool meanwhile for somebody else, while they
    are still being read to the device: that memory is nobody's until those reads have ended."""
    shelf = Gated()
    with open_world(shelf, options=PAST, blocks=300) as world:
        world.generate("a", prompt("abcdef12"))
        world.generate("z", prompt("uvwxyz12"))
        world.forget("cpu")
        device = world.workers[0]._device
        assert device is not None
        shelf.closed = True
        shelf.fails = {len(shelf.arrived) + 1}
        world.engine.add("b", prompt("abcdef12"))
        world.engine.step()
        until(lambda: len(shelf.arrived) == 3, 5.0)
        model = world.scheduler._model
        assert model is not None
        everything = DirectClient(world.node).prefetch(model, world.keys(prompt("abcdef")), None, "cpu")
        let(world, shelf.lets_through)
        assert everything.result(10) == 6
        world.engine.run()
        assert world.engine.loaded["b"] == 96, "from the pool"
        used = sum(size for size, _ in device._unused)
        assert device._taken - used == 2 * 2048, "two reads are under way"
        shelf.fails = set()
        let(world, shelf.lets)
        until(lambda: sum(size for size, _ in device._unused) == device._taken, 5.0)
        assert world.generate("y", prompt("uvwxyz12")) == 96
        world.at_rest()


def let(world: World, event: asyncio.Event) -> None:
    async def go_on() -> None:
        event.set()

    asyncio.run_coroutine_threadsafe(go_on(), world.node._loop.loop).result(5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rooms", [1, 2, 100])
def test_what_is_in_the_pool_is_not_read_again_and_the_rest_is_read_ahead(rooms: int, beside: Path | None) -> None:
    """With less memory of the device than parts that are read ahead, the rest comes through the host beside it."""
    shelf = DirectShelf()
    with open_world(shelf, options=PAST, blocks=300, socket=beside) as world:
        world.generate("a", prompt("abcdefghijklmnop12"))
        world.forget("cpu")
        model = world.scheduler._model
        device = world.workers[0]._device
        assert model is not None
        assert device is not None
        device._most = rooms * 2048
        assert world.client.prefetch(model, world.keys(prompt("ab")), None, "cpu").result(10) == 2
        shelf.calls.clear()
        for reader in shelf.readers:
            reader.calls.clear()
        assert world.generate("b", prompt("abcdefghijklmnop12")) == 256
        direct, through = calls(shelf, "read_direct"), calls(shelf, "read")
        assert direct + through == 7, "but for what is in the pool, each once"
        assert through == 0 if rooms == 100 else direct >= 1
        world.at_rest()


def test_a_medium_that_hangs_costs_its_deadline_once() -> None:
    shelf = DirectShelf()
    with open_world(shelf, options=PAST, blocks=200, tiers=[{"read_timeout": 0.05}]) as world:
        world.generate("a", prompt("ab12"))
        world.generate("c", prompt("cdef12"))
        world.forget("cpu")
        hanging(world, shelf, True)
        assert world.generate("b", prompt("ab12")) == 0, "the tier is left alone, as with reads through the host"
        assert world.generate("d", prompt("cdef12")) == 0
        assert calls(shelf, "read_direct") == len(shelf.arrived) == 1
        hanging(world, shelf, False)
        device = world.workers[0]._device
        assert device is not None
        until(lambda: not device._late and world.node.runners[0].up, 5.0)
        assert world.node.flush(5.0)
        world.forget("cpu")
        assert world.generate("e", prompt("cdef12")) == 64
        assert calls(shelf, "read_direct") == 3
        world.at_rest()


def test_memory_is_used_again_when_it_has_been_copied_from() -> None:
    """The device is slow: what is copied to blocks is under way for long after it was handed over."""
    with open_world(DirectShelf(), options=PAST, blocks=200) as world:
        world.generate("a", prompt("abcd12"))
        world.forget("cpu")
        device = world.workers[0]._device
        kv = world.workers[0]._kv
        assert device is not None
        assert kv is not None
        assert kv.streams is not None
        loads: list[Any] = []
        gate = threading.Event()
        before = kv.streams.load

        def load(copies: Any, order: Any = ()) -> Any:
            kv.streams.thread.put(gate.wait)  # type: ignore[union-attr]
            loads.append(before(copies, order))
            return loads[-1]

        kv.streams.load = load  # type: ignore[method-assign]
        world.engine.add("b", prompt("abcd12"))
        for _ in range(100):
            world.engine.step()
            if loads:
                break
        in_use = device._taken - sum(size for size, _ in device._unused)
        gate.set()
        assert in_use >= 2048, "until the blocks have it"
        world.engine.run()
        assert world.engine.loaded["b"] == 64
        world.settle()
        until(lambda: sum(size for size, _ in device._unused) == device._taken, 5.0)
        world.at_rest()


def test_a_request_that_is_aborted_meanwhile_leaves_nothing_behind() -> None:
    shelf = DirectShelf()
    with open_world(shelf, options=PAST, blocks=200) as world:
        world.generate("a", prompt("abcdef12"))
        world.forget("cpu")
        hanging(world, shelf, True)
        world.engine.add("b", prompt("abcdef12"))
        world.engine.step()
        until(lambda: len(shelf.arrived) == 3, 5.0)
        assert device_of(world)._reading == 3
        world.engine.abort("b")
        world.engine.add("c", prompt("xyz"))
        for _ in range(3):
            world.engine.step()
        hanging(world, shelf, False)
        world.engine.run()
        assert world.engine.done["c"] == world.engine.expected(prompt("xyz"), 1)
        world.at_rest()
        device = world.workers[0]._device
        assert device is not None
        until(lambda: sum(size for size, _ in device._unused) == device._taken, 5.0)


def test_a_worker_ends_while_a_read_is_under_way() -> None:
    shelf = DirectShelf()
    with open_world(shelf, options=PAST, blocks=200) as world:
        world.generate("a", prompt("ab12"))
        world.forget("cpu")
        hanging(world, shelf, True)
        world.engine.add("b", prompt("ab12"))
        world.engine.step()
        until(lambda: len(shelf.arrived) == 1, 5.0)
        world.workers[0].close()
        hanging(world, shelf, False)
        until(lambda: shelf.ended == 1, 5.0)


def test_readers_that_have_ended_cost_no_hit(tmp_path: Path) -> None:
    """A plugin has stopped their event loop, say: what they would have read comes through the node."""
    with open_world(DirectShelf(), options=PAST, blocks=200, socket=tmp_path) as world:
        world.generate("a", prompt("ab12"))
        world.forget("cpu")
        client: Any = world.workers[0]._find_client()
        readers = client._readers
        readers._loop.stop()
        assert not client.reads_past_host
        assert world.generate("b", prompt("ab12")) == 32
        world.forget("cpu")
        client._readers = Ended()
        assert world.generate("c", prompt("ab12")) == 32
        client._readers = readers
        world.at_rest()


class Ended:
    """Readers that end at the very moment when something is to be read."""

    opening, possible = False, True

    def can_read(self, number: int) -> bool:
        return True

    def read(self, *found: Any) -> Any:
        raise ClosedError("they have ended")


@pytest.mark.parametrize(
    ("options", "socket", "why"),
    [
        ({"past_host": True}, False, "is not copied on streams of a device"),
        ({"past_host": True}, True, "is not copied on streams of a device"),
    ],
)
def test_where_it_is_of_no_use_that_is_said(options: dict[str, Any], socket: bool, why: str, tmp_path: Any) -> None:
    with open_world(
        DirectShelf(), options={"sync_load": 0.0} | options, socket=tmp_path if socket else None, blocks=200
    ) as world:
        world.generate("a", prompt("ab12"))
        world.forget("cpu")
        assert world.generate("b", prompt("ab12")) == 32
        assert [each for each in world.warnings if why in each]
        world.at_rest()


@pytest.mark.parametrize("shelf", [Shelf(), Absent()], ids=["no such tier", "no device"])
def test_without_a_tier_for_it_all_is_read_through_the_host_and_that_is_said(shelf: Shelf, beside: Path | None) -> None:
    shelf = type(shelf)()
    with open_world(shelf, options=PAST, blocks=200, socket=beside) as world:
        for number in range(4):
            world.generate(f"a{number}", prompt("ab12"))
            world.forget("cpu")
        assert world.generate("b", prompt("ab12")) == 32
        assert calls(shelf, "read_direct") == 0
        assert [each for each in world.warnings if "no tier reads into a device's memory" in each]
        assert world.node.runners[0].up
        world.at_rest()


# Memory of a device


class Rooms:
    """Rooms that are numbers."""

    def __init__(self, most: int = 1000) -> None:
        self.open: list[int] = []
        self.made = 0
        self.most = most

    def room(self, nbytes: int) -> Any:
        if self.made == self.most:
            raise TransferError("out of memory")
        self.made += 1
        number, rooms = self.made, self

        class Room:
            address = number
            memory = memoryview(bytes(nbytes))

            def close(self) -> None:
                rooms.open.remove(number)

        self.open.append(number)
        return Room()

    def copy_back(self, address: int, into: memoryview) -> None:
        raise AssertionError


def test_rooms_are_used_again_and_bounded() -> None:
    rooms = Rooms()
    said: list[str] = []
    memory = pasthost.DeviceMemory(rooms, lambda kind, text: said.append(text), most=100)
    assert memory.take(101) is None, "more than there may be, which changes nothing for others"
    assert said == [
        "a chunk of 101B is read through host memory, as there is 100B of the device's for past_host; a smaller "
        "chunk_tokens makes smaller ones"
    ]
    first, second = memory.take(40), memory.take(30)
    assert first is not None
    assert second is not None
    assert second[0] == 40, "all of one size"
    assert memory.take(10) is None
    memory.give(first)
    assert memory.take(40) == first
    memory.give(first)
    memory.give(second)
    larger = memory.take(90)
    assert larger is not None
    assert rooms.open == [3], "those that are too small make room"
    memory.close()
    memory.give(larger)
    assert rooms.open == [3], "it may still be written to"
    assert memory.take(1) is None


def test_a_device_that_has_no_more_is_told_of() -> None:
    rooms = Rooms(most=2)
    said: list[str] = []
    memory = pasthost.DeviceMemory(rooms, lambda kind, text: said.append(text), most=1000)
    taken = [memory.take(40) for _ in range(2)]
    assert all(taken)
    assert not said
    assert memory.take(40) is None
    assert [line.split(";")[0] for line in said] == [
        "the device has no more than 80B for past_host, and what does not fit there is read through host memory"
    ]
    memory.give(taken[0])  # type: ignore[arg-type]
    assert memory.take(40) == taken[0], "what there is is used"
    assert memory.take(90) is None
    assert len(said) == 2
