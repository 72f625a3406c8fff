"""`lmcache-core copy`."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache
from lmcache_core.cli.alone import SPACE
from tests.cli.conftest import Run
from tests.cli.kv import FRAME_BYTES, View, fill, make_namespace, prompt_of, settings
from tests.servers.redis import lacking, valkey


def write_config(tmp_path: Path, *tiers: dict[str, Any]) -> Path:
    file = tmp_path / "copy.yaml"
    file.write_text(yaml.safe_dump({"cpu": {"capacity": "2MiB"}, "tiers": list(tiers)}))
    return file


def disk(tmp_path: Path, name: str, **more: Any) -> dict[str, Any]:
    settings = {"backend": "disk", "name": name, "path": str(tmp_path / name), "capacity": "64MiB", "min_free": 0}
    return settings | more


def held(path: Path) -> set[tuple[bytes, tuple[bytes, ...], bytes, int]]:
    return {
        (each.stored.key.space, each.stored.pages, each.stored.parent, each.stored.nbytes)
        for each in inspect_path(path).entries()
    }


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A tier `a` that holds five chunks of two models, and an empty one, `b`."""
    fill(tmp_path / "a", [prompt_of(1, 2), prompt_of(2, 1)], "model-a")
    fill(tmp_path / "a", [prompt_of(3, 2)], "model-b")
    return write_config(tmp_path, disk(tmp_path, "a"), disk(tmp_path, "b"))


def copied(run: Run, file: Path, *words: object) -> tuple[int, dict[str, Any]]:
    done = run("copy", file, "--from", "a", "--to", "b", *words, "--json")
    assert done.err == ""
    return done.code, done.json


def test_all_is_copied_and_an_engine_finds_it(run: Run, two: Path, tmp_path: Path) -> None:
    code, told = copied(run, two)
    assert code == 0
    assert told == {
        "from": "a",
        "to": "b",
        "dry_run": False,
        "found": 5,
        "found_nbytes": 5 * FRAME_BYTES,
        "copied": 5,
        "copied_nbytes": 5 * FRAME_BYTES,
        "there": 0,
        "damaged": 0,
        "gone": 0,
        "problem": None,
    }
    assert held(tmp_path / "b") == held(tmp_path / "a")
    assert inspect_path(tmp_path / "b").manifests == inspect_path(tmp_path / "a").manifests
    with Cache.open(settings(tmp_path / "b"), make_namespace("model-a")) as cache:
        view = View(32)
        assert cache.retrieve(prompt_of(1, 2), view).tokens == 32
        assert (view.kv == View(32, seed=0).kv).all()


def test_a_second_run_copies_what_is_missing(run: Run, two: Path, tmp_path: Path) -> None:
    assert copied(run, two, "--model", "model-b")[1]["copied"] == 2
    code, told = copied(run, two)
    assert (code, told["found"], told["copied"], told["there"]) == (0, 5, 3, 2)
    code, told = copied(run, two)
    assert (code, told["found"], told["copied"], told["there"]) == (0, 5, 0, 5)
    assert held(tmp_path / "b") == held(tmp_path / "a")


def test_a_space_is_chosen_by_its_digits(run: Run, two: Path, tmp_path: Path) -> None:
    namespace = make_namespace("model-a")
    code, told = copied(run, two, "--space", namespace.space(0).hex()[:10])
    assert (code, told["copied"]) == (0, 3)
    code, told = copied(run, two, "--space", namespace.content.hex()[:10].upper())
    assert (code, told["copied"], told["there"]) == (0, 0, 3)
    code, told = copied(run, two, "--space", "zz")
    assert (code, told["copied"]) == (1, 0)
    assert "a has no space 'zz'; it has: " in told["problem"]
    code, told = copied(run, two, "--model", "model-c")
    assert (code, told["problem"]) == (1, "a has no model 'model-c'; it has: model-a, model-b")


def test_a_dry_run_makes_nothing(run: Run, two: Path, tmp_path: Path) -> None:
    code, told = copied(run, two, "--dry-run")
    assert (code, told["dry_run"], told["copied"], told["copied_nbytes"]) == (0, True, 5, 5 * FRAME_BYTES)
    assert not (tmp_path / "b").exists()
    assert copied(run, two, "--model", "model-b")[1]["copied"] == 2
    said = run("copy", two, "--from", "a", "--to", "b", "--dry-run")
    assert said.out == "a to b: 3 of 5 chunks would be copied, 396KiB, 2 were there already\n"
    assert len(held(tmp_path / "b")) == 2


