"""Options, figures, table and picture of the demonstration, without a model."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from lmcache_core.demo import DemoOptions, DemoResult, Measured, add_arguments
from lmcache_core.demo.places import cache_folder
from lmcache_core.demo.report import Display, draw
from lmcache_core.demo.result import FOLLOW_UP, WORDS, Answer


def made(*, equal: bool = True, **changed: list[float]) -> DemoResult:
    times: dict[str, list[float]] = {
        "cold": [10.0, 9.8, 11.0],
        "filling": [10.5],
        "memory": [0.5, 0.25, 0.4],
        "question": [0.5],
        "turn": [0.8],
        "shared": [0.45],
        "shared question": [0.55],
        "disk": [1.0, 0.8],
        "disk question": [1.1],
        "disk turn": [1.2],
    } | changed
    tiers = dict.fromkeys(["memory", "question", "turn", "shared", "shared question"], "cpu") | {"disk": "disk"}
    return DemoResult(
        measured=tuple(
            Measured(
                kind,
                "Why?",
                4300,
                4288 if kind in tiers else 0,
                {tiers[kind]: 4288} if kind in tiers else {},
                seconds,
                equal or kind != "disk",
                1e-6 if kind == "disk" else 0.0,
                *((0.004, 0.13) if kind == "filling" else ()),
            )
            for kind, seconds in times.items()
        ),
        answers={"Why?": Answer([1, 2], [3, 4, 5], "Because."), FOLLOW_UP: Answer([1], [2], "[not a tag]")},
        threads=2,
        disk_bytes=200 << 20,
        past_page_cache=True,
        files=(Path("/tmp/figures.json"),),
    )


def test_table_and_figures_name_the_tier(capsys: pytest.CaptureFixture[str]) -> None:
    result = dataclasses.replace(made(), tier="valkey")
    figures = result.figures()
    assert figures["tier"] == "valkey"
    assert figures["valkey_ttft_s"] == 0.9
    assert not [name for name in figures if name.startswith("disk")]
    Display(width=200).report(result)
    shown = capsys.readouterr().out
    assert "Time to the first token (from valkey: after a restart, in a new process)" in shown
    assert "same prompt, valkey" in shown
    assert "200 MiB of KV on valkey, a server on this host;" in shown
    assert "disk" not in shown.replace("4288 disk", "")


def test_figures_are_medians_and_counts() -> None:
    figures = json.loads(json.dumps(made().figures()))
    expected = {
        "prompt_tokens": 4300,
        "cold_spread": pytest.approx(0.12),
        "memory_spread": 0.625,
        "filling_is_noise": True,
        "filling_retrieve_s": 0.004,
        "filling_store_s": 0.13,
        "cold_ttft_s": 10.0,
        "memory_ttft_s": 0.4,
        "disk_ttft_s": 0.9,
        "shared_ttft_s": 0.45,
        "question_ttft_s": 0.5,
        "memory_speedup": 25.0,
        "question_speedup": 20.0,
        "tokens_equal": True,
        "max_logit_diff": 1e-6,
        "memory_computed_tokens": 12,
        "question_uncached_tokens": 12,
        "new_tokens": 3,
    }
    assert {name: figures[name] for name in expected} == expected
    assert [each["kind"] for each in figures["measurements"]] == list(WORDS)


def test_a_token_that_differs_is_a_failure_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert int(made()) == 0
    assert int(made(equal=False)) == 1
    Display().report(made(equal=False))
    out = capsys.readouterr().out
    assert "SOME TOKENS DIFFER" in out
    (before, row) = [line for line in out.splitlines() if "TOKENS DIFFER" in line or "same prompt, disk" in line][:2]
    assert before.split()[-1] == "1.0e-06"
    assert row.split() == ["TOKENS", "DIFFER"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_is_readable_in_a_narrow_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each row, at figures as large as they get; what is from two tiers is one line more for each."""
    result = made(cold=[123.4, 120.0, 250.0])
    for each in result.measured:
        each.prompt_tokens, each.max_logit_diff = 131_072, 1.2e-10
        each.cached_tokens = 131_000 if each.tiers else 0
        each.tiers = dict.fromkeys(each.tiers, 131_000)
    result.of("disk")[0].tiers = {"cpu": 65_536, "disk": 65_464}
    Display(width=width).report(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    header = lines.index(next(line for line in lines if line.split()[:1] == ["how"]))
    assert lines[header].split() == ["how", "from", "cache", "computed", "time", "spread", "faster", "logits"]
    rows = [line for line in lines[header + 2 :] if line.strip()][: len(WORDS) + 1]
    starts = [line.strip() for line in rows]
    assert [line for line in starts if line.startswith(tuple(WORDS.values()))] == [
        line for line in starts if line != "65464 disk"
    ]
    assert starts[0].split() == ["without", "cache", "-", "131072", "123.400", "s", "105%", "1.2e-10"]
    assert starts[7].split()[3:] == ["65536", "cpu", "72", "0.900", "s", "22%", "137.1x", "1.2e-10"]
    assert starts[8] == "65464 disk"


def test_the_report_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    Display().report(made())
    out = capsys.readouterr().out
    lines = out.splitlines()
    (memory,) = [line.split() for line in lines if line.strip().startswith("same prompt, memory")]
    assert memory[3:] == ["4288", "cpu", "12", "0.400", "s", "62%", "25.0x", "0.0e+00"]
    assert "all tokens equal" in out
    assert "Why? Because." in out
    assert "(next turn) [not a tag]" in out
    assert "200 MiB of KV on disk, read past the page cache" in out
    assert lines[-2:] == ["Written:", "  /tmp/figures.json"]


def test_the_first_time_with_cache_is_no_slowdown_within_the_spread(capsys: pytest.CaptureFixture[str]) -> None:
    Display().report(made())
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if line.strip().startswith("first time with cache")]
    assert row[4:] == ["-", "4300", "10.500", "s", "-", "noise", "0.0e+00"]
    assert "the cache itself took 4 ms before the first token, and 130 ms after the last" in shown.replace("\n", " ")
    Display().report(made(filling=[12.5]))
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "first time with cache " in line][:1]
    assert row[8:10] == ["-", "0.8x"]


