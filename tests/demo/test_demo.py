"""The demonstration itself: real weights, real text, a real restart."""

import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from lmcache_core import LMCacheError, PluginError
from lmcache_core.demo import DemoOptions, DemoResult, packages, run, run_demo
from lmcache_core.demo.packages import check_packages
from lmcache_core.demo.result import WORDS


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, Path]:
    folder = tmp_path_factory.mktemp("demo")
    options = DemoOptions(out=Path("a/demo"), tokens=10, repeats=2, document_tokens=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_demo(options), folder / "a" / "demo"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_caching_changes_nothing_but_the_time(shown: tuple[DemoResult, Path]) -> None:
    result, _ = shown
    assert int(result) == 0
    assert result.tokens_equal
    assert result.max_logit_diff < 1e-4
    assert [each.kind for each in result.measured if each.kind in WORDS] == [
        "cold",
        "filling",
        "memory",
        "question",
        "question",
        "turn",
        "disk",
        "disk question",
        "disk turn",
    ]
    for each in result.measured:
        tier = "disk" if "disk" in each.kind else "cpu"
        assert each.tiers == ({} if each.kind in ("cold", "cold other", "filling") else {tier: each.cached_tokens})
    assert len(result.of("cold")[0].ttft_s) == 3
    for kind in ("memory", "disk"):
        (same,) = result.of(kind)
        assert same.cached_tokens == (same.prompt_tokens - 1) // 64 * 64
        assert 0 < same.computed_tokens <= 64
        assert len(same.ttft_s) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_turn_takes_generated_tokens_from_the_cache(shown: tuple[DemoResult, Path]) -> None:
    result, _ = shown
    first, turn = result.of("cold")[0], result.of("turn")[0]
    assert turn.cached_tokens == (first.prompt_tokens + 9) // 64 * 64


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_what_was_asked_for_stays(shown: tuple[DemoResult, Path]) -> None:
    result, out = shown
    assert sorted(path.name for path in out.iterdir()) == ["figures.json", "ttft.png"]
    assert result.files == (out / "figures.json", out / "ttft.png")
    assert json.loads((out / "figures.json").read_text()) == json.loads(json.dumps(result.figures()))


def test_the_document_is_in_the_package() -> None:
    text = (resources.files("lmcache_core.demo") / "data" / "handbook.md").read_text(encoding="utf-8")
    assert len(text.split()) > 3200  # a word is 1.3 tokens of this model, and 4,200 are wanted


def test_importing_the_demo_imports_no_engine() -> None:
    code = "import sys, lmcache_core.demo; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("import sys; sys.exit('no luck')", "the demo's worker failed: no luck"),
        ("raise ValueError('odd')", "the demo's worker failed: ValueError: odd"),
        ("import os; os._exit(3)", "the demo's worker failed: exit code 3"),
        ("import engine_of_nobody", r"lacks a package .*engine_of_nobody.*pip install 'lmcache-core\[demo\]'"),
        ("from lmcache_core import PluginError; raise PluginError('install this')", "^install this$"),
    ],
)
def test_a_worker_that_dies_says_why(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_command", lambda spec: [sys.executable, "-c", words])
    monkeypatch.setattr(run, "check_packages", lambda plot: None)
    with pytest.raises(LMCacheError, match=said):
        run_demo(DemoOptions(out=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_demo_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    script = """
import sys
from lmcache_core.cli import main
from lmcache_core.demo import run
worker = "import os, sys, time; said = open(sys.argv[1], 'w', 1); print(os.getpid(), file=said); time.sleep(600)"
run._command = lambda spec: [sys.executable, "-c", worker, sys.argv[1]]
run.check_packages = lambda plot: None
sys.exit(main(["demo", "--no-plot", "--out", sys.argv[2]]))
"""
    fifo, out = tmp_path / "worker", tmp_path / "out"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", script, str(fifo), str(out)]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    with fifo.open() as said:
        worker = int(said.readline())
        assert [path.name.partition("-")[0] for path in out.iterdir()] == ["run"]
        demo.send_signal(number)
        if number == signal.SIGTERM:  # `timeout` sends it to the process, then to its group
            demo.send_signal(number)
        _, err = demo.communicate(timeout=60)
        assert said.read() == "", "open until the worker has ended"
    assert (demo.returncode, b"Traceback" in err) == (code, False)
    assert list(out.iterdir()) == []
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize("missing", [*packages.MODULES, "matplotlib", packages.PACKAGE])
def test_what_is_missing_is_said_before_anything_else(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "__init__.py"
    (tmp_path / packages.FILE).touch()
    there = importlib.machinery.ModuleSpec("there", None, origin=str(made))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else there)
    with pytest.raises(PluginError, match=missing.replace("_", "[-_]")):
        run_demo(DemoOptions(out=tmp_path / "out"))
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "out").exists()
    if missing == "matplotlib":
        check_packages(plot=False)


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check_packages", lambda plot: None)
    (tmp_path / "figures.json").mkdir()
    with pytest.raises(IsADirectoryError):
        run_demo(DemoOptions(out=tmp_path / "out", json=tmp_path / "figures.json"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        run_demo(DemoOptions(out=tmp_path / "file" / "out"))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_process_finds_in_memory_what_the_first_has_computed(tmp_path: Path) -> None:
    options = DemoOptions(out=tmp_path / "demo", tokens=4, repeats=1, document_tokens=400, plot=False, shared=True)
    result = run_demo(options)
    assert int(result) == 0
    assert result.max_logit_diff < 1e-4
    (shared,), (other,) = result.of("shared"), result.of("shared question")
    assert shared.tiers == {"cpu": (shared.prompt_tokens - 1) // 64 * 64}
    assert set(other.tiers) == {"cpu"}
    assert set(result.of("disk")[0].tiers) == {"disk"}
    assert result.figures()["shared_ttft_s"] == shared.median_s
