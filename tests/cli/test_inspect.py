"""`lmcache-core inspect`: says what is there, changes nothing, finds what is damaged, and only that."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk.inspection import InspectedEntry, inspect_path
from lmcache_core import Cache
from lmcache_core.cli.verification import verify_entries
from tests.cli.conftest import Run
from tests.cli.kv import CHUNK_PAGES, FRAME_BYTES, PAGE_BYTES, View, fill, make_namespace, prompt_of, settings

TAIL_BYTES = 4096 + PAGE_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five chunks of one model, of which one is a tail, and two of another."""
    path = tmp_path / "kv"
    fill(path, [prompt_of(1, 3), prompt_of(2, 1, more=5)], "model-a")
    fill(path, [prompt_of(1, 2)], "model-b")
    return path


def entries(path: Path) -> list[InspectedEntry]:
    return list(inspect_path(path).entries())


def flip(entry: InspectedEntry, at: int) -> None:
    with entry.file.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, entry.offset + at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), entry.offset + at)


def everything(path: Path) -> dict[str, Any]:
    """Content and times of all files."""
    return {
        str(file): (file.stat().st_mtime_ns, file.stat().st_size, file.is_file() and file.read_bytes())
        for file in sorted(path.rglob("*"))
    }


def test_json_has_shards_namespaces_sizes_and_ages(run: Run, path: Path) -> None:
    found = run("inspect", path, "--json")
    assert (found.code, found.err) == (0, "")
    told = found.json
    sizes = {"model-a": 4 * FRAME_BYTES + TAIL_BYTES, "model-b": 2 * FRAME_BYTES}
    assert (told["path"], told["chunks"], told["nbytes"]) == (str(path), 7, sum(sizes.values()))
    (shard,) = told["shards"]
    assert (shard["chunks"], shard["nbytes"], shard["in_use"], shard["log_damage"]) == (7, told["nbytes"], False, 0)
    assert shard["owner"].startswith(f"{os.getpid()}-")
    assert shard["file_bytes"] >= told["nbytes"]
    assert time.time() - 60 < shard["first_use"] <= shard["last_use"] <= time.time() + 1
    assert {each["model"]: (each["chunks"], each["nbytes"]) for each in told["namespaces"]} == {
        "model-a": (5, sizes["model-a"]),
        "model-b": (2, sizes["model-b"]),
    }
    first = told["namespaces"][0]
    namespace = make_namespace("model-a")
    assert first["id"] == namespace.content.hex()
    assert first["encoding"] == namespace.encoding_digest.hex()
    assert first["spaces"] == [namespace.space(0).hex()]
    assert (first["dtype"], first["page_tokens"], first["groups"]) == ("float16", 4, ["full"])
    assert told["entries"] is None
    assert told["verification"] is None


def test_for_people_it_is_a_table(run: Run, path: Path) -> None:
    found = run("inspect", path)
    assert (found.code, found.err) == (0, "")
    shard, namespaces = found.out.split("\n\n")
    assert shard.splitlines()[0].split() == [
        *("shard", "owner", "state", "chunks", "stored", "on", "disk", "last", "use", "log", "damage")
    ]
    assert shard.splitlines()[1].split()[1:4] == [str(os.getpid()), "left", "7"]
    rows = [line.split() for line in namespaces.splitlines()[1:]]
    assert [row[:6] for row in rows] == [
        [make_namespace("model-a").content.hex()[:16], "model-a", "float16", "full", "4", "5"],
        [make_namespace("model-b").content.hex()[:16], "model-b", "float16", "full", "4", "2"],
    ]


