"""`lmcache-core bench tier`."""

from __future__ import annotations

import errno
import json
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
from lmcache_core.cli.alone import percentile
from lmcache_core.cli.bench_limits import limit_of
from lmcache_core.config import TierConfig, load_config
from tests.cli.conftest import Run
from tests.cli.kv import fill, make_namespace, prompt_of, settings
from tests.servers.redis import lacking, valkey

needs_valkey = pytest.mark.skipif(bool(lacking("valkey")), reason=lacking("valkey") or "-")
QUICK = ("--sizes", "64KiB,1MiB", "--concurrency", "1,2", "--seconds", "50ms")
FIGURES = ("gbs", "cpu_s_per_gb", "p50_s", "p90_s", "p99_s", "limit_gbs", "ratio")


def write_config(tmp_path: Path, *tiers: dict[str, Any]) -> Path:
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump({"cpu": {"capacity": "2MiB"}, "tiers": list(tiers)}))
    return file


def disk(tmp_path: Path, name: str = "disk", **more: Any) -> dict[str, Any]:
    settings = {"backend": "disk", "name": name, "path": str(tmp_path / name), "capacity": "256MiB", "min_free": 0}
    return settings | more


def measured(run: Run, *words: object) -> tuple[int, list[dict[str, Any]]]:
    done = run("bench", "tier", *words, "--json", "-")
    assert done.err == ""
    return done.code, done.json["rows"]


def assert_measured(rows: list[dict[str, Any]], tier: str, limit: str) -> None:
    shape = [(row["tier"], row["size"], row["concurrency"], row["verb"]) for row in rows]
    assert shape == [
        (tier, size, concurrency, verb)
        for size in (64 << 10, 1 << 20)
        for concurrency in (1, 2)
        for verb in ("put", "get")
    ]
    for row in rows:
        assert (row["limit"], row["note"]) == (limit, "")
        assert all(row[name] > 0 for name in FIGURES)
        assert row["operations"] >= row["concurrency"]
        assert row["p50_s"] <= row["p90_s"] <= row["p99_s"]
        assert row["ratio"] == pytest.approx(row["gbs"] / row["limit_gbs"])
        # So many at once, each of the median's time, would take about as long as was measured.
        assert row["gbs"] < 3 * row["size"] * row["concurrency"] / row["p50_s"] / 1e9


def test_a_disk_is_measured_beside_a_plain_file(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "disk", [prompt_of(1, 2)])
    before = [each.stored for each in inspect_path(tmp_path / "disk").entries()]
    code, rows = measured(run, write_config(tmp_path, disk(tmp_path)), *QUICK)
    assert code == 0
    assert_measured(rows, "disk", "plain file")
    assert [each.stored for each in inspect_path(tmp_path / "disk").entries()] == before


@needs_valkey
def test_a_server_here_is_measured_beside_sockets(run: Run, tmp_path: Path) -> None:
    with valkey(tmp_path / "valkey") as server:
        file = write_config(tmp_path, {"backend": "redis", "url": server.url}, {"backend": "cpu", "name": "ram"})
        code, rows = measured(run, file, *QUICK, "--tier", "redis")
        assert code == 0
        assert_measured(rows, "redis", "sockets")
        assert server.run("DBSIZE") == 0
        assert int(server.run("INFO", "commandstats")["cmdstat_set"]["calls"]) == sum(
            row["operations"] for row in rows if row["verb"] == "put"
        )


def test_for_people_it_is_a_table_and_for_programs_a_file(run: Run, tmp_path: Path) -> None:
    file = write_config(tmp_path, {"backend": "cpu", "name": "ram"})
    figures = tmp_path / "figures.json"
    done = run("bench", "tier", file, "--sizes", "1MiB", "--concurrency", "2", "--seconds", "50ms", "--json", figures)
    assert (done.code, done.err) == (0, "")
    assert done.lines[0].split() == [
        "tier",
        "verb",
        "size",
        "at",
        "once",
        "GB/s",
        "limit",
        "ratio",
        "CPU",
        "s/GB",
        "p50",
        "p90",
        "p99",
        "limit",
        "of",
    ]
    assert [line.split()[:4] for line in done.lines[1:]] == [["ram", "put", "1MiB", "2"], ["ram", "get", "1MiB", "2"]]
    rows = json.loads(figures.read_text())["rows"]
    assert [row["verb"] for row in rows] == ["put", "get"]
    assert {row["limit"] for row in rows} == {"memcpy"}


