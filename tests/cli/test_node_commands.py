"""What operators tell a node at work: what each command says is what the node does."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache
from lmcache_core.cli.prompts import read_tokens
from lmcache_core.config import Config, CpuConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.errors import LMCacheError
from lmcache_core.node import Node
from lmcache_core.protocols import ChunkKey, ReadResult
from lmcache_core.service.server import NodeServer
from tests.cli.conftest import AtWork, Run
from tests.cli.kv import CHUNK_TOKENS, FRAME_BYTES, PAGE_TOKENS, View, fill, make_namespace, prompt_of, settings
from tests.node.kv import until
from tests.node.shelf import Shelf
from tests.service.kit import serving

COMMANDS_OF_PROMPTS = ["lookup", "prefetch", "pin", "unpin", "evict"]


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A prompt of three chunks and two tokens more."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(prompt_of(1, 3, more=2)))
    return path


def ask(run: Run, node: AtWork, command: str, *words: object) -> Any:
    """What a command answers in JSON."""
    ran = run(command, *words, "--socket", node.socket, "--json")
    assert (ran.code, ran.err) == (0, "")
    return ran.json


def tiers(run: Run, node: AtWork, prompt: Path) -> dict[str, tuple[int, int]]:
    found = ask(run, node, "lookup", prompt)["tiers"]
    return {tier: (each["holds"], each["gives"]) for tier, each in found.items()}


def test_a_lookup_says_which_tiers_hold_how_much(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    assert ask(run, node, "evict", prompt, "--tier", "cpu")["chunks"] == 3
    node.fill(prompt_of(1, 1))
    found = ask(run, node, "lookup", prompt)
    namespace = make_namespace("model-a")
    assert found == {
        "socket": str(node.socket),
        "namespace": namespace.content.hex(),
        "model": "model-a",
        "tokens": 50,
        "page_tokens": 4,
        "restorable": 48,
        "tiers": {"cpu": {"holds": 0, "gives": 0}, "disk": {"holds": 48, "gives": 48}},
    }
    text = run("lookup", prompt, "--socket", node.socket)
    assert (text.code, text.err) == (0, "")
    assert text.lines == [
        "48 of 50 tokens of this prompt can be restored",
        "tier  holds  would give",
        "cpu       0           0",
        "disk     48          48",
    ]
    with node.engine() as cache:
        assert cache.stats().counts.get("lookups", {}) == {}, "it is no request's"


def test_a_prompt_is_brought_to_memory(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    ask(run, node, "evict", prompt, "--tier", "cpu")
    there = ask(run, node, "prefetch", prompt)
    assert (there["destination"], there["there"], there["late"]) == ("cpu", 48, False)
    assert tiers(run, node, prompt) == {"cpu": (48, 48), "disk": (48, 0)}
    assert run("prefetch", prompt, "--socket", node.socket).out == "48 of 50 tokens are on cpu\n"
    refused = run("prefetch", prompt, "--socket", node.socket, "--to", "moon")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "lmcache-core: error: there is no tier 'moon'; this node has cpu, disk\n"


def test_a_prefetch_that_takes_too_long_goes_on(run: Run, tmp_path: Path, prompt: Path) -> None:
    shelf = Stuck()
    path = tmp_path / "slow.sock"
    rules = TierConfig(backend="test", name="slow")
    cpu = CpuConfig(capacity=16 * FRAME_BYTES)
    config = Config(chunk_tokens=CHUNK_TOKENS, page_tokens=PAGE_TOKENS, cpu=cpu, tiers=(rules,), call_timeout=10.0)
    node = Node(config, [shelf])
    node.servers.append(NodeServer(node, str(path)))
    with Cache(DirectClient(node, owns=True), make_namespace("model-a")) as cache:
        tokens = prompt_of(1, 3)
        assert cache.store(tokens, View(len(tokens), seed=1)).wait(10)
        cache.evict(tokens, ["cpu"])
        late = run("prefetch", prompt, "--socket", path, "--timeout", "50ms")
        assert (late.code, late.out) == (1, "it is not all on cpu within 50ms; it goes on\n")
        assert cache.lookup(tokens).tiers == {"slow": 48}
        at_once = run("prefetch", prompt, "--socket", path, "--timeout", "0")
        assert (at_once.code, at_once.out) == (1, "it is not all on cpu within 0s; it goes on\n")
        shelf.go_on.set()
        until(lambda: cache.lookup(tokens).tiers == {"cpu": 48})


class Stuck(Shelf):
    """Reads wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        await asyncio.to_thread(self.go_on.wait)
        return await super().read(keys, into)


