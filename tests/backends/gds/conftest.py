"""KvikIO for the tests: a stand-in; or itself, in processes of their own that have a driver (`test_driven.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_backends.gds import library as library_module
from lmcache_backends.gds.library import library
from lmcache_core.errors import ConfigError
from tests.backends.gds.kit import DRIVER, Device, Gpu
from tests.backends.gds.standin import StandIn


@pytest.fixture
def real() -> None:
    """Skips where there is no KvikIO."""
    try:
        library()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """KvikIO's stand-in, on a machine with a driver and all that cuFile needs. At the end all is closed and awaited."""
    made = StandIn()
    monkeypatch.setattr("lmcache_backends.gds.backend.library", lambda: made)
    monkeypatch.setattr(library_module, "_DRIVER", "libc.so.6")
    monkeypatch.setattr(library_module, "_NVIDIA_FS", "/proc")
    monkeypatch.setattr(library_module, "_GPUS", ("/dev/null",))
    yield made
    made.gate.set()
    assert made.under_way == set(), "nobody awaited it"
    assert made.open_files == set()
    assert made.cufile_driver.open == 0


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """A device's memory, and a KvikIO that moves bytes to and from it."""
    if path := os.environ.get(DRIVER):
        return Gpu(path)
    standin: StandIn = request.getfixturevalue("standin")
    return standin.memory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"
