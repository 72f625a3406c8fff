"""KvikIO itself, in processes of their own: with a driver whose device is the host, in compatibility mode. cuFile needs
a GPU, and isn't tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.gds.kit import DRIVER

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMPILER = shutil.which("g++")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("g++ is missing: the fake driver cannot be built")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    named = ["-Wl,-soname,libcuda.so.1", "-o", str(library), str(HERE / "fake_driver.cc")]
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *named], check=True)
    return library


def environment(driver: Path) -> dict[str, str]:
    return os.environ | {DRIVER: str(driver), "LD_LIBRARY_PATH": str(driver.parent), "PYTEST_ADDOPTS": ""}


@pytest.mark.slow
@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(("tests", "least"), [("test_direct.py", 40), ("test_conformance.py::TestByKvikio", 40)])
def test_with_kvikio_itself(driver: Path, tests: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / tests)]
    done = subprocess.run(command, env=environment(driver), cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least
