"""A client in another process than the node reads the node's tiers to its own device, past the node's pool."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_core import Cache
from lmcache_core.client import AHEAD, DirectReading, Held, PastHost
from lmcache_core.config import BreakerConfig, Config, TierConfig
from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.node import Node
from lmcache_core.protocols import ChunkKey, CopyBack, DirectChunk, DirectRead, ReadResult
from lmcache_core.service import beside, wire
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from tests.node import kv
from tests.node.directshelf import DirectShelf
from tests.node.kv import PAGE_BYTES, open_cache, page, retrieve, store, tokens, until
from tests.node.shelf import Shelf
from tests.node.test_directreads import Device

LONG = {"breaker": BreakerConfig(failures=3, cooldown=60.0, max_cooldown=60.0)}
NBYTES = 4 * PAGE_BYTES


@dataclass
class Pair:
    """A node, and a client that is as in another process."""

    node: Node
    cache: Cache
    """At the node itself."""
    client: RemoteClient
    model: Any
    server: NodeServer

    def hold(self, text: str = "abcd") -> Held:
        return self.client.hold(self.model, self.cache.prompt(tokens(text)).keys)

    def find(self, text: str = "abcd") -> PastHost:
        held = self.hold(text)
        found = self.client.past_host(held, 0)
        self.client.release(held)
        assert found is not None
        return found

    def read(self, device: Device, text: str = "abcd") -> DirectReading:
        return self.client.read_past_host(self.find(text), device.address, device.back)


def opened(client: RemoteClient) -> beside.TierReaders:
    """Its openings, once they are there."""
    readers = client._readers
    assert readers is not None
    until(lambda: not readers.opening)
    return readers


def readers_of(*shelves: Any) -> Callable[[TierConfig], Any]:
    """In place of `make_reader`: what is opened reads these shelves, by the number in the tier's name."""
    return lambda tier: shelves[int(tier.name[1:])].reader()


@contextmanager
def pair(path: Path, *shelves: Any, **settings: Any) -> Iterator[Pair]:
    """With the prompts `abcd` and `efgh` stored, and not in the pool."""
    with open_cache(*shelves, **settings) as cache:
        for text in ("abcd", "efgh"):
            store(cache, text)
        cache.clear(["cpu"])
        node: Node = cache.client.node  # type: ignore[attr-defined]
        server = NodeServer(node, str(path / "s"))
        node.servers.append(server)
        client = RemoteClient(str(path / "s"), Config(call_timeout=10.0), past_host=True)
        opened(client)
        try:
            yield Pair(node, cache, client, client.register(kv.namespace()), server)
        finally:
            client.close()
            until(lambda: not server.sessions)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> DirectShelf:
    shelf = DirectShelf()
    monkeypatch.setattr(beside, "make_reader", readers_of(shelf))
    return shelf


def test_it_finds_what_the_node_s_own_process_finds(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf, slots=40) as both:
        text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQR"
        store(both.cache, text)
        both.cache.clear(["cpu"])
        direct: Any = both.cache.client
        theirs, ours = direct.hold(both.cache._model, both.cache.prompt(tokens(text)).keys), both.hold(text)
        assert len(ours.parts) == 11 > AHEAD
        found = [both.client.past_host(ours, number) for number in range(11)]
        assert found == [direct.past_host(theirs, number) for number in range(11)]
        assert found[3] is not None
        assert found[3].nbytes == NBYTES
        assert [both.client.past_host(ours, number) for number in (-1, 11, 99)] == [None] * 3
        both.client.release(ours)
        assert both.client.past_host(ours, 0) is None
        direct.release(theirs)


