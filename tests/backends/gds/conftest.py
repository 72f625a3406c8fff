"""KvikIO for the tests: a stand-in; or itself, in a process of its own whose driver is a fake (`test_driven.py`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.gds import library as library_module
from lmcache_backends.gds.library import library
from lmcache_core.errors import ConfigError
from tests.backends.gds.kit import DRIVER, Device
from tests.backends.gds.standin import StandIn


class Fake:
    """Memory of the fake driver's device."""

    def __init__(self, path: str) -> None:
        self._library: Any = ctypes.CDLL(path)
        self._library.fake_allocate.restype = ctypes.c_uint64

    def allocate(self, nbytes: int) -> int:
        return int(self._library.fake_allocate(ctypes.c_size_t(nbytes)))

    def put(self, address: int, content: bytes | memoryview) -> None:
        assert self._library.fake_put(ctypes.c_uint64(address), bytes(content), ctypes.c_size_t(len(content))) == 0

    def get(self, address: int, nbytes: int) -> bytes:
        into = ctypes.create_string_buffer(nbytes)
        assert self._library.fake_get(ctypes.c_uint64(address), into, ctypes.c_size_t(nbytes)) == 0
        return into.raw

    def copy_back(self, address: int, into: memoryview) -> None:
        into[:] = self.get(address, len(into))


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
    yield made
    made.gate.set()
    assert made.under_way == set(), "nobody awaited it"
    assert made.open_files == set()
    assert made.cufile_driver.open == 0


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """A device's memory, and a KvikIO that moves bytes to and from it."""
    if path := os.environ.get(DRIVER):
        return Fake(path)
    standin: StandIn = request.getfixturevalue("standin")
    return standin.memory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"