def test_a_pin_outlives_its_command_and_unpin_undoes_it(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    assert ask(run, node, "pin", prompt)["pinned"] == 48
    with node.engine() as cache:
        until(lambda: all("pin" not in each.name for each in cache.client.clients()))  # type: ignore[attr-defined]
        assert cache.stats().pinned == 3
    kept = ask(run, node, "evict", prompt)
    assert (kept["chunks"], kept["left"]) == (0, 48)
    said = run("evict", prompt, "--socket", node.socket)
    assert said.out == "0 chunks evicted; 48 tokens stay, pinned or in use\n"
    assert ask(run, node, "pin", prompt)["pinned"] == 48
    undone = [ask(run, node, "unpin", prompt) for _ in range(3)]
    assert [(each["unpinned"], each["left"]) for each in undone] == [(0, 1), (48, 0), (0, 0)]
    for _ in range(3):
        ask(run, node, "pin", prompt)
    assert [run("unpin", prompt, "--socket", node.socket).out for _ in range(4)] == [
        "0 of 50 tokens are pinned no longer; this prompt is still pinned 2 times\n",
        "0 of 50 tokens are pinned no longer; this prompt is still pinned once\n",
        "48 of 50 tokens are pinned no longer\n",
        "this prompt was not pinned by `lmcache-core pin`\n",
    ]
    gone = ask(run, node, "evict", prompt)
    assert (gone["chunks"], gone["left"]) == (3, 0)
    assert tiers(run, node, prompt) == {"cpu": (0, 0), "disk": (0, 0)}


def test_all_pins_of_commands_can_be_undone_without_the_prompts(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3), prompt_of(2, 1))
    with node.engine() as cache:
        cache.pin(prompt_of(2, 1))
        ask(run, node, "pin", prompt)
        assert cache.stats().pinned == 4
        assert ask(run, node, "unpin", "--all") == {"socket": str(node.socket), "unpinned_chunks": 3}
        assert cache.stats().pinned == 1, "an engine's own pins are its own"
    assert run("unpin", "--socket", node.socket).code == 2
    assert run("unpin", prompt, "--all", "--socket", node.socket).code == 2


def test_a_pin_of_nothing_is_a_problem(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(2, 1))
    pinned = run("pin", prompt, "--socket", node.socket)
    assert (pinned.code, pinned.out) == (1, "")
    assert pinned.err == "nothing of this prompt is there to be pinned\n"


def test_a_prefetch_of_nothing_is_a_problem(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(2, 1))
    brought = run("prefetch", prompt, "--socket", node.socket)
    assert (brought.code, brought.out) == (1, "")
    assert brought.err == "nothing of this prompt is there to be brought to cpu\n"


def test_a_frozen_node_stores_nothing_until_it_is_told_to(run: Run, node: AtWork) -> None:
    node.fill(prompt_of(1, 1))
    assert ask(run, node, "freeze") == {"socket": str(node.socket), "frozen": True}
    with node.engine() as cache:
        assert cache.store(prompt_of(2, 1), View(16, seed=2)).dropped == 16
        assert cache.lookup(prompt_of(1, 1)).tokens == 16
        assert ask(run, node, "status")["frozen"]
        assert ask(run, node, "freeze", "--off") == {"socket": str(node.socket), "frozen": False}
        assert cache.store(prompt_of(2, 1), View(16, seed=2)).stored == 16