def test_chunks_are_listed_when_asked_for(run: Run, path: Path) -> None:
    listed = run("inspect", path, "--chunks", "--json").json["entries"]
    assert len(listed) == 7
    assert sorted(each["pages"] for each in listed) == [1, *[CHUNK_PAGES] * 6]
    assert sorted(each["nbytes"] for each in listed) == [TAIL_BYTES, *[FRAME_BYTES] * 6]
    assert [each["used"] for each in listed] == sorted(each["used"] for each in listed)
    assert {Path(each["file"]).parent.parent for each in listed} == {path}
    assert {each["page"] for each in listed} == {entry.stored.key.page.hex() for entry in entries(path)}
    for_people = run("inspect", path, "--chunks")
    assert len(for_people.out.split("\n\n")[2].splitlines()) == 1 + 7


def test_it_changes_nothing_also_while_the_cache_is_in_use(run: Run, path: Path) -> None:
    with Cache.open(settings(path), make_namespace("model-a")) as cache:
        cache.flush(10)
        before = everything(path)
        found = run("inspect", path, "--verify", "--json")
        assert everything(path) == before
        assert (found.code, found.json["chunks"], found.json["verification"]["damaged"]) == (0, 7, [])
        assert found.json["shards"][0]["in_use"] is True
        assert run("inspect", path).lines[1].split()[2:4] == ["in", "use"]


