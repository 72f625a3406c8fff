"""The demonstration itself: real weights, real text, a real restart."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from lmcache_core import LMCacheError
from lmcache_core.demo import DemoOptions, DemoResult, run, run_demo
from lmcache_core.demo.result import WORDS


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, Path]:
    out = tmp_path_factory.mktemp("demo")
    options = DemoOptions(out=out, json=out / "figures.json", tokens=10, repeats=2, document_tokens=400, plot=True)
    return run_demo(options), out


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
    with pytest.raises(LMCacheError, match=said):
        run_demo(DemoOptions(out=tmp_path))
    assert list(tmp_path.iterdir()) == []
