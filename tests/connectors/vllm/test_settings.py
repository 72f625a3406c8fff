"""Options of the connector, and the node that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client import AHEAD
from lmcache_core.config import Config, CpuConfig
from lmcache_core.connectors.vllm.nodes import WorkerDoor, check_pages, engine_socket, open_door
from lmcache_core.connectors.vllm.options import Options, RequestOptions, read_options, read_request_options
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.node import Node
from lmcache_core.service.address import Listener
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from tests.connectors.vllm.world import open_world
from tests.node.kv import until

SMALL: dict[str, Any] = {"cpu": {"capacity": "1MiB"}}


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"layerwise": None}, "by the engine's thread, all layers together"),
        ({"layerwise": True}, "beside the engine, layer by layer"),
        (
            {"layerwise": True, "past_host": True},
            "beside the engine, layer by layer, and loaded past host memory where a tier can do that",
        ),
        ({"layerwise": False}, "beside the engine, all layers together"),
    ],
)
def test_how_kv_is_copied_is_told(options: dict[str, Any], copies: str) -> None:
    with open_world(options=options) as world:
        assert world.workers[0].copies == copies


def test_options_have_units_and_defaults() -> None:
    assert read_options({}) == Options()
    read = read_options({"config": SMALL, "sync_load": "5ms", "load_timeout": 3, "save_decode": False})
    assert (read.config, read.sync_load, read.load_timeout, read.save_decode) == (SMALL, 0.005, 3.0, False)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"sync_laod": 1}, ["unknown key 'sync_laod'", "did you mean 'sync_load'?"]),
        ({"load_timeout": "soon"}, ["load_timeout", "'soon'"]),
        ({"save_decode": "yes"}, ["save_decode", "true or false"]),
        ({"lmcache.config": "x"}, ["unknown key 'lmcache.config'"]),
        ({"config": ""}, ["config: '' is no configuration; write the path of a YAML file", "LMCACHE_CORE_CONFIG"]),
        ({"config": 5}, ["config: 5 is no configuration"]),
        ({"config": ["a.yaml"]}, ["is no configuration"]),
    ],
)
def test_a_mistake_in_an_option_is_named(written: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read_options(written)
    assert str(raised.value).startswith("kv_connector_extra_config")
    assert [part for part in says if part not in str(raised.value)] == []


def test_options_of_a_request() -> None:
    assert read_request_options(None) == read_request_options({"other": 1}) == RequestOptions()
    assert read_request_options({"lmcache_core": {"load": False, "tiers": ["cpu"]}}) == RequestOptions(
        load=False, tiers=["cpu"]
    )
    for wrong in ({"laod": False}, {"max_load_tokens": -1}, {"tiers": "cpu"}, 7):
        with pytest.raises(ConfigError, match=r"^kv_transfer_params: lmcache_core: "):
            read_request_options({"lmcache_core": wrong})
    with pytest.raises(ConfigError, match="unknown key 'lmcache-core'; did you mean 'lmcache_core'"):
        read_request_options({"lmcache-core": {"load": False}})
    assert read_request_options({"lmcache.skip_save": True, "do_remote_decode": True}) == RequestOptions()


@pytest.mark.parametrize(
    ("blocks", "settings", "pages"),
    [
        (16, {}, (64, 256)),
        (128, {}, (128, 256)),
        (48, {}, (96, 288)),
        (1056, {}, (1056, 1056)),
        (16, {"page_tokens": 16, "chunk_tokens": 64}, (16, 64)),
    ],
)
def test_the_engine_s_own_node_has_pages_of_whole_blocks(
    blocks: int, settings: dict[str, Any], pages: tuple[int, int]
) -> None:
    door = open_door(SMALL | settings, "engine a", blocks, processes=False)
    try:
        assert (door.client.page_tokens, door.client.chunk_tokens) == pages
        assert door.config.socket == ""
    finally:
        door.close()


def test_a_worker_in_the_same_process_finds_the_node_once_it_is_there() -> None:
    worker = WorkerDoor(SMALL, "engine b", 0, same_process=True)
    assert worker.client() is None
    door = open_door(SMALL, "engine b", 16, processes=False)
    other = open_door(SMALL, "engine c", 16, processes=False)
    try:
        found = worker.client()
        assert isinstance(found, DirectClient)
        assert isinstance(door.client, DirectClient)
        assert found.node is door.client.node
        assert worker.client() is found
    finally:
        door.close()
        other.close()
    assert WorkerDoor(SMALL, "engine b", 0, same_process=True).client() is None


def test_workers_in_other_processes_find_it_by_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    door = open_door(SMALL, "engine d", 16, processes=True)
    worker = WorkerDoor(SMALL, "engine d", 0, same_process=False)
    try:
        assert door.config.socket == engine_socket(f"engine d {SMALL!r}")
        client = worker.client()
        assert isinstance(client, RemoteClient)
        assert client.wait_until_up(10)
        assert (client.page_tokens, client.chunk_tokens) == (door.client.page_tokens, door.client.chunk_tokens)
        assert client._readers is None
    finally:
        worker.close()
        door.close()


def test_an_engine_may_have_nodes_with_settings_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    other = SMALL | {"chunk_tokens": 64}
    first = open_door(SMALL, "engine h", 16, processes=True)
    second = open_door(other, "engine h", 16, processes=True)
    worker = WorkerDoor(other, "engine h", 0, same_process=True)
    try:
        found = worker.client()
        assert isinstance(found, DirectClient)
        assert isinstance(second.client, DirectClient)
        assert found.node is second.client.node
        assert first.config.socket != second.config.socket
    finally:
        worker.close()
        first.close()
        second.close()


def test_sockets_of_engines_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead = Listener(engine_socket("dead"))
    alive = Listener(engine_socket("alive"))
    dead.abandon()  # as the end of its process does
    door = open_door(SMALL, "engine i", 16, processes=True)
    try:
        left = {path.name for path in Path(alive.path).parent.iterdir()}
        assert left == {Path(path).name + end for path in (alive.path, door.config.socket) for end in ("", ".lock")}
    finally:
        door.close()
        alive.close()


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """The socket of a node with pages of 64 tokens, which others use too."""
    with Node(Config(256, 64, CpuConfig(capacity=1 << 20))) as node:
        node.servers.append(NodeServer(node, str(tmp_path / "s")))
        yield str(tmp_path / "s")


def test_a_node_that_others_use_too_is_used_as_it_is(served: str) -> None:
    door = open_door({"connect": served}, "engine f", 16, processes=True)
    worker = WorkerDoor({"connect": served}, "engine f", 0, same_process=False)
    try:
        assert isinstance(door.client, RemoteClient)
        client = worker.client()
        assert isinstance(client, RemoteClient)
        until(lambda: client.page_tokens == door.client.page_tokens == 64)
    finally:
        worker.close()
        door.close()


def test_who_reads_past_the_host_has_nothing_come_to_the_pool_before(served: str) -> None:
    door = open_door({"connect": served}, "engine f", 16, processes=True, past_host=True)
    worker = WorkerDoor({"connect": served}, "engine f", 0, same_process=False, past_host=True)
    try:
        client = worker.client()
        assert isinstance(door.client, RemoteClient)
        assert isinstance(client, RemoteClient)
        assert (door.client._readers, door.client._ahead) == (None, 0)
        readers = client._readers
        assert readers is not None
        until(lambda: not readers.opening)
        assert client._ahead == AHEAD, "no tier of this node can be read like that"
    finally:
        worker.close()
        door.close()


def test_a_node_whose_pages_do_not_fit_says_what_to_write(served: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_door({"connect": served}, "engine g", 48, processes=True)
    assert str(raised.value) == (
        f"the node at {served} has pages of 64 tokens, and this engine blocks of 48: start the node with "
        "page_tokens: 96 and chunk_tokens: 288"
    )


def test_a_node_whose_pages_do_not_fit_is_let_go_of(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RemoteClient] = []
    made: list[RemoteClient] = []
    connect, close = RemoteClient.__init__, RemoteClient.close

    def connecting(self: RemoteClient, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        connect(self, *args, **kwargs)

    def closing(self: RemoteClient) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(RemoteClient, "__init__", connecting)
    monkeypatch.setattr(RemoteClient, "close", closing)
    try:
        with pytest.raises(ConfigError):
            open_door({"connect": served}, "engine g", 48, processes=True)
        assert (len(made), closed) == (1, made)
    finally:
        close(made[0])


def test_a_node_that_is_not_there_yet_is_used_once_it_is(tmp_path: Path) -> None:
    door = open_door({"connect": str(tmp_path / "s")}, "engine h", 16, processes=True)
    try:
        assert isinstance(door.client, RemoteClient)
        with Node(Config(256, 64, CpuConfig(capacity=1 << 20))) as node:
            node.servers.append(NodeServer(node, str(tmp_path / "s")))
            assert door.client.wait_until_up(10)
    finally:
        door.close()


def test_pages_of_whole_blocks_fit() -> None:
    check_pages(64, 256, 16, "here")
    check_pages(96, 192, 48, "here")
