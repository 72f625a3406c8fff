"""Models, and answers to compare with. Where vLLM is missing nothing here is collected: `make test-vllm` has it."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

THERE = all(importlib.util.find_spec(name) for name in ("vllm", "torch"))
collect_ignore_glob = [] if THERE else ["test_*.py"]

if THERE:
    from tests.vllm.engine import ENVIRONMENT, Answer, Engine
    from tests.vllm.models import make_model

    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings are errors here, and vLLM's import has many
        import vllm.v1.core.sched.scheduler  # noqa: F401


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not THERE:
        terminalreporter.write_line("tests/vllm was not collected: vLLM is missing here, make test-vllm has it")


class Models:
    """Models by kind and seed, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, kind: str, seed: int = 0) -> Path:
        folder = self._folder / f"{kind}-{seed}"
        return folder if folder.exists() else make_model(kind, folder, seed)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Plain:
    """What vLLM answers without us. An engine stays, idle, for the next question about its model."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._engines: dict[str, Engine] = {}
        self._answers: dict[tuple[str, int, tuple[int, ...]], Answer] = {}

    def __call__(self, kind: str, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[Answer]:
        """Answers to prompts, each asked alone."""
        names = [(kind, tokens, tuple(each)) for each in prompts]
        for name in names:
            if name not in self._answers:
                if kind not in self._engines:
                    self._engines[kind] = Engine(self._models(kind), enable_prefix_caching=False)
                (self._answers[name],) = self._engines[kind].generate([name[2]], tokens)
        return [self._answers[name] for name in names]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="session")
def plain(models: Models) -> Iterator[Plain]:
    made = Plain(models)
    yield made
    made.close()