def test_a_busy_machine_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    Display().report(made())  # 0.25 to 0.5 s around 0.4 s
    assert "machine is busy: samples of the same thing (same prompt, memory) differ by 62%" in capsys.readouterr().out
    Display().report(made(memory=[0.4, 0.41, 0.6]))
    assert "busy" not in capsys.readouterr().out
    Display().report(made(memory=[0.4], cold=[10.0, 16.0, 11.0]))
    assert "(without cache) differ by 55%" in capsys.readouterr().out
    assert made().figures()["busy"]
    assert not made(memory=[0.4]).figures()["busy"]


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    draw(made(), tmp_path / "ttft.png")
    with Image.open(tmp_path / "ttft.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height > 500
        colours = picture.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    assert {(0xB0, 0x41, 0x3E), (0x2A, 0x6F, 0x97)} <= {colour for _, colour in colours}


def test_arguments_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert DemoOptions.of(parser.parse_args([])) == DemoOptions(out=tmp_path / "lmcache-core" / "demo")
    words = [
        "--json",
        "a.json",
        "--out",
        "b",
        "--tokens",
        "7",
        "--no-plot",
        "--repeats",
        "2",
        "--document-tokens",
        "99",
    ]
    assert DemoOptions.of(parser.parse_args(words)) == DemoOptions(
        json=Path("a.json"), out=Path("b"), tokens=7, plot=False, repeats=2, document_tokens=99
    )
    assert DemoOptions.of(parser.parse_args(["--plot"])).plot
    with pytest.raises(SystemExit):
        parser.parse_args(["--tokens", "0"])


def test_paths_are_those_of_the_folder_it_was_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = DemoOptions(out=Path("a/b")).resolved()
    assert (options.out, options.json) == (tmp_path / "a" / "b", None)
    assert (options.figures, options.picture) == (options.out / "figures.json", options.out / "ttft.png")
    options = DemoOptions(out=Path("a"), json=Path("../c.json"), plot=False).resolved()
    assert (options.figures, options.picture) == (tmp_path.parent / "c.json", None)


def test_the_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/not/valid")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/lmcache-core")
