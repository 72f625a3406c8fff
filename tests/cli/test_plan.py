"""`lmcache-core plan`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
H100 = ("--flops", "989T", "--parameters", "8.03B")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A tier of 2 ms a chunk and 4 GB/s with four chunks at once, as `bench tier` would have measured it."""
    file = tmp_path / "measured.json"
    rows = [
        {"tier": "disk", "verb": verb, "size": size, "concurrency": 4, "gbs": size / (2e-3 + size / 4e9) / 1e9}
        for size in (1 << 20, 8 << 20, 32 << 20)
        for verb in ("put", "get")
    ]
    file.write_text(json.dumps({"rows": rows}))
    return file


def test_a_plan_for_people(run: Run, model: Path) -> None:
    done = run(
        *("plan", "--model", model, "--bandwidth", "32Gbps, 8GB/s", "--latency", "1ms", "--lengths", "4096,1024"), *H100
    )
    assert (done.code, done.err) == (0, "")
    assert done.lines[:3] == [
        "model    32 layers with full attention; 8.03 G weights a token",
        "KV       128KiB a token, 32MiB a chunk of 256 tokens",
        "prefill  494 TFLOP/s: 0.5 of 989 TFLOP/s",
    ]
    tables = [[cell for cell in line.split("  ") if cell] for line in done.lines[3:] if line]
    assert [[cell.strip() for cell in row] for row in tables] == [
        ["link", "bandwidth", "latency", "a chunk reaches", "90% from", "95% from", "loading"],
        # 9 and 19 times 1 ms x 4 GB/s; the crossover is (131072/4e9 + 1e-3/256) F less 2P, by 2 n d.
        [
            *("32Gbps", "32Gbps", "1 ms", "89.3%", "34.3MiB (275 tokens)", "72.5MiB (580 tokens)"),
            "pays beyond 7,917 tokens",
        ],
        ["8GB/s", "64Gbps", "1 ms", "80.7%", "68.7MiB (550 tokens)", "145.0MiB (1,160 tokens)", "always pays"],
        ["tokens", "computed", "32Gbps", "8GB/s"],
        # 2 x 8.03e9 L + 2 x 32 x 4096 L² FLOP; 131072 L bytes and L / 256 ms
        ["1,024", "33.8 ms", "37.6 ms (0.90x)", "20.8 ms (1.63x)"],
        ["4,096", "142 ms", "150 ms (0.94x)", "83.1 ms (1.71x)"],
    ]


def test_a_plan_for_programs(run: Run, model: Path) -> None:
    done = run(
        "plan", "--model", model / "config.json", "--bandwidth", "32Gbps,64Gbps,128Gbps,400Gbps", *H100, "--json"
    )
    assert (done.code, done.err) == (0, "")
    plan = done.json
    assert plan["model"] == {
        "kv_bytes_per_token": 131072,
        "parameters": 8.03e9,
        "layers": [{"count": 32, "kv_bytes": 4096, "width": 8192, "window": None}],
    }
    assert plan["chunk"] == {"tokens": 256, "bytes": 33554432}
    assert plan["engine"] == {"peak": 9.89e14, "mfu": 0.5}
    assert [each["name"] for each in plan["links"]] == ["32Gbps", "64Gbps", "128Gbps", "400Gbps"]
    assert [each["bandwidth"] for each in plan["links"]] == [4e9, 8e9, 16e9, 50e9]
    assert [each["crossover"] for each in plan["links"]] == [pytest.approx(548.46, abs=0.01), 0, 0, 0]
    assert [row["tokens"] for row in plan["lengths"]] == [1024 << step for step in range(8)]
    last = plan["lengths"][-1]
    assert last["compute_s"] == pytest.approx((2 * 8.03e9 * 131072 + 262144 * 131072**2) / 494.5e12)
    assert last["load_s"]["400Gbps"] == pytest.approx(131072**2 / 50e9)


def test_weights_are_counted_where_they_are_not_given(run: Run, model: Path) -> None:
    done = run("plan", "--model", model, "--bandwidth", "32Gbps", "--flops", "989T", "--json")
    assert done.json["model"]["parameters"] == 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    (link,) = done.json["links"]
    assert link["crossover"] == pytest.approx((131072 / 4e9 * 494.5e12 - 2 * 6_979_321_856) / 262144)


