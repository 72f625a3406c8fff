"""The benchmarks run, and give the rows they promise. What the figures are is nobody's business here."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.disks import scratch
from benchmarks.harness import Row, Scale
from benchmarks.peers.lmcache import ROWS as LMCACHE_ROWS
from benchmarks.run import BARS, SUITES, main, measure

NAMES = [name for names in SUITES.values() for name in names if name not in LMCACHE_ROWS]

TINY = Scale(
    rounds=1, layers=1, chunks=2, hashed_tokens=128, calls=2, lookups=3, stored=4, restart_pool=1 << 20, starts=1
)


@pytest.fixture
def tiny() -> Scale:
    try:
        with scratch(TINY.directory):
            return TINY
    except SystemExit as error:
        pytest.skip(f"a disk is missing: {error}")


def check(row: Row) -> None:
    assert math.isfinite(row.value)
    assert row.value > 0
    assert row.unit in ("GB/s", "Mtok/s", "us", "s")
    assert (row.limit is None) == (row.ratio is None)
    assert row.ratio is None or (math.isfinite(row.ratio) and row.ratio > 0)


def test_every_row_is_there_once_and_in_order(tiny: Scale) -> None:
    rows = list(measure(tiny))
    assert [row.name for row in rows] == NAMES
    assert len(set(NAMES)) == len(NAMES)
    for row in rows:
        check(row)
    assert {row.name for row in rows if row.limit is not None} >= set(BARS)


def test_only_some_rows() -> None:
    assert [row.name for row in measure(TINY, ["keys.array", "overhead.st"])] == [
        "keys.array",
        "overhead.store",
        "overhead.store.hashed",
    ]


def test_a_row_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--only", "nothing"])
    with pytest.raises(SystemExit):
        main()
    assert "no row starts with nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "node.store.lmcache"], "node.store.lmcache: only with --lmcache-python"),
        (["--only", "node", "--lmcache-python", "/no/such/python"], "/no/such/python is no program"),
    ],
)
def test_rows_of_lmcache_need_an_interpreter_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    monkeypatch.setattr("sys.argv", ["run", *words])
    with pytest.raises(SystemExit):
        main()
    assert why in capsys.readouterr().err


def test_rows_go_to_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.run.QUICK", TINY)
    monkeypatch.setattr("benchmarks.run.BARS", {"keys.list": math.inf})
    out = tmp_path / "bench.json"
    monkeypatch.setattr("sys.argv", ["run", "--quick", "--only", "keys", "--out", str(out)])
    main()
    written = json.loads(out.read_text())
    assert [set(row) for row in written["rows"]] == [{"name", "value", "unit", "limit", "ratio"}] * 2
    assert written["short"] == ["keys.list"]
    assert "short of their bars: keys.list" in capsys.readouterr().out
