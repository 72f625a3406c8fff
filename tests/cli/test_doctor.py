"""`lmcache-core doctor`."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from lmcache_backends.cpu import CpuBackend
from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache
from lmcache_core.cli.alone import shown_time
from lmcache_core.cli.doctor_advice import advise, memory_advice
from lmcache_core.cli.doctor_checks import LARGE, Checked, check_tier
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import ChunkKey, ReadResult, WriteResult
from tests.cli.conftest import AtWork, Run
from tests.cli.kv import fill, make_namespace, prompt_of, settings
from tests.servers.chaos import chaos
from tests.servers.redis import Valkey, lacking, valkey

needs_valkey = pytest.mark.skipif(bool(lacking("valkey")), reason=lacking("valkey") or "-")
TIMES = ("open_s", "contains_s", "read_s", "write_s", "chunk_read_s", "chunk_write_s", "read_gbs", "write_gbs")


def write_config(tmp_path: Path, *tiers: dict[str, Any], **more: Any) -> Path:
    file = tmp_path / "doctor.yaml"
    file.write_text(yaml.safe_dump({"cpu": {"capacity": "2MiB"}, "tiers": list(tiers)} | more))
    return file


def disk(tmp_path: Path, name: str = "disk", **more: Any) -> dict[str, Any]:
    settings = {"backend": "disk", "name": name, "path": str(tmp_path / name), "capacity": "256MiB", "min_free": 0}
    return settings | more


def checked(run: Run, *words: object) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    done = run("doctor", *words, "--json")
    assert done.err == ""
    return done.code, {tier["name"]: tier for tier in done.json["tiers"]}, done.json


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with valkey(tmp_path / "valkey", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@needs_valkey
def test_tiers_that_are_well(run: Run, tmp_path: Path, server: Valkey) -> None:
    fill(tmp_path / "disk", [prompt_of(1, 2)])
    before = [each.stored for each in inspect_path(tmp_path / "disk").entries()]
    file = write_config(tmp_path, disk(tmp_path), {"backend": "redis", "url": server.url, "read_timeout": "30s"})
    code, tiers, whole = checked(run, file)
    assert code == 0
    assert whole | {"tiers": 0} == {"file": str(file), "well": True, "node": None, "tiers": 0, "advice": []}
    for name in ("disk", "redis"):
        assert (tiers[name]["state"], tiers[name]["problems"]) == ("up", [])
        assert all(tiers[name][key] > 0 for key in TIMES)
        assert tiers[name]["read_gbs"] == pytest.approx(LARGE / tiers[name]["chunk_read_s"] / 1e9)
    assert tiers["redis"]["advice"] == []
    assert set(tiers["disk"]) == {"name", "backend", "state", "problems", "advice", *TIMES}
    assert server.run("DBSIZE") == 0, "what was written is deleted"
    assert [each.stored for each in inspect_path(tmp_path / "disk").entries()] == before
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.name.startswith(".")] == []


def test_for_people_it_is_a_table_and_what_to_fix(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ram = {"backend": "cpu", "name": "ram"}
    file = write_config(tmp_path, disk(tmp_path / "file", "gone"), ram)
    told = run("doctor", file)
    assert told.code == 1
    assert told.lines[0].split() == [
        "tier",
        "backend",
        "state",
        "open",
        "look",
        "up",
        "read",
        "write",
        "read",
        "GB/s",
        "write",
        "GB/s",
    ]
    assert told.lines[1].split() == ["gone", "disk", "down", *"-" * 6]
    assert told.lines[2].split()[:3] == ["ram", "cpu", "up"]
    path = tmp_path / "file" / "gone"
    assert told.lines[4:] == [
        f"fix: gone: disk: path {path} leads through a file; write a directory, or remove that file"
    ]
    told = run("doctor", file, "--tier", "ram")
    assert (told.code, told.lines[2:]) == (0, ["", f"{file}: all is well"])
    told = run("doctor", file, "--tier", "rom")
    assert (told.code, told.err) == (1, f"lmcache-core: error: there is no tier 'rom'; {file} has gone, ram\n")
    assert run("doctor", file, "--timeout", "soon").code == 2


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_what_this_user_may_not_enter_is_told_with_a_remedy(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "itself").mkdir(mode=0)
    file = write_config(tmp_path, disk(closed), disk(closed, "read", write="never"), disk(tmp_path, "itself"))
    closed.chmod(0)
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*as_others, sys.executable, "-m", "lmcache_core", "doctor", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    for each in (closed, tmp_path / "itself"):
        each.chmod(0o700)
    write = "Permission denied; let this user write there, or choose another path"
    read = "Permission denied; let this user in there, or run this as the user that the engine runs as"
    assert (told.returncode, told.stdout.splitlines()[5:]) == (
        1,
        [
            f"fix: disk: {closed}/disk: {write}",
            f"fix: read: {closed}/read: {read}",
            f"fix: itself: disk: {tmp_path}/itself/node.lock: {write}",
        ],
    ), told.stderr


@needs_valkey
def test_a_wrong_password_is_told_and_not_shown(run: Run, tmp_path: Path) -> None:
    with valkey(tmp_path / "valkey", "--requirepass", "right-secret", settings={"password": "right-secret"}) as server:
        ram = {"backend": "cpu", "name": "ram"}
        wrong = {"backend": "redis", "url": server.url, "password": "wrong-secret"}
        in_url = {"backend": "redis", "name": "two", "url": server.url.replace("//", "//:other-secret@")}
        code, tiers, whole = checked(run, write_config(tmp_path, wrong, in_url, ram))
        assert code == 1
        for name in ("redis", "two"):
            (problem,) = tiers[name]["problems"]
            assert "refuses the user name or the password; correct username and password" in problem
            assert tiers[name]["state"] == "down"
        assert (tiers["ram"]["state"], tiers["ram"]["problems"]) == ("up", [])
        assert "secret" not in str(whole)


@needs_valkey
def test_a_frozen_server_costs_its_deadline(run: Run, tmp_path: Path, server: Valkey) -> None:
    file = write_config(tmp_path, {"backend": "redis", "url": server.url}, {"backend": "cpu", "name": "ram"})
    server.process.freeze()
    try:
        started = time.monotonic()
        code, tiers, _ = checked(run, file, "--timeout", "1s")
        assert 0.9 < time.monotonic() - started < 8
    finally:
        server.process.thaw()
    assert code == 1
    assert tiers["redis"]["problems"] == ["opening it took more than 1 s; it is frozen, or far too slow"]
    assert tiers["redis"]["state"] == "down"
    assert tiers["ram"]["state"] == "up"


@needs_valkey
@pytest.mark.parametrize("comes_back", [True, False])
def test_what_freezes_later_is_told_and_what_is_left_too(tmp_path: Path, server: Valkey, comes_back: bool) -> None:
    with chaos(server.port) as network:
        tier = tier_of(tmp_path, {"backend": "redis", "url": f"redis://127.0.0.1:{network.port}"})

        def freeze(step: str) -> None:
            network.silent = step == "write and read chunks of 8 MiB" or (step == "delete" and not comes_back)

        found = check_tier(tier, 0.5, freeze)
    assert (found.state, found.chunk_write_s) == ("down", None)
    assert found.write_s is not None
    said = "took more than 0.5 s; it is frozen, or far too slow"
    left = [] if comes_back else [f"1 probe chunks may be left there: deleting {said}"]
    assert found.problems == [*left, f"writing {said}"]
    if comes_back:
        assert server.run("DBSIZE") == 0


@needs_valkey
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], ["redis: the server has no maxmemory, and grows until the system ends it; set maxmemory there"]),
        (
            ["--maxmemory", "64mb", "--maxmemory-policy", "noeviction"],
            ["redis: the server refuses chunks once it is full; set maxmemory-policy allkeys-lru there"],
        ),
        (
            ["--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"],
            [
                "redis: maxmemory-policy volatile-lru evicts only what has a ttl, and chunks have none: the server "
                "refuses them once it is full; set maxmemory-policy allkeys-lru there, or write ttl: 7d"
            ],
        ),
    ],
)
def test_how_a_server_evicts(run: Run, tmp_path: Path, settings: list[str], said: list[str]) -> None:
    with valkey(tmp_path / "valkey", *settings) as server:
        code, tiers, _ = checked(run, write_config(tmp_path, {"backend": "redis", "url": server.url}))
        assert (code, tiers["redis"]["state"], tiers["redis"]["advice"]) == (0, "up", said)


@needs_valkey
def test_a_server_without_room_is_a_problem(run: Run, tmp_path: Path) -> None:
    with valkey(tmp_path / "valkey", "--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as server:
        server.run("SET", "other", b"x" * 1_500_000)
        server.run("CONFIG", "SET", "maxmemory", "1mb")
        code, tiers, _ = checked(run, write_config(tmp_path, {"backend": "redis", "url": server.url}))
        assert code == 1
        (problem,) = tiers["redis"]["problems"]
        assert problem.startswith("there is no room for a chunk of ")
        assert len(tiers["redis"]["advice"]) == 1
        assert server.run("DBSIZE") == 1


def test_a_tier_full_of_chunks_is_as_it_should_be(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "disk", [prompt_of(number, 7) for number in range(1, 3)])
    before = len(list(inspect_path(tmp_path / "disk").entries()))
    code, tiers, _ = checked(run, write_config(tmp_path, disk(tmp_path, capacity="2MiB")))
    assert (code, tiers["disk"]["state"], tiers["disk"]["problems"]) == (0, "full", [])
    assert tiers["disk"]["advice"][0].startswith("it is full of chunks (")
    assert len(list(inspect_path(tmp_path / "disk").entries())) == before == 14


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own, nearly full of something else."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"the right to mount a tmpfs is missing: {mounted.stderr.strip()}")
    (path / "other").write_bytes(bytes(15 << 20))
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.needs_root
def test_a_full_drive_is_a_problem(run: Run, tmp_path: Path, small_drive: Path) -> None:
    code, tiers, _ = checked(run, write_config(tmp_path, disk(small_drive, capacity="12MiB")))
    assert code == 1
    assert tiers["disk"]["problems"] == [
        "there is no room for a chunk of 8MiB though it holds only 0B: its medium is full, or its capacity is too small"
    ]
    assert tiers["disk"]["state"] == "down"
    assert tiers["disk"]["write_s"] > 0


def test_what_is_only_read_is_not_written(run: Run, tmp_path: Path) -> None:
    file = write_config(tmp_path, disk(tmp_path, write="never"), {"backend": "cpu", "name": "ram", "write": "never"})
    code, tiers, _ = checked(run, file)
    assert code == 1
    problem = f"{tmp_path / 'disk'} is no directory; fill it, or see to it that it is mounted"
    assert tiers["disk"]["problems"] == [problem]
    assert not (tmp_path / "disk").exists()
    fill(tmp_path / "disk", [prompt_of(1, 2)])
    files = {path: path.stat().st_size for path in (tmp_path / "disk").rglob("*.seg*")}
    code, tiers, _ = checked(run, file)
    assert (code, tiers["disk"]["state"], tiers["ram"]["state"]) == (0, "read only", "read only")
    assert tiers["disk"]["read_s"] > 0
    assert tiers["disk"]["write_s"] is None
    assert tiers["ram"]["read_s"] > 0
    assert tiers["ram"]["chunk_read_s"] is None
    assert {path: path.stat().st_size for path in (tmp_path / "disk").rglob("*.seg*")} == files


def test_a_disk_in_use_is_tried_beside_its_chunks(run: Run, tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path / "disk"), make_namespace()) as cache:
        capacity = cache.stats().tiers[0].capacity
        code, tiers, _ = checked(run, write_config(tmp_path, disk(tmp_path)))
        assert (code, tiers["disk"]["state"]) == (0, "up")
        assert all(tiers["disk"][key] > 0 for key in TIMES)
        assert f"process {os.getpid()} has it open" in tiers["disk"]["advice"][0]
        assert len(inspect_path(tmp_path / "disk").shards) == 1
        assert cache.stats().tiers[0].capacity == capacity
    assert not list((tmp_path / "disk").glob(".doctor-*"))


def test_a_node_is_asked_how_it_is(run: Run, tmp_path: Path, process: AtWork) -> None:
    file = write_config(tmp_path, {"backend": "cpu", "name": "ram"})
    code, _, whole = checked(run, file, "--socket", process.socket)
    assert code == 0
    assert whole["node"] == {
        "socket": str(process.socket),
        "state": "serving",
        "why": None,
        "pid": process.pid,
        "tiers": [{"name": "disk", "up": True, "why": None}],
    }
    code, _, whole = checked(run, file, "--socket", tmp_path / "none.sock")
    assert (code, whole["well"], whole["node"]["state"]) == (1, False, "not there")
    assert whole["node"]["why"].startswith(f"there is no node at {tmp_path / 'none.sock'}; start it with: ")
    (tmp_path / "connect.yaml").write_text(f"connect: {process.socket}")
    told = run("doctor", tmp_path / "connect.yaml")
    assert (told.code, told.lines[0]) == (0, f"node {process.socket} (process {process.pid}): serving")


# What a plugin may do


class Odd(CpuBackend):
    """A backend that is not as it should be."""


def tier_of(tmp_path: Path, *tiers: dict[str, Any]) -> TierConfig:
    from lmcache_core.config import load_config

    return load_config(write_config(tmp_path, *tiers)).config.tiers[0]


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TierConfig:
    monkeypatch.setattr("lmcache_core.cli.alone.load_backend", lambda name: OddPlugin)
    return tier_of(tmp_path, {"backend": "cpu", "name": "odd"})


class OddPlugin:
    @staticmethod
    def create(options: Any) -> Odd:
        return Odd(options)


def test_wrong_bytes_are_seen(odd: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(self: Odd, keys: list[ChunkKey], into: list[memoryview]) -> list[ReadResult]:
        results = await CpuBackend.read(self, keys, into)
        into[0][-1] ^= 1
        return results

    deleted: list[ChunkKey] = []

    async def delete(self: Odd, keys: list[ChunkKey]) -> None:
        deleted.extend(keys)

    monkeypatch.setattr(Odd, "read", read, raising=False)
    monkeypatch.setattr(Odd, "delete", delete, raising=False)
    found = check_tier(odd, 5, lambda step: None)
    assert found.problems == ["it gave back other bytes than were stored; do not use it"]
    assert found.state == "down"
    assert len(deleted) == 1, "the probe goes also after a failure"


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("open", "opening it took more than 0.3 s; it is frozen, or far too slow"),
        ("contains", "looking up took more than 0.3 s; it is frozen, or far too slow"),
        ("read", "reading took more than 0.3 s; it is frozen, or far too slow"),
        ("write", "writing took more than 0.3 s; it is frozen, or far too slow"),
    ],
)
def test_each_verb_may_hang(odd: TierConfig, monkeypatch: pytest.MonkeyPatch, verb: str, said: str) -> None:
    async def hang(self: Odd, *arguments: object) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    monkeypatch.setattr(Odd, verb, hang, raising=False)
    started = time.monotonic()
    found = check_tier(odd, 0.3, lambda step: None)
    assert time.monotonic() - started < 4
    assert (found.state, found.problems) == ("down", [said])


def test_what_blocks_the_event_loop_ends_too(odd: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def block(self: Odd) -> None:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            pass

    monkeypatch.setattr(Odd, "open", block, raising=False)
    monkeypatch.setattr("lmcache_core.cli.doctor_checks.CLOSE_TIMEOUT", 0.3)
    started = time.monotonic()
    found = check_tier(odd, 0.1, lambda step: None)
    assert time.monotonic() - started < 2.5
    assert (found.state, found.problems) == ("down", ["it blocks: nothing has ended within 0.4 s"])


@pytest.mark.parametrize(
    ("verb", "error", "said"),
    [
        ("write", BackendError("no\nspace"), "no; space"),
        ("read", ValueError("odd"), "backend cpu raised ValueError: odd"),
        ("contains", KeyboardInterrupt(), "backend cpu raised KeyboardInterrupt: "),
    ],
)
def test_each_verb_may_fail(
    odd: TierConfig, monkeypatch: pytest.MonkeyPatch, verb: str, error: BaseException, said: str
) -> None:
    async def fail(self: Odd, *arguments: object) -> None:
        raise error

    monkeypatch.setattr(Odd, verb, fail, raising=False)
    found = check_tier(odd, 5, lambda step: None)
    assert (found.state, found.problems) == ("down", [said])


def test_a_store_that_forgets_is_seen(odd: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: Odd, chunks: list[Any]) -> list[WriteResult]:
        return [WriteResult.STORED for _ in chunks]

    monkeypatch.setattr(Odd, "write", write, raising=False)
    found = check_tier(odd, 5, lambda step: None)
    assert found.problems == ["a chunk that it has just stored is not there"]


def test_advice_that_fails_hides_nothing(odd: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "advice", lambda self: 1 / 0, raising=False)
    found = check_tier(odd, 5, lambda step: None)
    assert (found.state, found.problems) == ("up", [])
    assert found.advice == ["it cannot tell what to improve: division by zero"]


# What is concluded


def tier(name: str, **more: Any) -> TierConfig:
    return msgspec.structs.replace(TierConfig("disk", name, options=name), **more)


def of(name: str, read: float | None = None, write: float | None = None, drive: int | None = None) -> Checked:
    return Checked(name, "disk", "up", chunk_read_s=read, chunk_write_s=write, drive=drive)


def test_deadlines_are_compared_with_what_was_measured() -> None:
    found = of("a", 3.0, 20.0)
    advise([tier("a")], [found])
    assert found.problems == [
        "a chunk of 8 MiB is read in 3 s, later than read_timeout (2s): nothing would ever arrive in time; write "
        "read_timeout: 12s"
    ]
    assert found.advice == [
        "a chunk of 8 MiB is written in 20 s, which leaves little of write_timeout (30s) when several are under way; "
        "write write_timeout: 80s"
    ]
    found = of("a", 0.5, 1.0)
    advise([tier("a")], [found])
    assert (found.problems, found.advice) == ([], [])


def test_the_order_of_tiers_is_that_of_their_speed() -> None:
    slow, fast = of("slow", 0.1), of("fast", 0.01)
    advise([tier("slow"), tier("fast")], [slow, fast])
    assert slow.advice == [
        "fast, below it, is read faster (0.84 GB/s, this one 0.084): tiers go from fast to slow; swap them, or leave "
        "this one out"
    ]
    assert fast.advice == []
    slow, fast = of("slow", 0.1), of("fast", 0.01)
    advise([tier("fast"), tier("slow")], [fast, slow])
    assert (fast.advice, slow.advice) == ([], [])
    slow, fast = of("slow", 0.012), of("fast", 0.01)
    advise([tier("slow"), tier("fast")], [slow, fast])
    assert slow.advice == [], "no more than noise"


def test_tiers_at_one_place_are_told() -> None:
    first, second, third = of("a", drive=1), of("b", drive=1), of("c", drive=2)
    advise([tier("a", options=1), tier("b", options=2), tier("c", options=3)], [first, second, third])
    assert (first.advice, third.advice) == ([], [])
    assert second.advice == [
        "it is on the same file system as a: it is no faster and no larger than that one; put it on another drive, or "
        "make one tier of them"
    ]
    first, second = of("a"), of("b")
    advise([tier("a", backend="redis", options=1), tier("b", backend="redis", options=1)], [first, second])
    assert second.advice == ["it is the same place as a; delete one of the two"]


def test_memory_is_compared_with_what_is_free(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_advice(4 << 30, None) == memory_advice(4 << 30, 4 << 30) == ""
    assert memory_advice(4 << 30, 1 << 30) == (
        "cpu.capacity: 4GiB is more than the 1GiB of memory that this machine has free; a node here would not start"
    )
    monkeypatch.setattr("lmcache_core.hostpool.available_memory", lambda: 1 << 20)
    told = run("doctor", write_config(tmp_path, {"backend": "cpu", "name": "ram"}))
    assert told.code == 0
    assert told.lines[3:] == [
        f"advice: {memory_advice(2 << 20, 1 << 20)}",
        f"{tmp_path / 'doctor.yaml'}: works; see the advice above",
    ]


def test_times_are_shown_short() -> None:
    assert [shown_time(seconds) for seconds in (1.234, 0.0123, 0.0000123)] == ["1.23 s", "12.3 ms", "12.3 µs"]


def test_tiers_that_cannot_be_in_one_process(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each works alone, as a node would open them they don't."""
    opened: list[CpuBackend] = []
    closed: list[CpuBackend] = []
    before = CpuBackend.open, CpuBackend.close

    async def open_alone(backend: CpuBackend) -> None:
        if len(opened) > len(closed):
            raise ConfigError("mode: a and b cannot both be in one process")
        opened.append(backend)
        await before[0](backend)

    async def close(backend: CpuBackend) -> None:
        if backend in opened:
            closed.append(backend)
        await before[1](backend)

    monkeypatch.setattr(CpuBackend, "open", open_alone)
    monkeypatch.setattr(CpuBackend, "close", close)
    file = write_config(tmp_path, {"backend": "cpu", "name": "one"}, disk(tmp_path), {"backend": "cpu", "name": "two"})
    code, tiers, _ = checked(run, file)
    assert code == 1
    assert [(name, tier["state"]) for name, tier in tiers.items()] == [("one", "up"), ("disk", "up"), ("two", "down")]
    assert tiers["two"]["problems"] == [
        "it works alone, but not beside one: mode: a and b cannot both be in one process"
    ]
    assert tiers["one"]["problems"] == tiers["disk"]["problems"] == []
    assert len(opened) == len(closed) == 3
    assert checked(run, file, "--tier", "two")[0] == 0
