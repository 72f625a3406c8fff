"""`lmcache-core clear` of tiers that others store on too: all that is there goes, whoever has stored it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_core import Cache
from tests.cli.conftest import Run
from tests.cli.kv import FRAME_BYTES, View, make_namespace, prompt_of, settings
from tests.node.kv import until


def shared_by_all(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Settings of any process that uses one directory."""
    tier = {"backend": "nfs", "name": "shared", "path": str(tmp_path / "shared"), "must_be_mounted": False}
    return settings() | {"tiers": [tier | more]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A directory with four chunks of one model and two of another, left by processes that have ended."""
    for model, prompts in (("model-a", [prompt_of(1, 3), prompt_of(2, 1)]), ("model-b", [prompt_of(1, 2)])):
        with Cache.open(shared_by_all(tmp_path), make_namespace(model)) as cache:
            for tokens in prompts:
                assert cache.store(tokens, View(len(tokens), seed=1)).wait(10)
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump(shared_by_all(tmp_path)))
    assert left(tmp_path) == 6
    return file


def left(tmp_path: Path) -> int:
    return sum(path.is_file() for path in (tmp_path / "shared").glob("*/???/*"))


def test_all_that_is_there_goes(run: Run, file: Path, tmp_path: Path) -> None:
    cleared = run("clear", "--config", file, "--yes")
    assert (cleared.code, cleared.out, cleared.err) == (0, "shared: 6 chunks deleted, 792KiB\n", "")
    assert left(tmp_path) == 0
    assert run("clear", "--config", file, "--yes").out == "shared: 0 chunks deleted, 0B\n"


def test_one_model_alone(run: Run, file: Path, tmp_path: Path) -> None:
    cleared = run("clear", "--config", file, "--namespace", "model-b", "--yes", "--json")
    assert (cleared.code, cleared.json["chunks"], cleared.json["nbytes"]) == (0, 2, 2 * FRAME_BYTES)
    assert left(tmp_path) == 4
    refused = run("clear", "--config", file, "--namespace", "model-b", "--yes")
    assert refused.code == 1
    content = make_namespace("model-a").content.hex()[:16]
    assert refused.err == f"lmcache-core: error: there is no namespace 'model-b'; stored are: {content}\n"
    assert run("clear", "--config", file, "--namespace", content, "--yes").out == "shared: 4 chunks deleted, 528KiB\n"
    assert left(tmp_path) == 0


def test_a_person_is_told_what_there_is(run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("no\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    asked = run("clear", "--config", file)
    assert (asked.code, asked.out) == (1, "")
    assert asked.err.splitlines()[0] == "shared: 6 chunks, 792KiB"
    assert left(tmp_path) == 6


def test_a_tier_that_is_only_read_stays(run: Run, file: Path, tmp_path: Path) -> None:
    file.write_text(yaml.safe_dump(shared_by_all(tmp_path, write="never")))
    cleared = run("clear", "--config", file, "--yes")
    assert (cleared.code, cleared.out) == (1, "")
    assert left(tmp_path) == 6


def test_a_tier_that_cannot_be_reached_is_a_problem(run: Run, file: Path, tmp_path: Path) -> None:
    file.write_text(yaml.safe_dump(shared_by_all(tmp_path, must_be_mounted=True)))
    cleared = run("clear", "--config", file, "--yes")
    assert cleared.code == 1
    assert cleared.err.startswith(f"shared: not cleared: nfs: {tmp_path / 'shared'}: nothing shared is mounted there")
    assert left(tmp_path) == 6


@pytest.mark.parametrize("model", [None, "model-a"])
def test_a_node_deletes_what_it_knows_and_the_command_what_others_have_stored(
    run: Run, file: Path, tmp_path: Path, model: str | None
) -> None:
    """The node has never asked for what the directory held before. Memory goes too."""
    socket = tmp_path / "node.sock"
    config = shared_by_all(tmp_path) | {"socket": str(socket)}
    file.write_text(yaml.safe_dump(config))
    with Cache.open(config, make_namespace("model-a")) as cache:
        assert cache.store(prompt_of(7, 2), View(2 * 16, seed=1)).wait(10)
        assert left(tmp_path) == 8
        words = [] if model is None else ["--namespace", model]
        cleared = run("clear", "--config", file, "--yes", *words, "--json")
        assert (cleared.code, cleared.err) == (0, "")
        tiers = {each["tier"]: each["chunks"] for each in cleared.json["tiers"]}
        assert tiers == {"cpu": 2, "shared": 8 if model is None else 6}
        assert left(tmp_path) == (0 if model is None else 2)
        until(lambda: cache.lookup(prompt_of(7, 2)).tokens == 0)
        assert cache.lookup(prompt_of(1, 3)).tokens == 0


def test_a_node_alone_cannot_know_that_all_has_gone(run: Run, file: Path, tmp_path: Path) -> None:
    socket = tmp_path / "node.sock"
    with Cache.open(shared_by_all(tmp_path) | {"socket": str(socket)}, make_namespace("model-a")) as cache:
        assert cache.store(prompt_of(7, 2), View(2 * 16, seed=1)).wait(10)
        cleared = run("clear", "--socket", socket, "--yes")
        assert cleared.code == 1
        assert cleared.lines == ["cpu: 2 chunks deleted, 264KiB", "shared: 2 chunks deleted, 264KiB"]
        assert cleared.err == (
            "shared: not cleared: what others have stored there, and this node has not looked up, stays; clear it with "
            "--config and the file that has the tier\n"
        )
        assert left(tmp_path) == 6


def test_the_path_of_a_shared_directory_is_no_disk_cache(run: Run, file: Path, tmp_path: Path) -> None:
    refused = run("clear", tmp_path / "shared", "--yes")
    assert refused.code == 1
    assert "no cache of this user" in refused.err
    assert "with --config" in refused.err
    assert left(tmp_path) == 6
