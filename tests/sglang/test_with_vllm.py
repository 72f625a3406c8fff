"""One KV for two engines: what vLLM has computed SGLang loads, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_core import frame
from tests.node.kv import until
from tests.sglang.engine import ROOT, Engine, extra_config, prompt
from tests.vllm.models import make_model

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
LACKING = "" if VLLM.exists() else "vLLM is missing here: make .venv-vllm/.stamp"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(LACKING), reason=LACKING or "-"),
]

PAGE, CHUNK, TOKENS = 128, 256, 1100
WHOLE = TOKENS // PAGE * PAGE
ONE, OTHER = prompt(91, TOKENS), prompt(92, TOKENS)


def cache(folder: Path) -> dict[str, Any]:
    """A directory that both engines use."""
    return {
        "layout": "canonical",
        "page_tokens": PAGE,
        "chunk_tokens": CHUNK,
        "cpu": {"capacity": "128MiB"},
        "tiers": [{"backend": "nfs", "path": str(folder), "must_be_mounted": False, "read_timeout": "30s"}],
    }


def vllm(model: Path, *engines: tuple[dict[str, Any], Sequence[list[int]]]) -> list[list[tuple[list[int], int]]]:
    """What vLLM makes of prompts: tokens, and how many of the prompt were not computed."""
    asked = json.dumps({"model": str(model), "engines": [[settings, list(prompts)] for settings, prompts in engines]})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [str(VLLM), "-m", "tests.sglang.with_vllm"],
        input=asked,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    told = [line for line in ran.stdout.splitlines() if line.startswith("TOLD ")]
    assert told, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return [[(tokens, cached) for tokens, cached in each] for each in json.loads(told[0].removeprefix("TOLD "))]


def chunks(folder: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The numbers of whole chunks by their names."""
    found = {}
    for file in folder.glob("*/???/*"):
        data = file.read_bytes()
        header = frame.read_header(data)
        if header.form.pages == CHUNK // PAGE:
            payload = data[header.form.header_bytes :][: header.form.payload_bytes]
            found[f"{file.parent.parent.name}/{file.name}"] = np.frombuffer(payload, np.float32)
    return found


def test_what_one_engine_has_computed_the_other_one_loads(tmp_path: Path) -> None:
    """Tokens are equal; what each has computed of one prompt differs by what additions in another order differ by."""
    model = make_model("llama", tmp_path / "model", 0)
    both, alone = tmp_path / "both", tmp_path / "alone"
    (((first, cached),), ((second, _),)) = vllm(model, (cache(both), [ONE]), (cache(alone), [OTHER]))
    assert cached == 0
    mine = chunks(both)
    assert len(mine) == WHOLE // CHUNK

    extra = extra_config(cache(both), prefetch_threshold=PAGE)
    with Engine(model, extra, page_size=PAGE, dtype="float32") as engine:
        answer = engine.generate(ONE)
        assert (answer.cached, answer.storage, answer.backend) == (WHOLE, WHOLE, "HiCacheBackend")
        assert answer.tokens == first
        answer = engine.generate(OTHER)
        assert (answer.cached, answer.storage) == (0, 0)
        assert answer.tokens == second
        until(lambda: len(chunks(both)) == 2 * WHOLE // CHUNK)

    ((loaded,),) = vllm(model, (cache(both), [OTHER]))
    assert loaded == (second, WHOLE)

    theirs = {name: numbers for name, numbers in chunks(both).items() if name not in mine}
    computed = chunks(alone)
    assert theirs.keys() == computed.keys(), "each engine gives the same names"
    differences = [float(np.abs(theirs[name] - computed[name]).max()) for name in theirs]
    print(f"largest difference of a number of the KV: {max(differences):.2g}")
    assert max(differences) < 1e-4
    assert min(float(np.abs(numbers).max()) for numbers in computed.values()) > 0.05