def test_a_tier_as_measured(run: Run, model: Path, measured: Path) -> None:
    done = run("plan", "--model", model, "--measured", measured, *H100, "--json")
    (link,) = done.json["links"]
    assert (link["name"], link["concurrency"]) == ("tier disk", 4)
    assert link["latency"] == pytest.approx(2e-3)
    assert link["bandwidth"] == pytest.approx(4e9)
    assert link["n90"] == pytest.approx(9 * 2e-3 * 4e9)
    assert link["n95"] == pytest.approx(19 * 2e-3 * 4e9)
    shown = run("plan", "--model", model, "--measured", measured, "--bandwidth", "64Gbps", *H100)
    assert shown.lines[5].startswith("64Gbps ")
    assert shown.lines[6].startswith("tier disk, 4 at once  ")


def test_a_tier_that_was_measured_with_too_little_is_told(run: Run, model: Path, tmp_path: Path) -> None:
    def told(*points: tuple[int, float]) -> str:
        rows = [{"tier": "disk", "verb": "get", "size": n, "concurrency": 1, "gbs": n / t / 1e9} for n, t in points]
        (tmp_path / "measured.json").write_text(json.dumps({"rows": rows}))
        done = run("plan", "--model", model, "--measured", tmp_path / "measured.json", *H100, "--json")
        assert done.code == 0
        assert [each["name"] for each in done.json["links"]] == ["tier disk"]
        return done.err

    assert told((4096, 1e-3)) == (
        "tier disk: measured with one size of chunks, which tells no latency; measure two or more\n"
    )
    assert told((1000, 1.0), (2000, 1.5), (3000, 2.0)) == ""
    assert told((1000, 1.0), (1000, 3.0), (2000, 4.0)).startswith("tier disk: its latency and bandwidth are up to ")


def test_fp8_loads_twice_as_fast(run: Run, model: Path) -> None:
    words = ("plan", "--model", model, "--bandwidth", "8Gbps", *H100, "--json")
    half = run(*words, "--kv-dtype", "fp8").json
    assert half["model"]["kv_bytes_per_token"] == 65536
    assert half["lengths"][0]["load_s"]["8Gbps"] == run(*words).json["lengths"][0]["load_s"]["8Gbps"] / 2


