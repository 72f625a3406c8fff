"""Options that users write, and which node an engine's ranks use."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import Config, CpuConfig
from lmcache_core.connectors.sglang import nodes
from lmcache_core.connectors.sglang.nodes import engine_name, engine_settings, engine_socket, open_client
from lmcache_core.connectors.sglang.options import Options, lacking, read_options
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


def open_one(source: Any, engine: str, rank: int = 0, ranks: int = 1, page: int = 16, **more: Any) -> Any:
    return open_client(source, engine, page, rank=rank, ranks=ranks, lease=60.0, **more)


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


def test_engines_of_two_starts_of_a_machine_or_two_containers_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and times of processes are the same in all of them."""
    mine = engine_name()
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine in mine
    assert os.readlink("/proc/self/ns/pid") in mine
    reading = nodes._read
    monkeypatch.setattr(nodes, "_read", lambda path: "other" if path.endswith("boot_id") else reading(path))
    assert engine_name() != mine
    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert engine_name() != mine


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(os, "readlink", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert str(os.getppid()) in engine_name()
    assert engine_name(0) != engine_name(1)


@pytest.mark.parametrize(("page", "wanted", "chunk"), [(1, 7, 7), (16, 100, 112), (16, 1000, 1008), (64, 256, 256)])
def test_chunks_are_whole_pages_of_the_engine_whatever_is_asked_for(page: int, wanted: int, chunk: int) -> None:
    client = open_one(SMALL | {"chunk_tokens": wanted}, "engine f", page=page)
    try:
        assert (client.page_tokens, client.chunk_tokens) == (page, chunk)
    finally:
        client.close()


def test_other_mistakes_are_told_as_they_are() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        engine_settings({"chunk_tokens": 7, "cpu": {"capacity": "nonsense"}})
    with pytest.raises(ConfigError, match="chunk_tokens"):
        engine_settings({"chunk_tokens": 0})


def test_a_file_that_is_not_there_is_told_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"'cache.yaml' cannot be read: No such file.*looked for in {tmp_path}"):
        engine_settings("cache.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory$"):
        engine_settings("/nowhere/cache.yaml")
    Path("cache.yaml").write_text("layout: canonical\n")
    assert engine_settings("cache.yaml").layout == "canonical"


def test_the_log_says_where_kv_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank alone."""
    caplog.set_level("INFO", "lmcache_core.connectors.sglang")
    path = str(tmp_path / "s")
    with Node(Config(256, 64, CpuConfig(capacity=1 << 20))) as node:
        node.servers.append(NodeServer(node, path))
        for rank in (0, 1):
            open_one({"connect": path}, "engine g", rank, 2).close()
    told = [record.message for record in caplog.records if record.message.startswith("KV of this engine")]
    assert told == [
        f"KV of this engine is kept by the node at {path}, in pages of 16 tokens (configured by the extra "
        "configuration)"
    ]


def test_tiers_that_are_asked_by_name_need_to_know_where_a_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"backend": "nfs", "name": "shared", "path": str(tmp_path / "nfs"), "must_be_mounted": False}
    disk = {"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "4MiB"}
    (tmp_path / "nfs").mkdir()
    lacks = lacking({}, passes_prefix_keys=False)
    open_one(SMALL | {"tiers": [disk, shared]}, "engine h").close()
    open_one(SMALL | {"tiers": [disk]}, "engine h", lacks=lacks).close()
    told = r'write "interface_v1": 1 and "hicache_storage_pass_prefix_keys": true: without.*, and shared cannot$'
    with pytest.raises(ConfigError, match=told):
        open_one(SMALL | {"tiers": [disk, shared]}, "engine h", lacks=lacks)
    assert [thread for thread in threading.enumerate() if thread.name == "lmcache-loop"] == []
    assert not any("interface_v1" in record.message for record in caplog.records)
    open_one({"connect": str(tmp_path / "s")}, "engine h", lacks=lacks).close()
    assert sum("hicache_storage_pass_prefix_keys" in record.message for record in caplog.records) == 1


def test_what_tells_where_a_run_begins() -> None:
    assert lacking({"interface_v1": 1}, passes_prefix_keys=True) == []
    assert lacking({"interface_v1": 1}, passes_prefix_keys=None) == []  # attached while running: nobody can tell
    assert lacking({"interface_v1": 1}, passes_prefix_keys=False) == ['"hicache_storage_pass_prefix_keys": true']
    assert lacking({"interface_v1": 0}, passes_prefix_keys=True) == ['"interface_v1": 1']