def test_damage_is_not_copied(run: Run, two: Path, tmp_path: Path) -> None:
    entry = next(inspect_path(tmp_path / "a").entries())
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + 8192)
        byte = file.read(1)
        file.seek(entry.offset + 8192)
        file.write(bytes([byte[0] ^ 1]))
    code, told = copied(run, two)
    assert (code, told["copied"], told["damaged"]) == (1, 4, 1)
    assert held(tmp_path / "b") == {each for each in held(tmp_path / "a") if each[1] != entry.stored.pages}


def test_a_target_without_room_ends_it(run: Run, two: Path, tmp_path: Path) -> None:
    fill(tmp_path / "a", [prompt_of(4, 5)])
    file = write_config(tmp_path, disk(tmp_path, "a"), disk(tmp_path, "b", capacity="1MiB"))
    code, told = copied(run, file, "--concurrency", "1")
    assert (code, told["found"], told["copied"], told["problem"]) == (1, 10, 7, "b is full")
    assert len(held(tmp_path / "b")) == (1 << 20) // FRAME_BYTES == 7


def test_tiers_that_cannot_be_used(run: Run, two: Path, tmp_path: Path) -> None:
    file = write_config(
        tmp_path,
        disk(tmp_path, "a"),
        disk(tmp_path, "b", write="never"),
        {"backend": "redis", "url": "redis://h"},
        {"backend": "cpu", "name": "ram"},
    )
    assert run("copy", file, "--from", "a", "--to", "a").code == 2
    assert run("copy", file, "--from", "a").code == 2
    assert run("copy", file, "--from", "a", "--to", "redis", "--rate", "x").code == 2
    said = run("copy", file, "--from", "a", "--to", "c")
    assert (said.code, said.err) == (1, f"lmcache-core: error: there is no tier 'c'; {file} has a, b, redis, ram\n")
    said = run("copy", file, "--from", "a", "--to", "b")
    assert said.err == "lmcache-core: error: b is only read (write: never); it cannot be copied to\n"
    said = run("copy", file, "--from", "ram", "--to", "a")
    assert said.code == 1
    assert "ram cannot be copied from: backend cpu does not list what it holds" in said.err
    with Cache.open(settings(tmp_path / "a"), make_namespace()):
        said = run("copy", file, "--from", "a", "--to", "redis")
        assert said.code == 1
        assert f"a is in use by process {os.getpid()}" in said.err


def test_chunks_are_not_copied_where_they_could_not_be_read(run: Run, two: Path, tmp_path: Path) -> None:
    key = base64.b64encode(bytes(range(32))).decode()
    file = write_config(tmp_path, disk(tmp_path, "a"), {"backend": "cpu", "name": "b", "cipher": {"key": key}})
    said = run("copy", file, "--from", "a", "--to", "b")
    assert (said.code, said.err) == (
        1,
        "lmcache-core: error: chunks are copied as they are stored, and what a stores b could not read: write the same "
        "codec and cipher for both\n",
    )


def test_a_rate_is_kept_to(run: Run, two: Path) -> None:
    started = time.monotonic()
    assert copied(run, two, "--rate", 5 * FRAME_BYTES, "--concurrency", "2")[1]["copied"] == 5
    assert time.monotonic() - started >= 0.8  # the last begins after four fifths of a second


