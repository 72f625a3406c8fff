"""Models, and SGLang in this process. Where SGLang is missing nothing here is collected: `make test-sglang` has it."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

THERE = all(importlib.util.find_spec(name) for name in ("sglang", "torch"))
collect_ignore_glob = [] if THERE else ["test_*.py"]

if THERE:
    from tests.sglang.engine import ENVIRONMENT, STANDINS
    from tests.sglang.models import make_model

    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(STANDINS))
    if importlib.util.find_spec("datasets") is None:  # which SGLang's own helpers for tests import, and don't use here
        datasets: Any = types.ModuleType("datasets")
        datasets.load_dataset = None
        sys.modules["datasets"] = datasets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings are errors here, and SGLang's import has many
        import sglang.test.kits.unified_radix_cache.storage  # noqa: F401

        from tests.sglang.standins import hostpools

        hostpools.activate()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not THERE:
        terminalreporter.write_line("tests/sglang was not collected: SGLang is missing here, make test-sglang has it")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")
