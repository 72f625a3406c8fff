"""The kernels on the host, and a driver whose device is the host, built by g++ once a session."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.host import COMPILER, HERE, WITHOUT_COMPILER, HostKernels, build


class Packed(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_byte),
        ("b", ctypes.c_int),
        ("c", ctypes.c_float),
        ("d", ctypes.c_double),
        ("e", ctypes.c_uint64),
    )


class FakeDriver:
    """What the tests do to the fake, and see of it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library: Any = ctypes.CDLL(self.path)
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_packed.restype = ctypes.POINTER(Packed)
        self.forget()

    def forget(self) -> None:
        """Be as new, whatever was left."""
        self._library.fake_reset()

    def is_for(self, major: int, minor: int) -> None:
        self._library.fake_version(major * 1000 + minor * 10)

    def fail(self, name: str, code: int) -> None:
        self._library.fake_fail(name.encode(), code)

    def busy(self, busy: bool) -> None:
        self._library.fake_busy(int(busy))

    def end_a_wait(self) -> None:
        """Once somebody waits, have the device be done."""
        while not self._library.fake_waits():
            time.sleep(0)
        self.busy(False)

    def enter_other(self) -> None:
        """As if the thread were at work on another context."""
        self._library.fake_enter_other()

    @property
    def depth(self) -> int:
        return int(self._library.fake_depth())

    @property
    def retained(self) -> int:
        return int(self._library.fake_retained())

    @property
    def left(self) -> int:
        """Streams, events, modules and allocations that nobody has closed."""
        return int(self._library.fake_left())

    @property
    def log(self) -> list[str]:
        return str(self._library.fake_log().decode()).splitlines()

    @property
    def packed(self) -> Packed:
        packed: Packed = self._library.fake_packed().contents
        return packed


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if COMPILER is None:
        pytest.skip(WITHOUT_COMPILER)
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    build(library)
    return HostKernels(library)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip(WITHOUT_COMPILER)
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    build(library, also=[HERE / "fake_driver.h"])
    return library


@pytest.fixture
def fake(fake_library: Path) -> Iterator[FakeDriver]:
    driver = FakeDriver(fake_library)
    yield driver
    assert driver.left == 0, "something was not closed"