@pytest.mark.skipif(bool(lacking("valkey")), reason=lacking("valkey") or "-")
def test_ctrl_c_leaves_what_a_second_run_goes_on_with(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "a", [prompt_of(number, 4) for number in range(6)])
    with valkey(tmp_path / "valkey") as server:
        file = write_config(tmp_path, disk(tmp_path, "a"), {"backend": "redis", "name": "b", "url": server.url})
        words = ["copy", str(file), "--from", "a", "--to", "b", "--rate", str(12 * FRAME_BYTES)]
        with subprocess.Popen(
            [sys.executable, "-m", "lmcache_core", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            until = time.monotonic() + 30
            while server.run("DBSIZE") < 4 and time.monotonic() < until:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert said.startswith("interrupted: a to b: ")
        there = len(server.run("KEYS", "lmcache:*:*"))
        assert 3 <= there < 24
        code, told = copied(run, file)
        assert (code, told["found"], told["there"], told["copied"]) == (0, 24, there, 24 - there)
        keys = {
            f"lmcache:{each.stored.key.space.hex()}:{each.stored.key.page.hex()}".encode()
            for each in inspect_path(tmp_path / "a").entries()
        }
        assert set(server.run("KEYS", "lmcache:*:*")) == keys
        assert not any(SPACE.hex().encode() in key for key in keys)
        assert {len(server.run("GET", key)) for key in keys} == {FRAME_BYTES}


def shared_directory(tmp_path: Path) -> dict[str, Any]:
    return {"backend": "nfs", "name": "shared", "path": str(tmp_path / "shared"), "must_be_mounted": False}


def moved(run: Run, file: Path, source: str, target: str, *words: object) -> dict[str, Any]:
    done = run("copy", file, "--from", source, "--to", target, *words, "--json")
    assert done.err == ""
    told: dict[str, Any] = done.json
    return told


def test_what_went_to_a_shared_directory_comes_back(run: Run, two: Path, tmp_path: Path) -> None:
    """A shared tier knows keys and sizes alone: the rest is what the frames say of themselves."""
    file = write_config(tmp_path, disk(tmp_path, "a"), disk(tmp_path, "b"), shared_directory(tmp_path))
    assert moved(run, file, "a", "shared")["copied"] == 5
    assert moved(run, file, "shared", "b", "--dry-run")["copied_nbytes"] == 5 * FRAME_BYTES
    assert moved(run, file, "shared", "b", "--model", "model-b")["copied"] == 2
    told = moved(run, file, "shared", "b")
    assert (told["found"], told["there"], told["copied"], told["damaged"]) == (5, 2, 3, 0)
    assert held(tmp_path / "b") == held(tmp_path / "a")
    assert inspect_path(tmp_path / "b").manifests == inspect_path(tmp_path / "a").manifests


def test_what_is_wrong_in_a_shared_directory_stays_there(run: Run, two: Path, tmp_path: Path) -> None:
    """One chunk in another one's place, one that is cut, one of which a byte is another, and what is no chunk."""
    file = write_config(tmp_path, disk(tmp_path, "a"), disk(tmp_path, "b"), shared_directory(tmp_path))
    assert moved(run, file, "a", "shared")["copied"] == 5
    chunks = sorted(path for path in (tmp_path / "shared").glob("*/???/*") if path.is_file())
    assert len(chunks) == 5
    chunks[0].write_bytes(chunks[1].read_bytes())
    chunks[2].write_bytes(chunks[2].read_bytes()[:-4096])
    damaged = bytearray(chunks[3].read_bytes())
    damaged[-5000] ^= 1
    chunks[3].write_bytes(damaged)
    (chunks[4].parent / "notes").write_text("not a chunk")
    beside = chunks[4].with_name(chunks[4].name[:3] + "0" * 61)
    beside.symlink_to(chunks[4])
    chunks[4].with_name(chunks[4].name[:3] + "1" * 61).mkdir()
    told = moved(run, file, "shared", "b")
    assert (told["found"], told["copied"], told["damaged"]) == (5, 2, 3)
    whole = {(chunk.parent.parent.name, chunk.name) for chunk in (chunks[1], chunks[4])}
    assert {(space.hex(), pages[-1].hex()) for space, pages, _, _ in held(tmp_path / "b")} == whole


@pytest.mark.skipif(bool(lacking("valkey")), reason=lacking("valkey") or "-")
def test_what_went_to_a_server_comes_back(run: Run, two: Path, tmp_path: Path) -> None:
    with valkey(tmp_path / "valkey") as server:
        redis = {"backend": "redis", "name": "server", "url": server.url, "prefix": "kv"}
        file = write_config(tmp_path, disk(tmp_path, "a"), disk(tmp_path, "b"), redis)
        assert moved(run, file, "a", "server")["copied"] == 5
        server.run("SET", "kv:note", "not a chunk")
        server.run("SET", "kv-a:" + "0" * 64 + ":" + "1" * 64, "another prefix")
        server.run("LPUSH", "kv:" + "0" * 64 + ":" + "1" * 64, "not a value")
        server.run("SET", "kv:" + "0" * 64 + ":" + "2" * 64, "not a frame")
        told = moved(run, file, "server", "b")
        assert (told["found"], told["copied"], told["damaged"]) == (6, 5, 1)
        assert held(tmp_path / "b") == held(tmp_path / "a")
        assert inspect_path(tmp_path / "b").manifests == inspect_path(tmp_path / "a").manifests
        assert moved(run, file, "server", "b")["there"] == 5