def test_it_is_read_and_nothing_comes_to_the_pool(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        device = Device()
        reading = both.read(device)
        assert reading.answered.result(5)
        assert reading.ended.result(5) == [ReadResult.HIT]
        assert device.memory == b"".join(bytes(page(each)) for each in both.cache.prompt(tokens("abcd")).keys)
        assert both.cache.stats().chunks == 0
        assert [verb for verb, _ in shelf.calls if verb.startswith("read")] == []
        assert [verb for verb, _ in shelf.readers[0].calls] == ["open", "read_direct"]
    assert shelf.readers[0].calls[-1] == ("close", 1)


def test_what_is_in_the_pool_or_on_its_way_there_is_not_read_like_this(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        assert retrieve(both.cache, "abcd") == 4
        held = both.hold("abcd")
        assert both.client.past_host(held, 0) is None
        both.client.release(held)
        held = both.hold("efgh")
        assert both.client.past_host(held, 0) is not None
        (grant,) = both.client.grant(held, 0, 1)
        assert both.client.past_host(held, 0) is None, "it has been asked for"
        assert grant.wait is not None
        assert grant.wait.result(5)
        both.client.release(held)


def test_a_lease_brings_nothing_to_the_pool_by_itself(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        held = both.hold("abcd")
        assert both.client.grant(held, 0, 0) == []
        number = both.client.share(held)
        joined = both.client.join_hold(number)
        assert joined is not None
        assert both.client.past_host(joined, 0) is not None
        both.client.release(joined)
        both.client.release(held)
        assert both.node.flush(5)
        assert [verb for verb, _ in shelf.calls if verb.startswith("read")] == []


def test_a_tier_that_fails_here_is_left_alone_here(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf, tiers=[LONG]) as both:
        held = both.hold("abcd")
        found = both.client.past_host(held, 0)
        assert found is not None
        shelf.readers[0].faults = ["raise"]
        for _ in range(3):
            device = Device()
            reading = both.client.read_past_host(found, device.address, device.back)
            assert reading.answered.result(5)
            with pytest.raises(BackendError, match="could not be written to"):
                reading.ended.result(5)
        assert not both.client.reads_past_host
        assert both.client.past_host(held, 0) is None
        both.client.release(held)
        assert both.cache.stats().tiers[0].up
        assert retrieve(both.cache, "abcd") == 4


def test_one_that_hangs_is_given_up_at_the_tier_s_deadline(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf, tiers=[LONG | {"read_timeout": 0.05}]) as both:
        readers = opened(both.client)
        reader = shelf.readers[0]
        switch(readers, reader.gate.clear)
        reading = both.read(Device())
        assert not reading.answered.result(5)
        assert not reading.ended.done()
        assert not both.client.reads_past_host
        assert retrieve(both.cache, "abcd") == 4, "through the node"
        switch(readers, reader.gate.set)
        assert reading.ended.result(5) == [ReadResult.HIT]


def switch(readers: beside.TierReaders, change: Callable[[], None]) -> None:
    async def run() -> None:
        change()

    readers._loop.run(run(), 5)


def test_a_read_under_way_ends_when_the_client_is_closed(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        switch(opened(both.client), shelf.readers[0].gate.clear)
        found = both.find()
        device = Device()
        reading = both.client.read_past_host(found, device.address, device.back)
        until(lambda: bool(shelf.readers[0].arrived))
        both.client.close()
        with pytest.raises((CancelledError, BackendError)):
            reading.ended.result(5)
        with pytest.raises(ClosedError):
            both.client.read_past_host(found, device.address, device.back)


class Asked(DirectShelf):
    """Knows what it was asked for."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.asked: list[DirectRead] = []

    async def read_direct(self, reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
        self.asked += reads
        return await super().read_direct(reads, back)


def test_another_node_at_the_same_place_has_other_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = DirectShelf(), DirectShelf()
    monkeypatch.setattr(beside, "make_reader", lambda tier: {"t0": first, "other": second}[tier.name].reader())
    with pair(tmp_path, first) as both:
        found = both.find()
        both.cache.close()
        with open_cache(second, tiers=[{"name": "other"}]) as cache:
            store(cache, "abcd")
            cache.clear(["cpu"])
            node: Node = cache.client.node  # type: ignore[attr-defined]
            server = NodeServer(node, str(tmp_path / "s"))
            node.servers.append(server)
            until(lambda: bool(second.readers), 10.0)
            opened(both.client)
            until(lambda: both.client.reads_past_host)
            assert first.readers[0].calls[-1] == ("close", 1)
            held = both.hold()
            again = both.client.past_host(held, 0)
            both.client.release(held)
            assert again == found._replace(tier="other")
            device = Device()
            reading = both.client.read_past_host(again, device.address, device.back)
            assert reading.ended.result(5) == [ReadResult.HIT]
            both.client.close()
            until(lambda: not server.sessions)


def test_the_same_node_again_leaves_the_openings_as_they_are(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        link = both.client._link
        assert link is not None
        link.fail("a test")
        until(lambda: both.client._link not in (None, link), 10.0)
        opened(both.client)
        assert len(shelf.readers) == 1
        assert both.read(Device()).ended.result(5) == [ReadResult.HIT]


def test_a_tier_that_is_gone_meanwhile_is_no_defect(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        chunk = DirectChunk(ChunkKey(bytes(32), bytes(32)), (bytes(32),), b"", 1, 1024)
        with pytest.raises(BackendError, match="tier gone is not read past host memory any more"):
            both.client.read_past_host(PastHost("gone", 7, chunk, 0, 1), 1, Device().back)


class Refusing(DirectShelf):
    """Cannot be opened beside the node."""

    async def open(self) -> None:
        if self.seed:
            raise BackendError("this process may not")
        await super().open()

    seed = 0

    def reader(self) -> DirectShelf:
        reader = super().reader()
        reader.seed = 1  # type: ignore[attr-defined]
        return reader


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "there is no backend 'test'"),
        (Refusing(), "tier t0, read beside its node, cannot be opened: this process may not"),
    ],
    ids=["no such plugin here", "it cannot be opened here"],
)
def test_what_cannot_be_opened_here_is_said_and_the_node_reads(
    made: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if made is not None:
        monkeypatch.setattr(beside, "make_reader", readers_of(made))
    with caplog.at_level(logging.WARNING), pair(tmp_path, made or DirectShelf(), tiers=[LONG]) as both:
        assert not both.client.reads_past_host
        held = both.hold()
        assert both.client.past_host(held, 0) is None
        (grant,) = both.client.grant(held, 0, 1)
        assert grant.wait is None or grant.wait.result(5)
        both.client.release(held)
    assert [record for record in caplog.records if why in record.getMessage()]


class Alone(Shelf):
    """Reads to devices, but in one process."""

    has_device = True
    read_direct = DirectShelf.read_direct
    write_direct = DirectShelf.write_direct


def test_of_several_tiers_each_says_why_it_cannot_be_opened_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pair(tmp_path, DirectShelf(), DirectShelf()):
        pass
    said = "is not read past host memory in this process: there is no backend 'test'"
    for tier in ("t0", "t1"):
        assert [record for record in caplog.records if f"tier {tier} {said}" in record.getMessage()]


def test_a_plugin_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf, hangs, tried = DirectShelf(), threading.Event(), threading.Event()

    def make(tier: TierConfig) -> Any:
        tried.set()
        assert hangs.wait(20)
        raise KeyboardInterrupt  # nobody hears it any more

    with open_cache(shelf) as cache:
        node: Node = cache.client.node  # type: ignore[attr-defined]
        server = NodeServer(node, str(tmp_path / "s"))
        node.servers.append(server)
        monkeypatch.setattr(beside, "make_reader", make)
        client = RemoteClient(str(tmp_path / "s"), Config(call_timeout=10.0), past_host=True)
        assert tried.wait(5)
        assert client.reads_past_host, "it may be soon"
        client.close()
        assert not client.reads_past_host
        tried.clear()
        monkeypatch.setattr(beside, "OPEN_TIMEOUT", 0.05)
        client = RemoteClient(str(tmp_path / "s"), Config(call_timeout=10.0), past_host=True)
        opened(client)
        assert not client.reads_past_host
        client.close()
        hangs.set()
        until(lambda: not server.sessions)
    assert [record for record in caplog.records if "it could not be made in 0.05 s" in record.getMessage()]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("a defect")], ids=repr)
def test_what_a_plugin_raises_when_it_is_made_ends_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(tier: TierConfig) -> Any:
        raise error

    monkeypatch.setattr(beside, "make_reader", make)
    with pair(tmp_path, DirectShelf()) as both:
        assert opened(both.client)._loop.thread.is_alive()
        assert not both.client.reads_past_host
    assert [each for each in caplog.records if f"backend 'test' raised {type(error).__name__}" in each.getMessage()]


def test_several_may_close_it_at_once(shelf: DirectShelf, tmp_path: Path) -> None:
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pair(directory, shelf) as both, ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(both.client.close) for _ in range(4)]:
                done.result(5)
            until(lambda: shelf.readers[-1].calls[-1] == ("close", 1))  # by the first of them
        assert [verb for verb, _ in shelf.readers[-1].calls] == ["open", "close"]


@pytest.mark.parametrize("tiers", [b"", msgspec.msgpack.encode([])], ids=["nonsense", "none"])
def test_what_was_open_before_a_change_is_closed_though_all_is_closed_at_once(
    tiers: bytes, shelf: DirectShelf, tmp_path: Path
) -> None:
    with pair(tmp_path, shelf) as both:
        readers = opened(both.client)
        readers.use(tiers)
        readers.close()
        assert [verb for verb, _ in shelf.readers[0].calls] == ["open", "close"]


class Slow(DirectShelf):
    """Takes its time to open, whether or not it is cancelled."""

    began = threading.Event()

    async def open(self) -> None:
        if not self.gate.is_set():
            self.began.set()

        async def work() -> None:
            await self.gate.wait()
            await super(Slow, self).open()

        inner = asyncio.ensure_future(work())
        while not inner.done():
            try:
                await asyncio.shield(inner)
            except asyncio.CancelledError:
                self.gate.set()


def test_it_is_closed_when_its_opening_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Slow()
    with open_cache(shelf) as cache:
        node: Node = cache.client.node  # type: ignore[attr-defined]
        server = NodeServer(node, str(tmp_path / "s"))
        node.servers.append(server)

        def make(tier: TierConfig) -> Any:
            reader = shelf.reader()
            reader.gate.clear()
            return reader

        monkeypatch.setattr(beside, "make_reader", make)
        client = RemoteClient(str(tmp_path / "s"), Config(call_timeout=10.0), past_host=True)
        assert shelf.began.wait(5)
        client.close()
        until(lambda: not server.sessions)
    assert [verb for verb, _ in shelf.readers[0].calls] == ["open", "close"]


def test_who_finds_nothing_of_what_the_node_has_leaves_it_to_the_node(
    shelf: DirectShelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with another directory at the same path."""
    with pair(tmp_path, shelf) as both:
        found = both.find()
        shelf.readers[0].values = {}
        for number in range(beside.MOST_MISSES):
            assert both.client.reads_past_host, number
            device = Device()
            reading = both.client.read_past_host(found, device.address, device.back)
            assert reading.ended.result(5) == [ReadResult.MISS]
        until(lambda: not both.client.reads_past_host)
        held = both.hold("efgh")
        assert both.client.past_host(held, 0) is None
        both.client.release(held)
        readers = opened(both.client)
        readers._readers[0]._again = 0.0
        shelf.readers[0].values = shelf.values
        assert both.read(Device()).ended.result(5) == [ReadResult.HIT]
    assert [each for each in caplog.records if "8 chunks in a row that its node has there" in each.getMessage()]


def test_a_tier_whose_options_cannot_be_told_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(msgspec.Struct):
        number: int

    shelves = DirectShelf(), DirectShelf()
    monkeypatch.setattr(beside, "make_reader", readers_of(*shelves))
    with pair(tmp_path, *shelves, tiers=[{"options": Odd(1 << 70)}, {"options": Odd(7)}]) as both:
        readers = opened(both.client)
        assert {number: each._config.options for number, each in readers._readers.items()} == {1: {"number": 7}}
    assert [each for each in caplog.records if "tier t0 is not read by other processes" in each.getMessage()]


def test_a_node_that_says_nonsense_of_chunks_is_left(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        link = both.client._link
        assert link is not None
        for keys in (b"", bytes(33)):
            held = both.hold()
            link = both.client._link
            assert link is not None
            odd = wire.PastHost("t0", 0, bytes(32), keys, b"", 1, 1024, 0, 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(link, "call", lambda *_, odd=odd: wire.PastHosts((odd,)))
                assert both.client.past_host(held, 0) is None
            assert link.down
            until(lambda link=link: both.client._link not in (None, link))  # type: ignore[misc]
            del held


def test_a_backend_that_is_for_one_process_is_not_opened_beside(tmp_path: Path) -> None:
    with pair(tmp_path, Alone()) as both:
        assert both.node.beside == []
        assert not both.client.reads_past_host
        assert retrieve(both.cache, "abcd") == 4


def test_nobody_is_asked_of_a_client_that_does_not_want_it(shelf: DirectShelf, tmp_path: Path) -> None:
    with pair(tmp_path, shelf) as both:
        client = RemoteClient(str(tmp_path / "s"), Config(call_timeout=10.0))
        held = client.hold(client.register(kv.namespace()), both.cache.prompt(tokens("abcd")).keys)
        assert (client.reads_past_host, client.past_host(held, 0)) == (False, None)
        client.release(held)
        client.close()
        assert len(shelf.readers) == 1


def test_settings_of_a_tier_arrive_as_they_are(shelf: DirectShelf, tmp_path: Path) -> None:
    rules = LONG | {"read_timeout": 0.7, "quarantine": 12345}
    told: list[TierConfig] = []

    def make(tier: TierConfig) -> DirectShelf:
        told.append(tier)
        return shelf.reader()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "make_reader", make)
        with pair(tmp_path, shelf, tiers=[rules]) as both:
            assert told == [both.node.config.tiers[0]]


def test_what_a_node_says_of_its_tiers_may_be_anything(caplog: pytest.LogCaptureFixture) -> None:
    readers = beside.TierReaders(0.0)
    for said in (b"", b"\xc1", msgspec.msgpack.encode([[0, {"backend": 7}]]), msgspec.msgpack.encode([0])):
        readers.use(said)
        until(lambda: not readers.opening)
        assert not readers.possible
    readers.close()
    readers.close()
    assert [record.getMessage()[:46] for record in caplog.records] == 4 * [
        "what the node says of its tiers cannot be unde"
    ]


async def test_it_may_be_used_from_a_coroutine(shelf: DirectShelf, tmp_path: Path) -> None:
    def run() -> list[ReadResult]:
        with pair(tmp_path, shelf) as both:
            return both.read(Device()).ended.result(5)

    assert await asyncio.to_thread(run) == [ReadResult.HIT]