def test_tiers_that_cannot_be_measured_are_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = write_config(
        tmp_path,
        disk(tmp_path, "seed", write="never"),
        disk(tmp_path / "file", "gone"),
        disk(tmp_path, "tiny", capacity="1MiB"),
        {"backend": "cpu", "name": "ram"},
    )
    done = run("bench", "tier", file, "--sizes", "1MiB", "--concurrency", "1", "--seconds", "50ms")
    assert done.code == 1
    path = tmp_path / "file" / "gone"
    told = dict(line.split(": not measured: ") for line in done.err.splitlines())
    assert told.pop("seed") == "it is only read (write: never)"
    assert told.pop("gone") == f"disk: path {path} leads through a file; write a directory, or remove that file"
    assert set(told) <= {"tiny"}
    assert [line.split()[0] for line in done.lines if " ram " in f" {line}"] == ["ram", "ram"]
    assert not (tmp_path / "seed").exists()
    code, rows = measured(run, file, "--tier", "tiny", "--sizes", "1MiB", "--concurrency", "2")
    assert code == 1
    assert [row["note"] for row in rows] == ["not measured: there is no room: measuring would evict chunks"] * 2


def test_a_tier_in_use_is_left_alone(run: Run, tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path / "disk"), make_namespace()):
        code, rows = measured(run, write_config(tmp_path, disk(tmp_path)), *QUICK)
        assert code == 1
        assert len(rows) == 8
        assert all("is in use by process" in row["note"] for row in rows)
        assert len(inspect_path(tmp_path / "disk").shards) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sizes", "big"), "--sizes: 'big' is not a size"),
        (("--sizes", "5000"), "--sizes: 5000 bytes are no multiple of 4096"),
        (("--concurrency", "0"), "--concurrency: write numbers from 1 to 1024"),
        (("--concurrency", "x"), "--concurrency: write numbers from 1 to 1024"),
        (("--seconds", "0"), "--seconds: must be more than 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, tmp_path: Path, words: tuple[str, str], said: str) -> None:
    done = run("bench", "tier", write_config(tmp_path, {"backend": "cpu"}), *words)
    assert done.code == 2
    assert said in done.err


def test_a_file_of_that_name_is_measured_by_its_path(run: Run, tmp_path: Path) -> None:
    done = run("bench", "./tier", "--size", "nonsense")
    assert done.code == 2
    assert "usage: lmcache-core bench [" in done.err
    done = run("bench", "tier")
    assert done.code == 1
    assert "has no tiers to measure" in done.err


@needs_valkey
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_written_goes_when_it_is_interrupted(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with valkey(tmp_path / "valkey") as server:
        file = write_config(tmp_path, {"backend": "redis", "url": server.url})
        words = ["bench", "tier", str(file), "--sizes", "1MiB", "--seconds", "60"]
        with subprocess.Popen([sys.executable, "-m", "lmcache_core", *words], stderr=subprocess.PIPE) as process:
            until = time.monotonic() + 30
            while server.run("DBSIZE") < 3 and time.monotonic() < until:
                time.sleep(0.02)
            process.send_signal(number)
            _, said = process.communicate(timeout=20)
        assert (process.returncode, said) == (code, b"")
        assert server.run("DBSIZE") == 0


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [50, 90, 99]
    assert [percentile([3.0], percent) for percent in (50, 99)] == [3, 3]
    assert [percentile([1.0, 2.0], percent) for percent in (50, 90)] == [1, 2]


def test_a_plain_file_needs_no_help_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def without(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "as on NFS")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", without)
    tier = load_config(write_config(tmp_path, disk(tmp_path))).config.tiers[0]
    (tmp_path / "disk").mkdir()
    limit = limit_of(tier, 1 << 20, 2)
    assert limit.what == "plain file"
    assert limit.put > 0 < limit.get
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_server_elsewhere_has_no_limit_of_sockets(tmp_path: Path) -> None:
    def tier(**options: Any) -> TierConfig:
        return load_config(write_config(tmp_path, options)).config.tiers[0]

    assert limit_of(tier(backend="redis", url="redis://10.0.0.7"), 1 << 20, 1).what == "memcpy"
    assert limit_of(tier(backend="redis", url="unix:///run/valkey"), 1 << 20, 1).what == "sockets"
    assert limit_of(tier(backend="s3", bucket="kv-cache", endpoint="http://localhost:1"), 1 << 20, 2).what == "sockets"
