"""Options that users write, and which node an engine's ranks use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import Config, CpuConfig
from lmcache_core.connectors.sglang.nodes import engine_name, engine_socket, open_client
from lmcache_core.connectors.sglang.options import Options, read_options
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.node import Node
from lmcache_core.service.address import Listener
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer

SMALL: dict[str, Any] = {"cpu": {"capacity": "4MiB"}}


def test_options() -> None:
    assert read_options({}) == (Options(), [])
    written = {"interface_v1": 1, "class_name": "x", "config": "a.yaml", "read_timeout": "2s", "promises": 5}
    assert read_options(written) == (Options(config="a.yaml", read_timeout=2.0, promises=5), [])


def test_keys_that_nobody_knows_are_told() -> None:
    assert read_options({"something": 1, "config": "a"})[1] == ["something"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"read_time_out": 1}, "unknown key 'read_time_out'; did you mean 'read_timeout'"),
        ({"conifg": "a"}, "did you mean 'config'"),
        ({"promises": 0}, "promises"),
        ({"read_timeout": "soon"}, "read_timeout"),
        ({"config": True}, "no configuration"),
        ({"config": ""}, "no configuration"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(written: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        read_options(written)
    assert str(raised.value).startswith("hicache-storage-backend-extra-config: ")


def open_one(source: Any, engine: str, rank: int = 0, ranks: int = 1, page: int = 16) -> Any:
    return open_client(source, engine, page, rank=rank, ranks=ranks, lease=60.0)


@pytest.mark.parametrize(("page", "chunk"), [(1, 256), (16, 256), (48, 288), (64, 256), (512, 512)])
def test_the_engine_s_own_node_has_its_pages(page: int, chunk: int) -> None:
    client = open_one(SMALL, "engine a", page=page)
    try:
        assert isinstance(client, DirectClient)
        assert (client.page_tokens, client.chunk_tokens) == (page, chunk)
        assert client.node.config.lease_timeout == 60.0
        assert client.node.config.socket == ""
    finally:
        client.close()


def test_other_ranks_join_the_first_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    early = open_one(SMALL, "engine b", rank=1, ranks=2)
    client = open_one(SMALL, "engine b", ranks=2)
    try:
        assert client.node.config.socket == engine_socket("engine b", SMALL) != engine_socket("engine c", SMALL)
        assert isinstance(early, RemoteClient)
        assert early.wait_until_up(10)
    finally:
        early.close()
        client.close()


def test_sockets_of_engines_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead = Listener(engine_socket("dead", SMALL))
    dead.abandon()  # as the end of its process does
    client = open_one(SMALL, "engine d", ranks=2)
    try:
        assert not Path(dead.path).exists()
    finally:
        client.close()


def test_a_node_that_runs_by_itself(tmp_path: Path) -> None:
    with Node(Config(256, 64, CpuConfig(capacity=1 << 20))) as node:
        node.servers.append(NodeServer(node, str(tmp_path / "s")))
        for rank in (0, 1):
            client = open_one({"connect": str(tmp_path / "s")}, "engine e", rank, 2)
            assert client.wait_until_up(10)
            client.close()


def test_an_engine_is_known_by_who_has_started_it() -> None:
    assert engine_name() == engine_name(0) != engine_name(1)
