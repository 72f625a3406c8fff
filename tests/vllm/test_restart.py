"""What lies on a disk serves engines that come later: the same weights wherever they are, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt
from tests.vllm.models import BLOCK, KINDS

PROMPT = prompt(21, 2200)


def on_disk(path: Path) -> dict[str, Any]:
    return {
        "cpu": {"capacity": "256MiB"},
        "tiers": [{"backend": "disk", "path": str(path), "capacity": "1GiB"}],
    }


def store(engine: Engine) -> None:
    """Compute the prompt, and leave when it is on the disk."""
    with engine:
        assert engine.generate([PROMPT])[0].cached == 0
        assert engine.run(Inside.flush)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_with_other_memory_and_a_copy_of_the_checkpoint_hits(
    kind: str, models: Models, plain: Plain, tmp_path: Path
) -> None:
    cache = on_disk(tmp_path / "kv")
    store(Engine(models(kind), cache))
    copy = tmp_path / "elsewhere"
    shutil.copytree(models(kind), copy)
    with Engine(copy, cache, environment={"VLLM_CPU_KVCACHE_SPACE": "2"}, fresh=kind == "llama") as engine:
        (answer,) = engine.generate([PROMPT])
        assert answer.cached == 2200 // BLOCK[kind] * BLOCK[kind]
        assert kind == "deepseek" or answer.agrees(plain(kind, [PROMPT])[0])  # see test_bytes
        assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


def test_another_checkpoint_in_the_same_folder_finds_nothing(models: Models, tmp_path: Path) -> None:
    cache, folder = on_disk(tmp_path / "kv"), tmp_path / "model"
    shutil.copytree(models("llama"), folder)
    store(Engine(folder, cache))
    shutil.rmtree(folder)
    shutil.copytree(models("llama", seed=1), folder)
    with Engine(folder, cache) as engine:
        (answer,) = engine.generate([PROMPT])
        assert answer.cached == 0
        engine.run(Inside.forget)
        (again,) = engine.generate([PROMPT])
        assert (again.cached, again.agrees(answer)) == (2176, True)


def test_made_up_weights_are_nobody_elses(models: Models, tmp_path: Path) -> None:
    """vLLM makes the same ones up in every process, but does not promise to."""
    cache = on_disk(tmp_path / "kv")
    store(Engine(models("llama"), cache, load_format="dummy"))
    with Engine(models("llama"), cache, load_format="dummy") as engine:
        (answer,) = engine.generate([PROMPT])
        assert answer.cached == 0
        engine.run(Inside.forget)
        assert engine.generate([PROMPT])[0].cached == 2176
