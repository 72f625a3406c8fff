"""`lmcache-core bench` and `demo`."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache
from tests.cli.conftest import Run
from tests.cli.kv import fill, make_namespace, prompt_of, settings


def write_config(tmp_path: Path, *tiers: dict[str, Any]) -> Path:
    file = tmp_path / "bench.yaml"
    cpu = {"capacity": "64MiB"}
    file.write_text(yaml.safe_dump({"chunk_tokens": 16, "page_tokens": 4, "cpu": cpu, "tiers": list(tiers)}))
    return file


def rows(run: Run, *words: object) -> tuple[int, dict[str, dict[str, Any]]]:
    done = run("bench", *words, "--json")
    assert done.err == ""
    return done.code, {row["name"]: row for row in done.json["rows"]}


def test_memory_and_tiers_are_measured_and_nothing_stays(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    fill(path, [prompt_of(1, 2)])
    file = write_config(
        tmp_path,
        {"backend": "disk", "path": str(path), "capacity": "1GiB", "min_free": 0, "admit": "second-touch"},
        {"backend": "cpu", "name": "second", "write": "evict"},
    )
    code, found = rows(run, file, "--size", "16MiB")
    assert code == 0
    names = ["memcpy", "cpu.store", "cpu.retrieve", "cpu.lookup"]
    assert list(found) == [*names, "disk.store", "disk.retrieve", "second.store", "second.retrieve"]
    assert {tuple(row) for row in found.values()} == {("name", "value", "unit", "limit", "ratio", "note")}
    for name, row in found.items():
        assert row["value"] > 0
        assert row["unit"] == ("µs" if name == "cpu.lookup" else "GB/s")
        if name.startswith("second") or name == "cpu.lookup":
            assert (row["limit"], row["ratio"]) == (None, None)
        else:
            assert row["ratio"] == pytest.approx(row["value"] / row["limit"])
    assert found["memcpy"]["ratio"] == 1
    assert found["cpu.store"]["limit"] == found["memcpy"]["value"]
    inspected = inspect_path(path)
    assert [len(entry.stored.pages) for entry in inspected.entries()] == [4, 4], "only what was there before"


def test_for_people_it_is_a_table(run: Run, tmp_path: Path) -> None:
    measured = run("bench", write_config(tmp_path), "--size", "4MiB")
    assert measured.code == 0
    assert measured.lines[0].split() == ["measured", "value", "unit", "limit", "ratio", "note"]
    assert [line.split()[0] for line in measured.lines[1:]] == ["memcpy", "cpu.store", "cpu.retrieve", "cpu.lookup"]
    assert measured.lines[1].split()[2:] == ["GB/s", measured.lines[1].split()[1], "1.00", "one", "thread"]


def test_a_tier_that_cannot_be_measured_is_told_and_the_others_are_measured(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = write_config(
        tmp_path,
        {"backend": "disk", "name": "seed", "path": str(tmp_path / "seed"), "capacity": "1GiB", "write": "never"},
        {"backend": "disk", "name": "gone", "path": str(tmp_path / "file" / "kv"), "capacity": "1GiB"},
        {"backend": "disk", "name": "tiny", "path": str(tmp_path / "tiny"), "capacity": "1MiB", "min_free": 0},
        {"backend": "cpu", "name": "ram"},
    )
    code, found = rows(run, file, "--size", "4MiB")
    assert code == 1
    problem = f"disk: path {tmp_path / 'file' / 'kv'} leads through a file; write a directory, or remove that file"
    notes = {name: row["note"] for name, row in found.items() if row["value"] is None}
    assert notes == {
        "seed.store": "not measured: it is only read (write: never)",
        "seed.retrieve": "not measured: it is only read (write: never)",
        "gone.store": f"not measured: {problem}",
        "gone.retrieve": f"not measured: {problem}",
        "tiny.store": "not measured: it is full: measuring would evict chunks",
        "tiny.retrieve": "not measured: it is full: measuring would evict chunks",
    }
    assert found["ram.retrieve"]["value"] > 0
    assert not (tmp_path / "seed").exists()


def test_a_tier_in_use_is_left_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = write_config(tmp_path, {"backend": "disk", "path": str(path), "capacity": "1GiB"})
    with Cache.open(settings(path), make_namespace()):
        code, found = rows(run, file, "--size", "4MiB")
        assert code == 1
        assert "is in use by process" in found["disk.store"]["note"]
        assert len(inspect_path(path).shards) == 1


def test_sizes_that_cannot_be(run: Run, tmp_path: Path) -> None:
    file = write_config(tmp_path)
    assert run("bench", file, "--size", "nonsense").code == 2
    too_small = run("bench", file, "--size", "1MiB")
    assert (too_small.code, too_small.err) == (1, "lmcache-core: error: --size must be at least one chunk, 2MiB\n")
    too_large = run("bench", file, "--size", "1GiB")
    assert too_large.code == 1
    assert "measure with a smaller --size" in too_large.err


# Demo


def test_the_demo_is_handed_its_arguments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def run_demo(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 1

    fake = types.ModuleType("lmcache_core.demo")
    fake.__dict__.update(add_arguments=lambda parser: parser.add_argument("--prompt"), run_demo=run_demo)
    monkeypatch.setitem(sys.modules, "lmcache_core.demo", fake)
    assert run("demo", "--prompt", "hello").code == 1
    assert seen[0].prompt == "hello"


def test_a_demo_without_its_packages_says_how_to_get_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "install it with: pip install 'lmcache-core[demo]'"
    monkeypatch.setitem(sys.modules, "lmcache_core.demo", None)
    lacking = run("demo")
    assert (lacking.code, lacking.out) == (1, "")
    assert lacking.err == f"lmcache-core: error: the demo lacks the module 'lmcache_core.demo'; {advice}\n"

    def run_demo(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    fake = types.ModuleType("lmcache_core.demo")
    fake.__dict__.update(add_arguments=lambda parser: None, run_demo=run_demo)
    monkeypatch.setitem(sys.modules, "lmcache_core.demo", fake)
    lacking = run("demo")
    assert (lacking.code, lacking.err) == (1, f"lmcache-core: error: the demo lacks the module 'torch'; {advice}\n")