def test_it_takes_no_lock(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("fcntl.lockf", refuse)
    before = everything(path)
    assert run("inspect", path, "--verify", "--chunks", "--json").code == 0
    assert everything(path) == before


def test_a_namespace_without_its_manifest_is_shown_by_its_digest(run: Run, path: Path) -> None:
    space = make_namespace("model-b").space(0).hex()
    (path / "manifests" / f"{space}.json").write_text('{"spaces": "\x1b[31m nonsense"}')
    told = {each["id"]: each for each in run("inspect", path, "--json").json["namespaces"]}
    assert told[space]["model"] is None
    assert told[space]["chunks"] == 2
    assert f"{space[:16]}  unknown" in run("inspect", path).out


def test_a_manifest_of_another_namespace_is_not_believed(run: Run, path: Path) -> None:
    spaces = [make_namespace(model).space(0).hex() for model in ("model-a", "model-b")]
    (path / "manifests" / f"{spaces[1]}.json").write_bytes((path / "manifests" / f"{spaces[0]}.json").read_bytes())
    told = run("inspect", path, "--json").json["namespaces"]
    assert {(each["model"], each["chunks"]) for each in told} == {("model-a", 5), (None, 2)}


def test_verify_reads_every_byte_and_finds_nothing(run: Run, path: Path) -> None:
    told = run("inspect", path, "--verify", "--json")
    assert (told.code, told.json["verification"]) == (0, {"checked": 7, "damaged": []})
    for_people = run("inspect", path, "--verify")
    assert (for_people.code, for_people.lines[-1], for_people.err) == (0, "7 chunks checked, 0 damaged", "")


@pytest.mark.parametrize(
    ("at", "problem"),
    [
        (0, "not a frame: the magic number is missing"),
        (41, "the header is damaged"),
        (4000, "the header is damaged"),
        (4096, "page 0 of shard 0 is damaged"),
        (FRAME_BYTES - 1, "page 3 of shard 0 is damaged"),
    ],
)
def test_verify_finds_one_flipped_bit(run: Run, path: Path, at: int, problem: str) -> None:
    victim = next(entry for entry in entries(path) if entry.stored.nbytes == FRAME_BYTES)
    flip(victim, at)
    told = run("inspect", path, "--verify", "--json")
    assert told.code == 1
    (damaged,) = told.json["verification"]["damaged"]
    assert damaged["page"] == victim.stored.key.page.hex()
    assert (damaged["file"], damaged["offset"]) == (str(victim.file), victim.offset)
    assert damaged["problem"] == problem
    for_people = run("inspect", path, "--verify")
    assert for_people.code == 1
    assert "7 chunks checked, 1 damaged" in for_people.lines
    assert f"{victim.file} at {victim.offset}: chunk {victim.stored.key.page.hex()[:16]}: {problem}" in for_people.lines
    assert run("inspect", path).code == 0, "without --verify nothing is read"


def test_verify_finds_a_whole_frame_that_is_another_chunks(run: Run, path: Path) -> None:
    whole = [entry for entry in entries(path) if entry.stored.nbytes == FRAME_BYTES]
    with whole[0].file.open("r+b") as file:
        content = os.pread(file.fileno(), FRAME_BYTES, whole[1].offset)
        os.pwrite(file.fileno(), content, whole[0].offset)
    (damaged,) = run("inspect", path, "--verify", "--json").json["verification"]["damaged"]
    assert damaged["page"] == whole[0].stored.key.page.hex()


def test_damage_of_a_log_is_told(run: Run, path: Path) -> None:
    log = entries(path)[0].file.with_name("log")
    content = bytearray(log.read_bytes())
    content[content.index(entries(path)[2].stored.key.page)] ^= 1
    log.write_bytes(content)
    told = run("inspect", path, "--verify", "--json")
    assert (told.code, told.json["chunks"], told.json["shards"][0]["log_damage"]) == (1, 6, 1)
    assert told.json["verification"] == {"checked": 6, "damaged": []}


def test_a_chunk_that_goes_meanwhile_is_not_damaged(path: Path) -> None:
    seen = entries(path)
    with Cache.open(settings(path), make_namespace("model-a")) as cache:
        cache.clear()
        tokens = prompt_of(9, 3)  # on the places of those that are gone
        assert cache.store(tokens, View(len(tokens), seed=9)).wait(10)
    assert verify_entries(path, seen, lambda nbytes: None) == []


def test_a_cache_that_is_written_to_meanwhile_is_not_damaged(run: Run, path: Path) -> None:
    config = settings(path)
    config["tiers"][0]["capacity"] = 12 * FRAME_BYTES  # so that places are given to others all the time
    stop = threading.Event()
    with Cache.open(config, make_namespace("model-a")) as cache:

        def churn() -> None:
            number = 10
            while not stop.is_set():
                tokens = prompt_of(number, 3)
                cache.store(tokens, View(len(tokens), seed=number)).wait(10)
                number += 1

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            told = [run("inspect", path, "--verify", "--json") for _ in range(15)]
        finally:
            stop.set()
            thread.join()
    assert [each.code for each in told] == [0] * 15
    moments = {each.json["shards"][0]["last_use"] for each in told}
    assert len(moments) > 1, "nothing was written meanwhile"


def test_memory_is_bounded_by_one_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counted(mmap.mmap):
        def __new__(cls, fileno: int, length: int) -> Counted:
            sizes.append(length)
            return super().__new__(cls, fileno, length)

    monkeypatch.setattr("lmcache_core.cli.verification.mmap.mmap", Counted)
    total = 0

    def advance(nbytes: int) -> None:
        nonlocal total
        total += nbytes

    assert verify_entries(path, entries(path), advance) == []
    assert max(sizes) == FRAME_BYTES
    assert total == 6 * FRAME_BYTES + TAIL_BYTES


def test_a_directory_without_a_cache_is_said_to_be_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = run("inspect", tmp_path / "empty")
    assert (found.code, found.out) == (1, "")
    as_json = run("inspect", tmp_path / "empty", "--json")
    assert (as_json.code, as_json.json["shards"], as_json.err) == (1, [], found.err)
    assert found.err.startswith(f"{tmp_path / 'empty'}: no cache of this user; name the `path` of a disk tier")
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("words", [["inspect"], ["clear", "--yes"]])
def test_another_user_is_told_to_be_the_engines(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def refuse(root: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", root)

    monkeypatch.setattr("lmcache_backends.disk.inspection.shard_names", refuse)
    refused = run(words[0], path, *words[1:])
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == (
        f"lmcache-core: error: disk: {path}: Permission denied; run this as the user that the engine runs as, or as "
        "root\n"
    )


def test_a_progress_bar_is_drawn_for_people_alone(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    watched = run("inspect", path, "--verify", "--json")
    assert "verifying" in watched.err
    assert watched.json["verification"] == {"checked": 7, "damaged": []}
