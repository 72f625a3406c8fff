"""Health over HTTP: what a probe is told is how the node is, within a second."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcache_core import Cache
from lmcache_core.checkup import Checkup
from lmcache_core.hostpool import HostPool
from lmcache_core.metrics import MetricsServer
from lmcache_core.node import Node
from lmcache_core.protocols import ChunkKey, ReadResult
from tests.node.kv import open_cache, retrieve, store, tokens
from tests.node.shelf import Shelf
from tests.service.kit import remote, serving

FROZEN = (503, "frozen, or being drained: it serves what it has and stores nothing new")


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer, which must come within a second; a little more is for a busy test machine."""
    started = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            told = answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            told = error.code, error.read().decode().strip()
    assert time.monotonic() - started < 3
    return told


def node_of(cache: Cache) -> Node:
    node: Node = cache.client.node  # type: ignore[attr-defined]
    return node


def served(cache: Cache) -> MetricsServer:
    checkup = Checkup(node_of(cache))
    return MetricsServer(cache.client, checks={"/healthz": checkup.alive, "/readyz": checkup.ready})


@pytest.fixture
def cache() -> Iterator[Cache]:
    with open_cache(Shelf()) as cache:
        yield cache


@pytest.fixture
def port(cache: Cache) -> Iterator[int]:
    with served(cache) as server:
        yield server.port


def test_a_process_tells_how_it_is(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(tmp_path, metrics={"enabled": True, "port": port}) as (node, path):
        assert get(port, "/healthz") == (200, "alive")
        assert get(port, "/readyz") == (200, "ready")
        assert "\nlmcache_core_leases 0.0\n" in get(port, "/metrics")[1]
        assert get(port, "/other") == (404, "there are /metrics, /healthz, /readyz")
        cache = remote(path)
        cache.client.freeze(True)
        assert get(port, "/readyz") == FROZEN
        assert get(port, "/healthz") == (200, "alive")
        cache.client.freeze(False)
        assert get(port, "/readyz") == (200, "ready")
        cache.close()
        assert node.stop() == 0


def test_without_metrics_nothing_is_served(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, _):
        listening = Path(f"/proc/{node.process.pid}/net/tcp").read_text()
        inodes = {line.split()[9] for line in listening.splitlines()[1:]}
        links = [str(each.readlink()) for each in Path(f"/proc/{node.process.pid}/fd").iterdir()]
        assert not inodes & {link.removeprefix("socket:[").removesuffix("]") for link in links}


class Stuck(Shelf):
    """Reads hang on a thread, and cannot be called back."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()
        self.go_on = threading.Event()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        self.reading.set()
        await asyncio.to_thread(self.go_on.wait)
        return await super().read(keys, into)


def test_a_worker_that_hangs_is_no_reason_to_be_killed() -> None:
    shelf = Stuck()
    with open_cache(shelf) as cache, served(cache) as server, ThreadPoolExecutor() as engine:
        assert store(cache, "abcd")
        cache.evict(tokens("abcd"), ["cpu"])
        try:
            request = engine.submit(retrieve, cache, "abcd")
            assert shelf.reading.wait(10)
            assert get(server.port, "/healthz") == (200, "alive")
            assert get(server.port, "/readyz") == (200, "ready")
        finally:
            shelf.go_on.set()
        assert request.result(30) in (0, 4)


def test_a_thread_that_sits_on_the_index_is(cache: Cache, port: int) -> None:
    with node_of(cache).guard.mutex:
        for path in ("/healthz", "/readyz"):
            assert get(port, path) == (503, "the index has been in use for 0.5 s; a thread of this process hangs")
    assert get(port, "/healthz") == (200, "alive")


def test_an_event_loop_that_stands_still_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.node.STILL", -1.0)
    for path in ("/healthz", "/readyz"):
        status, text = get(port, path)
        assert status == 503
        assert text.startswith("the event loop has stood still for ")


def test_a_tier_that_is_left_alone_is_named(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.broken = True
    with open_cache(shelf, Shelf()) as cache, served(cache) as server:
        assert get(server.port, "/readyz") == (200, "ready; left alone: t0")


def test_a_node_is_ready_once_there_is_memory(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "usable", 0)
    assert get(port, "/readyz") == (503, "no memory of the pool can be used yet")
    assert get(port, "/healthz") == (200, "alive")


def test_a_frozen_and_a_drained_node_are_alive_and_not_ready(cache: Cache, port: int) -> None:
    cache.client.freeze(True)
    assert get(port, "/readyz") == FROZEN
    node_of(cache).drained.set()
    assert get(port, "/readyz") == (503, "drained: it serves what it has and stores nothing new")
    assert get(port, "/healthz") == (200, "alive")
    cache.client.freeze(False)  # an engine's own node goes on
    assert get(port, "/readyz") == (200, "ready")


def test_a_closed_node_is_neither(cache: Cache, port: int) -> None:
    cache.close()
    for path in ("/healthz", "/readyz"):
        assert get(port, path) == (503, "the node has been closed")
