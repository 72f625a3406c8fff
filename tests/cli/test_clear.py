"""`lmcache-core clear`: everything that was asked for is gone, nothing else, and never under a live owner."""

from __future__ import annotations

import io
import itertools
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache
from lmcache_core.cli import clear
from tests.cli.conftest import Run
from tests.cli.kv import FRAME_BYTES, fill, make_namespace, prompt_of, settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four chunks of one model, two of another."""
    path = tmp_path / "kv"
    fill(path, [prompt_of(1, 3), prompt_of(2, 1)], "model-a")
    fill(path, [prompt_of(1, 2)], "model-b")
    return path


def chunks(path: Path) -> int:
    return len(list(inspect_path(path).entries()))


def found(path: Path, model: str, tokens: list[int]) -> int:
    """Tokens that a new engine finds."""
    with Cache.open(settings(path), make_namespace(model)) as cache:
        return cache.lookup(tokens).tokens


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    stdin = io.StringIO(text)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)


def test_all_is_gone_and_the_space_is_given_back(run: Run, path: Path) -> None:
    cleared = run("clear", path, "--yes", "--json")
    assert (cleared.code, cleared.err) == (0, "")
    size = 6 * FRAME_BYTES
    tier = {"tier": str(path), "chunks": 6, "nbytes": size, "problem": None}
    assert cleared.json == {"chunks": 6, "nbytes": size, "tiers": [tier]}
    assert chunks(path) == 0
    assert list(path.rglob("segment-*")) == []
    assert found(path, "model-a", prompt_of(1, 3)) == 0
    again = run("clear", path, "--yes")
    assert (again.code, again.out) == (0, f"{path}: 0 chunks deleted, 0B\n")


def test_a_cleared_path_can_be_used_again(run: Run, path: Path) -> None:
    assert run("clear", path, "--yes").code == 0
    fill(path, [prompt_of(5, 2)], "model-a")
    assert found(path, "model-a", prompt_of(5, 2)) == 32


def test_one_namespace_alone(run: Run, path: Path) -> None:
    digits = make_namespace("model-b").content.hex()[:12]
    cleared = run("clear", path, "--namespace", digits.upper(), "--yes")
    assert (cleared.code, cleared.out) == (0, f"{path}: 2 chunks deleted, 264KiB\n")
    assert found(path, "model-b", prompt_of(1, 2)) == 0
    assert found(path, "model-a", prompt_of(1, 3)) == 48
    assert found(path, "model-a", prompt_of(2, 1)) == 16


def test_a_namespace_by_the_digest_of_its_space(run: Run, path: Path) -> None:
    space = make_namespace("model-b").space(0).hex()
    assert run("clear", path, "--namespace", space, "--yes", "--json").json["chunks"] == 2
    assert chunks(path) == 4


def test_a_namespace_that_is_not_there(run: Run, path: Path) -> None:
    refused = run("clear", path, "--namespace", "zz", "--yes")
    assert (refused.code, refused.out) == (1, "")
    ids = [make_namespace(model).content.hex()[:16] for model in ("model-a", "model-b")]
    assert refused.err == f"lmcache-core: error: there is no namespace 'zz'; stored are: {', '.join(ids)}\n"
    assert chunks(path) == 6


def test_a_prefix_of_two_namespaces(run: Run, path: Path) -> None:
    first = make_namespace("model-a").content.hex()[:2]
    numbers = (number for number in itertools.count() if make_namespace(str(number)).content.hex()[:2] == first)
    fill(path, [prompt_of(1, 1)], other := str(next(numbers)))
    refused = run("clear", path, "--namespace", first, "--yes")
    assert refused.code == 1
    assert f"'{first}' stands for 2 namespaces; write more digits of one of" in refused.err
    for model in ("model-a", other):
        listed = make_namespace(model).content.hex()[:16]
        assert listed in refused.err
        assert listed in run("inspect", path).out
    assert chunks(path) == 7


def test_one_namespace_by_the_name_of_its_model(run: Run, path: Path) -> None:
    assert run("clear", path, "--namespace", "model-b", "--yes", "--json").json["chunks"] == 2
    assert found(path, "model-a", prompt_of(1, 3)) == 48


def test_an_empty_name_is_no_namespace(run: Run, path: Path) -> None:
    """What a shell makes of a variable that is not set."""
    refused = run("clear", path, "--namespace", "", "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "an empty text names no namespace" in refused.err
    assert chunks(path) == 6


def test_a_live_owner_is_named_and_left_alone(run: Run, path: Path) -> None:
    with Cache.open(settings(path), make_namespace("model-a")) as cache:
        (shard,) = inspect_path(path).shards
        refused = run("clear", path, "--yes")
        assert (refused.code, refused.out) == (1, "")
        assert refused.err == (
            f"lmcache-core: error: {path} is in use by process {os.getpid()} (shard {shard.name}); "
            "stop that process, or clear the cache from it (a node with a socket: lmcache-core clear --socket PATH)\n"
        )
        assert cache.lookup(prompt_of(1, 3)).tokens == 48
        assert [each.name for each in inspect_path(path).shards] == [shard.name]
    assert chunks(path) == 6


def test_an_owner_whom_the_system_does_not_show_is_left_alone_too(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cache.open(settings(path), make_namespace("model-a")) as cache:
        (lock,) = path.glob("*/lock")
        lock.write_text("12345-abcdef")  # as from another container: not of this process
        monkeypatch.setattr(clear, "_refuse_if_in_use", lambda target, found: None)
        refused = run("clear", path, "--yes", "--json")
        assert refused.code == 1
        assert "is in use by process 12345" in refused.json["tiers"][0]["problem"]
        assert refused.json["chunks"] == 0
        assert cache.lookup(prompt_of(1, 3)).tokens == 48
    assert chunks(path) == 6


def test_what_cannot_be_read_is_no_owner(run: Run, path: Path) -> None:
    """Neither the log of another version, nor what somebody has put there."""
    crc = zlib.crc32(b"KVLOG\r\n\0" + (99).to_bytes(4, "little"))
    (path / ("a" * 16)).mkdir()
    (path / ("a" * 16) / "log").write_bytes(b"KVLOG\r\n\0" + struct.pack("<II", 99, crc))
    (path / ("a" * 16) / "lock").write_text("12345-abcdef")
    (path / ("b" * 16) / "log").mkdir(parents=True)
    os.mkdir(path / ("c" * 16))
    os.mkfifo(path / ("c" * 16) / "lock")
    states = {line.split()[0]: line.split()[2] for line in run("inspect", path).out.split("\n\n")[0].splitlines()}
    assert [states[letter * 16] for letter in "abc"] == ["unreadable"] * 3
    readable = {each["name"]: each["readable"] for each in run("inspect", path, "--json").json["shards"]}
    assert [readable[letter * 16] for letter in "abc"] == [False] * 3
    cleared = run("clear", path, "--yes", "--json")
    assert (cleared.code, cleared.json["chunks"], cleared.json["tiers"][0]["problem"]) == (0, 6, None)
    assert cleared.err == f"{path}: left as they are, since they cannot be read: {', '.join(c * 16 for c in 'abc')}\n"
    assert chunks(path) == 0
    assert (path / ("a" * 16) / "log").exists()


def test_nobody_is_asked_where_nobody_is(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    refused = run("clear", path)
    assert refused.code == 2
    assert refused.err.endswith("error: nobody can be asked here; add --yes\n")
    assert chunks(path) == 6


@pytest.mark.parametrize(
    ("text", "code", "left"), [("y\n", 0, 0), ("Yes\n", 0, 0), ("n\n", 1, 6), ("\n", 1, 6), ("", 1, 6)]
)
def test_a_person_is_asked(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, left: int
) -> None:
    answer(monkeypatch, text)
    asked = run("clear", path, "--json")
    assert asked.code == code
    assert asked.err == f"{path}: 6 chunks, 792KiB\nDelete them? [y/N] "
    assert asked.out == "" if left else asked.json["chunks"] == 6
    assert chunks(path) == left


def test_a_directory_without_a_cache_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cleared = run("clear", tmp_path / "empty", "--yes")
    assert (cleared.code, cleared.out) == (0, f"{tmp_path / 'empty'}: 0 chunks deleted, 0B\n")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_path_that_is_not_there(run: Run, tmp_path: Path) -> None:
    refused = run("clear", tmp_path / "nope", "--yes")
    assert refused.code == 1
    assert refused.err == (
        f"lmcache-core: error: {tmp_path / 'nope'} is no directory; name the `path` of a disk tier\n"
    )
    assert not (tmp_path / "nope").exists()


@pytest.mark.parametrize("words", [[], ["/kv", "--config", "/some.yaml"]])
def test_a_path_or_a_configuration_and_not_both(run: Run, words: list[str]) -> None:
    refused = run("clear", *words, "--yes")
    assert refused.code == 2
    assert refused.err.endswith("error: name either PATH or --config FILE, or --socket PATH for a node at work\n")


def write_config(tmp_path: Path, *tiers: dict[str, Any]) -> Path:
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump({"tiers": list(tiers)}))
    return file


def test_all_tiers_of_a_configuration(run: Run, path: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    fill(paths[0], [prompt_of(3, 2)])
    fill(paths[1], [prompt_of(4, 1)])
    file = write_config(
        tmp_path,
        {"backend": "disk", "path": str(path), "capacity": "64MiB"},
        {"backend": "disk", "name": "striped", "path": [str(each) for each in paths], "capacity": "64MiB"},
        {"backend": "disk", "name": "new", "path": str(tmp_path / "new"), "capacity": "64MiB"},
    )
    cleared = run("clear", "--config", file, "--yes", "--json")
    assert cleared.code == 0
    assert {each["tier"]: each["chunks"] for each in cleared.json["tiers"]} == {"disk": 6, "striped": 3, "new": 0}
    assert [chunks(each) for each in (path, *paths)] == [0, 0, 0]
    assert not (tmp_path / "new").exists()


def test_tiers_that_cannot_be_cleared_are_told(run: Run, path: Path, tmp_path: Path) -> None:
    fill(tmp_path / "seed", [prompt_of(3, 2)])
    file = write_config(
        tmp_path,
        {"backend": "disk", "path": str(path), "capacity": "64MiB"},
        {"backend": "disk", "name": "seed", "path": str(tmp_path / "seed"), "capacity": "1GiB", "write": "never"},
        {"backend": "cpu", "name": "ram", "capacity": "64MiB"},
    )
    cleared = run("clear", "--config", file, "--yes")
    assert cleared.code == 1
    assert cleared.lines == ["disk: 6 chunks deleted, 792KiB"]
    assert cleared.err.splitlines() == [
        "seed: not cleared: it is only read (write: never); clear it where it is written",
        "ram: not cleared: backend cpu cannot list what it holds; clear it there",
    ]
    assert [chunks(each) for each in (path, tmp_path / "seed")] == [0, 2]


def test_one_namespace_of_a_configuration(run: Run, path: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, {"backend": "disk", "path": str(path), "capacity": "64MiB"})
    space = make_namespace("model-a").content.hex()
    cleared = run("clear", "--config", file, "--namespace", space[:10], "--yes", "--json")
    assert (cleared.code, cleared.json["chunks"]) == (0, 4)
    assert chunks(path) == 2


def test_a_medium_that_fails_is_a_problem_and_no_crash(run: Run, path: Path) -> None:
    (path / "node.lock").unlink()
    (path / "node.lock").mkdir()
    failed = run("clear", path, "--yes")
    assert failed.code == 1
    assert "Traceback" not in failed.err
    assert str(path) in failed.err
