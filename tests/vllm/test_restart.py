"""What lies on a disk serves engines that come later: the same weights wherever they are, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt

PROMPT = prompt(21, 2200)
THERE = 2176


class Place:
    """A checkpoint in a folder, and a disk."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        tier = {"backend": "disk", "path": str(folder / "kv"), "capacity": "1GiB"}
        self.cache = {"cpu": {"capacity": "256MiB"}, "tiers": [tier]}

    def store(self, **settings: Any) -> None:
        """Compute the prompt, and leave when it is on the disk."""
        with Engine(self.model, self.cache, **settings) as engine:
            assert engine.generate([PROMPT])[0].cached == 0
            assert engine.run(Inside.flush)


@pytest.fixture(scope="module")
def place(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where an engine has computed the prompt already."""
    made = Place(tmp_path_factory.mktemp("place"))
    shutil.copytree(models("llama"), made.model)
    made.store()
    return made


def test_a_new_process_with_other_memory_and_a_copy_of_the_checkpoint_hits(
    place: Place, plain: Plain, tmp_path: Path
) -> None:
    copy = shutil.copytree(place.model, tmp_path / "copy")
    with Engine(copy, place.cache, environment={"VLLM_CPU_KVCACHE_SPACE": "2"}, fresh=True) as engine:
        (answer,) = engine.generate([PROMPT])
        assert (answer.cached, answer.agrees(plain("llama", [PROMPT])[0])) == (THERE, True)
        assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


def test_another_checkpoint_in_the_same_folder_finds_nothing(place: Place, models: Models) -> None:
    shutil.rmtree(place.model)
    shutil.copytree(models("llama", seed=1), place.model)
    with Engine(place.model, place.cache) as engine:
        (answer,) = engine.generate([PROMPT])
        assert answer.cached == 0
        engine.run(Inside.forget)
        (again,) = engine.generate([PROMPT])
        assert (again.cached, again.agrees(answer)) == (THERE, True)


def test_made_up_weights_are_nobody_elses(place: Place) -> None:
    """vLLM makes the same ones up in every process, but does not promise to."""
    place.store(load_format="dummy")
    with Engine(place.model, place.cache, load_format="dummy") as engine:
        (answer,) = engine.generate([PROMPT])
        assert answer.cached == 0
        engine.run(Inside.forget)
        assert engine.generate([PROMPT])[0].cached == THERE