def test_a_drained_process_has_written_everything_and_ends(run: Run, process: AtWork) -> None:
    with process.engine() as cache:
        cache.store(prompt_of(1, 3), View(48, seed=1))
        assert ask(run, process, "drain") == {
            "socket": str(process.socket),
            "written": True,
            "ends": True,
        }
    until(lambda: not process.socket.exists())
    assert len(list(inspect_path(process.disk).entries())) == 3
    again = run("drain", "--socket", process.socket)
    assert again.code == 1
    assert f"there is no node at {process.socket}; start it with: lmcache-core serve --socket" in again.err


def test_a_drained_engine_goes_on_frozen(run: Run, embedded: AtWork) -> None:
    embedded.fill(prompt_of(1, 1))
    drained = ask(run, embedded, "drain", "--timeout", "5s")
    assert (drained["written"], drained["ends"]) == (True, False)
    assert run("drain", "--socket", embedded.socket).out == (
        f"the node at {embedded.socket} has written everything; it stays frozen inside its engine (process "
        f"{embedded.pid}) until: lmcache-core freeze --off --socket {embedded.socket}\n"
    )
    assert ask(run, embedded, "status")["frozen"]


# Clear


def test_clear_asks_a_node_by_its_socket(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    node.fill(prompt_of(1, 2), model="model-b")
    cleared = ask(run, node, "clear", "--namespace", "model-b", "--yes")
    by_tier = [{"tier": name, "chunks": 2, "nbytes": 2 * FRAME_BYTES, "problem": None} for name in ("cpu", "disk")]
    assert cleared == {"chunks": 4, "nbytes": 4 * FRAME_BYTES, "tiers": by_tier}
    assert len(list(inspect_path(node.disk).entries())) == 3
    only = run("clear", "--socket", node.socket, "--tier", "disk", "--yes")
    assert (only.code, only.lines) == (0, ["disk: 3 chunks deleted, 396KiB"])
    assert list(inspect_path(node.disk).entries()) == []
    assert ask(run, node, "lookup", prompt, "--namespace", "model-a")["restorable"] == 48
    refused = run("clear", "--socket", node.socket, "--tier", "dsk", "--yes")
    assert (refused.code, refused.err) == (
        1,
        "lmcache-core: error: there is no tier 'dsk'; this node has cpu, disk\n",
    )


@pytest.mark.parametrize("by", ["PATH", "--config"])
def test_clear_of_a_disk_asks_its_owner_where_that_can_be_reached(
    run: Run, node: AtWork, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    node.fill(prompt_of(1, 3))
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(settings(node.disk, socket=str(node.socket))))
    if by == "PATH":
        monkeypatch.setenv("LMCACHE_CORE_CONFIG", str(file))
        cleared = run("clear", node.disk, "--yes")
        assert (cleared.code, cleared.err, cleared.lines) == (0, "", ["disk: 3 chunks deleted, 396KiB"])
        assert tiers(run, node, prompt) == {"cpu": (48, 48), "disk": (0, 0)}
    else:
        cleared = run("clear", "--config", file, "--yes")
        lines = ["cpu: 3 chunks deleted, 396KiB", "disk: 3 chunks deleted, 396KiB"]
        assert (cleared.code, cleared.err, cleared.lines) == (0, "", lines)
        assert tiers(run, node, prompt) == {"cpu": (0, 0), "disk": (0, 0)}
    assert list(inspect_path(node.disk).entries()) == []


def test_a_node_without_the_configuration_has_one_disk_and_knows_which(run: Run, process: AtWork) -> None:
    process.fill(prompt_of(1, 1))
    os.environ["LMCACHE_CORE_CONNECT"] = str(process.socket)
    try:
        cleared = run("clear", process.disk, "--yes")
    finally:
        del os.environ["LMCACHE_CORE_CONNECT"]
    assert (cleared.code, cleared.lines) == (0, ["disk: 1 chunks deleted, 132KiB"])


def test_an_owner_who_is_another_than_the_node_is_left_alone(run: Run, process: AtWork, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with Cache.open(settings(other), make_namespace("model-a")) as cache:
        assert cache.store(prompt_of(1, 1), View(16, seed=1)).wait(10)
        file = tmp_path / "other.yaml"
        file.write_text(json.dumps(settings(other, socket=str(process.socket))))
        refused = run("clear", "--config", file, "--yes")
        assert (refused.code, refused.out) == (1, "")
        assert f"other is in use by process {os.getpid()} " in refused.err
        assert cache.lookup(prompt_of(1, 1)).tiers == {"cpu": 16}


def test_a_tier_that_is_only_read_is_left_alone(run: Run, tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    fill(seed, [prompt_of(2, 1)], "model-a")
    config = settings(tmp_path / "disk", seed, socket=str(tmp_path / "s"))
    config["tiers"][1]["write"] = "never"
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(config))
    with Cache.open(config, make_namespace("model-a")) as cache:
        assert cache.store(prompt_of(1, 1), View(16, seed=1)).wait(10)
        cleared = run("clear", "--config", file, "--yes")
        assert cleared.code == 1
        assert cleared.lines == ["cpu: 1 chunks deleted, 132KiB", "disk: 1 chunks deleted, 132KiB"]
        assert cleared.err == "seed: not cleared: it is only read (write: never); clear it where it is written\n"
        assert cache.lookup(prompt_of(2, 1)).tiers == {"seed": 16}


def test_a_tier_that_the_node_does_not_have_is_an_error(run: Run, process: AtWork, tmp_path: Path) -> None:
    process.fill(prompt_of(1, 1))
    file = tmp_path / "more.yaml"
    file.write_text(json.dumps(settings(process.disk, tmp_path / "more", socket=str(process.socket))))
    refused = run("clear", "--config", file, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "lmcache-core: error: there is no tier 'more'; this node has cpu, disk\n"
    assert len(list(inspect_path(process.disk).entries())) == 1


def test_a_configuration_of_the_environment_that_is_wrong_keeps_nobody_from_clearing(
    run: Run, process: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CORE_CONNECT", "/" + 200 * "x")
    process.fill(prompt_of(1, 1))
    refused = run("clear", process.disk, "--yes")
    assert f"{process.disk} is in use by process {process.pid} " in refused.err


@pytest.mark.parametrize("key", ["connect", "socket"])
@pytest.mark.parametrize("only", [[], ["--tier", "cpu"]])
def test_a_configuration_without_tiers_clears_the_node_that_it_names(
    run: Run, tmp_path: Path, key: str, only: list[str]
) -> None:
    config = settings(cpu="4MiB")
    with serving(tmp_path, **config) as (served, path):
        node = AtWork(path, tmp_path, served.process.pid)
        node.fill(prompt_of(1, 3))
        file = tmp_path / "named.yaml"
        file.write_text(json.dumps({key: str(path)}))
        cleared = run("clear", "--config", file, *only, "--yes")
        assert (cleared.code, cleared.err, cleared.lines) == (0, "", ["cpu: 3 chunks deleted, 396KiB"])
        with node.engine() as cache:
            assert cache.lookup(prompt_of(1, 3)).tokens == 0


def test_a_clients_configuration_clears_all_tiers_of_its_node(run: Run, node: AtWork, tmp_path: Path) -> None:
    node.fill(prompt_of(1, 3))
    file = tmp_path / "engine.yaml"
    file.write_text(json.dumps({"connect": str(node.socket)}))
    refused = run("clear", "--config", file, "--tier", "dsk", "--yes")
    assert (refused.code, refused.err) == (1, "lmcache-core: error: there is no tier 'dsk'; this node has cpu, disk\n")
    cleared = run("clear", "--config", file, "--yes")
    lines = ["cpu: 3 chunks deleted, 396KiB", "disk: 3 chunks deleted, 396KiB"]
    assert (cleared.code, cleared.lines) == (0, lines)
    assert list(inspect_path(node.disk).entries()) == []


@pytest.mark.parametrize(
    ("config", "only"),
    [
        ({"connect": "SOCKET"}, []),
        ({"socket": "SOCKET"}, []),
        ({"socket": "SOCKET", "tiers": [{"backend": "disk", "path": "DISK", "capacity": "64MiB"}]}, ["--tier", "cpu"]),
    ],
)
def test_where_the_node_is_not_there_a_clear_of_its_memory_fails(
    run: Run, tmp_path: Path, config: dict[str, Any], only: list[str]
) -> None:
    path = tmp_path / "none.sock"
    file = tmp_path / "named.yaml"
    file.write_text(json.dumps(config).replace("SOCKET", str(path)).replace("DISK", str(tmp_path / "kv")))
    refused = run("clear", "--config", file, *only, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == (
        f"lmcache-core: error: there is no node at {path}, so nothing was cleared: its memory has gone with it, and "
        "what it left on disks is cleared with the node's own configuration, or with: lmcache-core clear PATH\n"
    )


def test_a_configuration_without_anything_that_can_be_cleared(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text(json.dumps({"cpu": {"capacity": "4MiB"}}))
    refused = run("clear", "--config", file, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert f"{file} has no tiers, and names no node with `socket` or `connect`" in refused.err


def test_the_disk_of_a_node_that_has_ended_is_cleared_without_it(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "disk", [prompt_of(1, 3)])
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(settings(tmp_path / "disk", socket=str(tmp_path / "none.sock"))))
    cleared = run("clear", "--config", file, "--yes")
    assert (cleared.code, cleared.lines) == (0, ["disk: 3 chunks deleted, 396KiB"])


def test_a_node_that_does_not_answer_is_not_taken_for_cleared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.cli.running.PATIENCE", 0.1)
    monkeypatch.setenv("LMCACHE_CORE_CALL_TIMEOUT", "50ms")
    fill(tmp_path / "disk", [prompt_of(1, 3)])
    path = tmp_path / "mute.sock"
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(settings(tmp_path / "disk", socket=str(path))))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        refused = run("clear", "--config", file, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert f"the node at {path} does not answer within 100ms" in refused.err
    assert len(list(inspect_path(tmp_path / "disk").entries())) == 3


def test_a_disk_of_the_same_name_elsewhere_is_not_taken_for_the_nodes(
    run: Run, process: AtWork, tmp_path: Path
) -> None:
    process.fill(prompt_of(1, 1))
    other = tmp_path / "elsewhere" / "disk"
    fill(other, [prompt_of(2, 1)])
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(settings(other, socket=str(process.socket))))
    refused = run("clear", "--config", file, "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert f"has a tier 'disk', but not at {other}; clear what the node has with: lmcache-core clear" in refused.err
    assert [len(list(inspect_path(path).entries())) for path in (other, process.disk)] == [1, 1]


def test_what_lies_on_a_tier_that_is_down_is_not_taken_for_cleared(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    fill(disk, [prompt_of(1, 3)])
    (disk / "node.lock").unlink()
    (disk / "node.lock").mkdir()
    path = tmp_path / "s"
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(config := settings(disk, socket=str(path))))
    with Cache.open(config, make_namespace("model-a")):
        cleared = run("clear", "--config", file, "--yes")
    assert (cleared.code, cleared.lines) == (1, ["cpu: 0 chunks deleted, 0B"])
    assert cleared.err.startswith("disk: not cleared: the node could not use it, so what lies there stays")


def test_a_clear_asks_first(run: Run, process: AtWork, monkeypatch: pytest.MonkeyPatch) -> None:
    process.fill(prompt_of(1, 1))
    assert run("clear", "--socket", process.socket).code == 2, "nobody can be asked"
    for answer, code, left in (("n\n", 1, 1), ("y\n", 0, 0)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", stdin)
        cleared = run("clear", "--socket", process.socket)
        assert cleared.code == code
        assert cleared.err == (
            f"the node at {process.socket}:\ncpu: 1 chunks, 132KiB\ndisk: 1 chunks, 132KiB\nDelete them? [y/N] "
        )
        assert len(list(inspect_path(process.disk).entries())) == left


@pytest.mark.parametrize("words", [["--socket", "s", "PATH"], ["PATH", "--config", "f"], ["PATH", "--tier", "disk"]])
def test_clear_is_told_one_thing(run: Run, words: list[str]) -> None:
    assert run("clear", *words, "--yes").code == 2


def test_inspect_of_a_disk_at_work_names_status(run: Run, node: AtWork) -> None:
    node.fill(prompt_of(1, 3))
    shown = run("inspect", node.disk)
    assert shown.code == 0
    assert shown.err == (
        f"in use by process {node.pid}; what it holds now, memory included, and who uses it: lmcache-core status\n"
    )
    assert run("inspect", node.disk, "--json").json["chunks"] == 3


# Which node, which namespace, which prompt


@pytest.mark.parametrize("command", [*COMMANDS_OF_PROMPTS, "freeze", "drain", "status"])
def test_where_no_node_is_it_says_how_to_start_one(run: Run, prompt: Path, tmp_path: Path, command: str) -> None:
    words = [prompt] if command in COMMANDS_OF_PROMPTS else []
    path = tmp_path / "none.sock"
    refused = run(command, *words, "--socket", path)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == (
        f"lmcache-core: error: there is no node at {path}; start it with: lmcache-core serve --socket {path}; or name "
        "the socket of another one with --socket\n"
    )


def test_a_dead_nodes_socket_is_no_node(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert f"there is no node at {path}; start it with" in run("status", "--socket", path).err


def test_a_node_that_does_not_answer_is_said_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.cli.running.PATIENCE", 0.1)
    monkeypatch.setenv("LMCACHE_CORE_CALL_TIMEOUT", "50ms")
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        refused = run("status", "--socket", path)
    assert refused.code == 1
    assert f"the node at {path} does not answer within 100ms" in refused.err


def test_the_socket_is_that_of_the_configuration(run: Run, node: AtWork, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    for key in ("socket", "connect"):
        file.write_text(json.dumps({key: str(node.socket)}))
        assert run("status", "--config", file, "--json").json["socket"] == str(node.socket)


def test_salts_and_adapters_name_other_prompts(run: Run, node: AtWork, prompt: Path, tmp_path: Path) -> None:
    with node.engine(salt="tenant") as cache:
        tokens = prompt_of(1, 3)
        named = cache.prompt(tokens, salt="user", adapter="lora-7")
        assert cache.store(named, View(len(tokens), seed=1)).wait(10)
    file = tmp_path / "tenant.yaml"
    file.write_text(json.dumps({"salt": "tenant", "connect": str(node.socket)}))
    asked = run("lookup", prompt, "--salt", "user", "--adapter", "lora-7", "--config", file, "--json")
    assert asked.json["restorable"] == 48
    for words in (["--salt", "user"], ["--adapter", "lora-7"], []):
        assert run("lookup", prompt, *words, "--config", file, "--json").json["restorable"] == 0
    assert ask(run, node, "lookup", prompt, "--salt", "user", "--adapter", "lora-7")["restorable"] == 0


def test_a_namespace_is_chosen_by_model_or_digest(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    node.fill(prompt_of(1, 1), model="model-b")
    names = {model: make_namespace(model).content.hex() for model in ("model-a", "model-b")}
    for name in ("model-b", names["model-b"][:12], make_namespace("model-b").space(0).hex()):
        assert ask(run, node, "lookup", prompt, "--namespace", name)["restorable"] == 16
    listed = ", ".join(f"{model} ({digest[:12]})" for model, digest in names.items())
    for words, text in (
        ([], f"the node has 2 namespaces; choose one with --namespace: {listed}"),
        (["--namespace", "model-c"], f"there is no namespace 'model-c'; the node has: {listed}"),
    ):
        refused = run("lookup", prompt, *words, "--socket", node.socket)
        assert (refused.code, refused.err) == (1, f"lmcache-core: error: {text}\n")


def test_a_node_that_no_engine_has_used_knows_no_model(run: Run, process: AtWork, prompt: Path) -> None:
    refused = run("lookup", prompt, "--socket", process.socket)
    assert refused.code == 1
    assert refused.err == (
        f"lmcache-core: error: the node at {process.socket} knows of no model yet; an engine must have used it first\n"
    )


def test_what_a_restarted_node_has_on_disk_can_be_brought_to_memory_before_engines_come(
    run: Run, tmp_path: Path, prompt: Path
) -> None:
    config = settings(tmp_path / "disk", cpu="4MiB")
    with serving(tmp_path, **config) as (first, path):
        AtWork(path, tmp_path / "disk", first.process.pid).fill(prompt_of(1, 3))
        assert first.stop() == 0
    with serving(tmp_path, **config) as (second, path):
        node = AtWork(path, tmp_path / "disk", second.process.pid)
        (known,) = ask(run, node, "status")["namespaces"]
        namespace = make_namespace("model-a")
        assert (known["id"], known["model"], known["chunks"]) == (namespace.content.hex(), "model-a", 3)
        assert "unknown" not in run("status", "--socket", path).out
        assert ask(run, node, "prefetch", prompt, "--namespace", "model-a")["there"] == 48
        assert ask(run, node, "lookup", prompt)["tiers"]["cpu"]["holds"] == 48


def test_what_nobody_has_described_is_known_by_its_digest_until_a_configuration_names_it(
    run: Run, tmp_path: Path, prompt: Path
) -> None:
    fill(tmp_path / "disk", [prompt_of(1, 3)], "model-a")
    aside = tmp_path / "aside"
    os.rename(tmp_path / "disk" / "manifests", aside)
    with serving(tmp_path, **settings(tmp_path / "disk", cpu="4MiB")) as (process, path):
        node = AtWork(path, tmp_path / "disk", process.process.pid)
        (known,) = ask(run, node, "status")["namespaces"]
        assert (known["id"], known["model"]) == (make_namespace("model-a").space(0).hex(), None)
        assert "unknown" in run("status", "--socket", path).out
        refused = run("lookup", prompt, "--socket", path)
        assert (refused.code, refused.out) == (1, "")
        assert refused.err == (
            f"lmcache-core: error: no engine has told this node what {known['id'][:12]} is of since it started; name "
            "the configuration that has the node's tiers with --config\n"
        )
        os.rename(aside, tmp_path / "disk" / "manifests")
        file = path.with_name(f"{path.name}.yaml")  # the node's own
        assert ask(run, node, "prefetch", prompt, "--config", file, "--namespace", "model-a")["there"] == 48
        assert ask(run, node, "lookup", prompt)["tiers"]["cpu"]["holds"] == 48, "the node knows it from now on"


def test_a_namespace_without_chunks_is_chosen_only_by_its_name(run: Run, node: AtWork, prompt: Path) -> None:
    node.fill(prompt_of(1, 3))
    node.engine("model-b").close()
    assert ask(run, node, "lookup", prompt)["model"] == "model-a"
    assert ask(run, node, "lookup", prompt, "--namespace", "model-b")["restorable"] == 0
    ask(run, node, "clear", "--yes")
    assert "the node has 2 namespaces; choose one" in run("lookup", prompt, "--socket", node.socket).err


def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    for text in ("[1, 20,\n300]", "1 20\n300\n", " 1\t20 300"):
        file.write_text(text)
        assert read_tokens(str(file)) == [1, 20, 300]
        with file.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert read_tokens("-") == [1, 20, 300]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no tokens"),
        ("[]", "has no tokens"),
        ("[1, 2", "is no JSON"),
        ("[[1]]", r"\[1\] is no token id"),
        ("[true]", "True is no token id"),
        ("[1.5]", "1.5 is no token id"),
        ("[-1]", "-1 is no token id"),
        ("1, 2", "'1,' is no token id"),
        ("4294967296", "'4294967296' is no token id"),
        ("what is this", "'what' is no token id; write token ids as a JSON list or .* text needs --tokenizer DIR"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(LMCacheError, match=message):
        read_tokens(str(file))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\xff\xfe")
    with pytest.raises(LMCacheError, match="is no UTF-8 text"):
        read_tokens(str(tmp_path / "tokens"))


def test_text_is_tokenized(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is missing")
    pytest.importorskip("transformers", reason="transformers is missing")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "text").write_text("one two three two")
    assert read_tokens(str(tmp_path / "text"), str(directory)) == [1, 2, 0, 2]
    with pytest.raises(LMCacheError, match="is no directory"):
        read_tokens(str(tmp_path / "text"), str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LMCacheError, match="no tokenizer that can be loaded"):
        read_tokens(str(tmp_path / "text"), str(tmp_path / "empty"))