def test_windows_alone_may_never_pay(run: Run, model: Path) -> None:
    settings = MODEL | {"model_type": "mistral", "sliding_window": 128, "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps(settings))
    done = run("plan", "--model", model, "--bandwidth", "1Gbps", "--latency", "1s", "--flops", "989T")
    assert done.lines[0] == "model    2 layers with a window of 128 tokens; 436 M weights a token"
    assert done.lines[5].endswith("never pays")


@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.PDF"])
def test_a_plan_is_drawn(run: Run, model: Path, measured: Path, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    file = tmp_path / name
    done = run(
        *("plan", "--model", model, "--bandwidth", "32Gbps,1Gbps", "--measured", measured, *H100, "--plot", file)
    )
    assert (done.code, done.err) == (0, f"drawn to {file}\n")
    starts = {"plan.png": b"\x89PNG", "plan.svg": b"<?xml", "plan.PDF": b"%PDF"}
    assert file.read_bytes().startswith(starts[name])
    assert file.stat().st_size > 5000


def test_one_length_is_drawn_too(run: Run, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    file = tmp_path / "plan.png"
    words = ("plan", "--model", model, "--bandwidth", "32Gbps", *H100, "--lengths", "1", "--plot", file, "--json")
    done = run(*words)
    assert done.code == 0
    assert [row["tokens"] for row in done.json["lengths"]] == [1]
    assert file.exists()


def test_without_matplotlib_the_extra_is_named(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    words = ("plan", "--model", model, "--bandwidth", "32Gbps", *H100)
    refused = run(*words, "--plot", "plan.png")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == (
        "lmcache-core: error: the plot needs matplotlib; install it with: pip install 'lmcache-core[plot]'\n"
    )
    assert run(*words).code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bandwidth", "64G"], "--bandwidth: '64G' is no bandwidth: there is no unit 'G'; write bits a second"),
        (["--bandwidth", "64Gbps,"], "--bandwidth: '' is no bandwidth"),
        (["--bandwidth", "64Gbps,64Gbps"], "--bandwidth: 64Gbps is there twice"),
        (["--bandwidth", ",".join(f"{n}Gbps" for n in range(1, 26))], "--bandwidth: there are 25; at most 24"),
        ([], "say over what to load: --bandwidth, --measured or both"),
        (["--bandwidth", "64Gbps", "--latency", "fast"], "--latency: 'fast' is not a duration"),
        (["--bandwidth", "64Gbps", "--latency", "-1"], "--latency: '-1' is not a duration"),
        (["--bandwidth", "64Gbps", "--mfu", "50%"], "--mfu: '50%' is no number"),
        (["--bandwidth", "64Gbps", "--mfu", "1.5"], "--mfu: an MFU is above 0 and at most 1, not 1.5"),
        (["--bandwidth", "64Gbps", "--mfu", "nan"], "--mfu: an MFU is above 0 and at most 1, not nan"),
        (["--bandwidth", "64Gbps", "--flops", "much"], "--flops: 'much' is no speed of computing"),
        (["--bandwidth", "64Gbps", "--flops", "989"], "--flops: '989' is no speed of computing: no processor"),
        (["--bandwidth", "64Gbps", "--parameters", "big"], "--parameters: 'big' is no number"),
        (["--bandwidth", "64Gbps", "--chunk-tokens", "0"], "--chunk-tokens: '0' is no number: it must be more than 0"),
        (["--bandwidth", "64Gbps", "--chunk-tokens", "2.5"], "--chunk-tokens: '2.5' is no number of tokens"),
        (["--bandwidth", "64Gbps", "--lengths", "1k,2T"], "--lengths: '2T' is no number of tokens"),
        (["--bandwidth", "64Gbps", "--kv-dtype", "int4"], "--kv-dtype: invalid choice: 'int4'"),
        (["--bandwidth", "64Gbps", "--plot", "plan.jpg"], "--plot: the name of the file must end in one of .pdf, .png"),
    ],
)
def test_a_wrong_command_line_is_refused(run: Run, model: Path, words: list[str], why: str) -> None:
    refused = run("plan", "--model", model, "--flops", "989T", *words)
    assert (refused.code, refused.out) == (2, "")
    assert (
        f"lmcache-core plan: error: argument {why}" in refused.err or f"lmcache-core plan: error: {why}" in refused.err
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_hidden_layers": None}, "{}: the model's settings lack num_hidden_layers; is it the config.json"),
        ({"layer_types": ["linear_attention"] * 32}, "{}: the model has layers of the kind 'linear_attention'"),
        ({"model_type": "unheard_of"}, "{}: how many weights a token of a model of the kind 'unheard_of'"),
    ],
)
def test_a_model_that_cannot_be_planned_for_is_refused(
    run: Run, model: Path, settings: dict[str, Any], why: str
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | settings))
    refused = run("plan", "--model", model, "--bandwidth", "64Gbps", "--flops", "989T")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith(f"lmcache-core: error: {why.format(model)}")
    assert refused.err.count("\n") == 1


def test_files_that_are_not_there_are_refused(run: Run, model: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    refused = run("plan", "--model", nowhere, "--bandwidth", "64Gbps", "--flops", "989T")
    assert refused.code == 1
    assert refused.err.startswith(f"lmcache-core: error: {nowhere} is not there; name a model's config.json")
    refused = run("plan", "--model", model, "--measured", nowhere, "--flops", "989T")
    assert refused.code == 1
    assert refused.err == f"lmcache-core: error: {nowhere} cannot be read: No such file or directory\n"
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    file = nowhere / "plan.png"
    refused = run("plan", "--model", model, "--bandwidth", "64Gbps", "--flops", "989T", "--plot", file)
    assert refused.code == 1
    assert refused.err == f"lmcache-core: error: {file}: No such file or directory\n"


def test_planning_imports_nothing_heavy(model: Path) -> None:
    code = f"""
import sys
from lmcache_core.cli import main
code = main(["plan", "--model", {str(model)!r}, "--bandwidth", "64Gbps", "--flops", "989T", "--json"])
heavy = {{"matplotlib", "numpy", "rich", "torch", "transformers", "xxhash"}}
print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"
