"""KvikIO itself, in processes of their own: with a driver whose device is the host, in compatibility mode; and on a GPU
where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gds
from benchmarks.gpu import storage
from tests.backends.gds.kit import DRIVER, MIB
from tests.backends.gds.standin import Memory

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIBRARY = "libcuda.so.1"
COMPILER = shutil.which("g++")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("g++ is missing: the fake driver cannot be built")
    library = tmp_path_factory.mktemp("driver") / LIBRARY
    named = [f"-Wl,-soname,{LIBRARY}", "-o", str(library), str(HERE / "fake_driver.cc")]
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *named], check=True)
    return library


def run(tests: str, driver: str, **more: str) -> int:
    """How many of the tests have passed. None may fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / tests)]
    environment = os.environ | {DRIVER: driver, "PYTEST_ADDOPTS": ""} | more
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


KINDS = pytest.mark.parametrize(("tests", "least"), [("test_direct.py", 40), ("test_conformance.py::TestByKvikio", 40)])


@pytest.mark.slow
@pytest.mark.usefixtures("real")
@KINDS
def test_with_kvikio_itself(driver: Path, tests: str, least: int) -> None:
    assert run(tests, str(driver), LD_LIBRARY_PATH=str(driver.parent)) >= least


@pytest.mark.slow
@pytest.mark.usefixtures("real")
@KINDS
def test_on_a_gpu(tests: str, least: int) -> None:
    """By cuFile where it works on that machine."""
    code = f"from tests.backends.gds.kit import Gpu; Gpu({LIBRARY!r}).allocate(4096)"
    tried = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a GPU or its driver is missing: {tried.stderr.strip().splitlines()[-1]}")
    assert run(tests, LIBRARY) >= least


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "256"], "argument --sizes: '256': write sizes from 1 to 128, in MiB, as in 1,8,32"),
        (["--sizes", "1,0"], "argument --sizes: '1,0': write sizes from 1 to 128"),
        (["--sizes", "big"], "argument --sizes: 'big': write sizes from 1 to 128"),
        (["--sizes", ""], "argument --sizes: '': write sizes from 1 to 128"),
        (["--rounds", "0"], "argument --rounds: '0': write a number from 1 on"),
        (["--rounds", "many"], "argument --rounds: 'many': write a number from 1 on"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gds", *arguments])
    with pytest.raises(SystemExit) as ended:
        gds.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_hangs_ends_the_check_and_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose file nobody ever writes: to open it does not end."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(storage, "PATIENCE", 0.5)
    os.mkfifo(tmp_path / LIBRARY)
    with pytest.raises(
        AssertionError, match=r"Storage hangs or is very slow: it had not ended after 0.5 s .*; look in dmesg"
    ):
        storage.carry_out(str(tmp_path / LIBRARY), rounds=1, sizes="1")


def test_figures_are_of_what_is_moved(tmp_path: Path) -> None:
    """Which is less than all where sizes do not fit into it."""
    assert gds.Moves(Memory(128 * MIB), tmp_path, 65 * MIB).nbytes == 65 * MIB


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_what_checks_a_gpu_moves_chunks_both_ways(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.parent))
    rows = storage.carry_out(str(driver), rounds=1, sizes="1")
    ways = ("through", "direct.checked", "direct.trusted")
    assert [row.name for row in rows] == [f"gds.{verb}.{way}.1" for verb in ("write", "read") for way in ways]
    assert all(row.value > 0 for row in rows)
    with pytest.raises(AssertionError, match=r"GPUDirect Storage does not work .*(?s:.)*nothing\.so"):
        storage.carry_out("/nothing.so", rounds=1, sizes="1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert storage.carry_out(str(driver)) == []
    assert capfd.readouterr().out.endswith(f"{storage.MISSING}\n")
