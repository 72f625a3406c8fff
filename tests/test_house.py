"""The house itself: what is installed, what an import costs, and that the rules of tests/conftest.py hold."""

import asyncio
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import lmcache_core

ROOT = Path(__file__).parents[1]
PACKAGES = ["lmcache_backends", "lmcache_core", "lmcache_cuda", "lmcache_transfer"]
HEAVY = {"aiofiles", "numpy", "prometheus_client", "rich", "torch", "transformers", "vllm", "yaml"}


def test_the_version_is_the_distributions() -> None:
    assert lmcache_core.__version__ == version("lmcache-core")


RUNS_CODE = re.compile(
    r"(import|from) (cloudpickle|dill|joblib|jsonpickle|marshal|pickle|shelve)\b|allow_pickle=True"
    r"|\byaml\.(unsafe_|full_)?load\(|\btorch\.load\(|(?<![.\w])(eval|exec)\("
)


def test_nothing_is_decoded_that_can_run_code() -> None:
    """Neither from a socket nor from a disk: whoever can write there must not be able to run code here."""
    for risky in ("import pickle", "from pickle import loads", "yaml.load(text)", "torch.load(path)", "x = eval(text)"):
        assert RUNS_CODE.search(risky)
    files = [file for room in ("lmcache_core", "backends", "transfer", "cuda") for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if RUNS_CODE.search(file.read_text())] == []


def test_importing_the_core_imports_nothing_heavy() -> None:
    code = "import json, sys, lmcache_core; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    imported = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert "lmcache_core" in imported
    assert HEAVY.intersection(imported) == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


def test_the_wheel_holds_four_pure_python_packages(wheel: Path) -> None:
    assert wheel.name == f"lmcache_core-{lmcache_core.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "lmcache_cuda/kernels.cu" in names
    assert sorted({name.split("/")[0] for name in names if ".dist-info/" not in name}) == PACKAGES
    assert [name for name in names if name.endswith(".py") and name.count("/") == 0] == []
    assert [f"{package}/py.typed" for package in PACKAGES if f"{package}/py.typed" not in names] == []
    assert [name for name in names if name.endswith((".so", ".pyd", ".a", ".o"))] == []


def test_the_wheel_registers_the_built_in_plugins_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        registered = archive.read(name).decode()
    for line in [
        "[console_scripts]\nlmcache-core = lmcache_core.cli:main",
        "[lmcache_core.backends]\nazure = lmcache_backends.azure\ncpu = lmcache_backends.cpu\n",
        "[lmcache_core.transfers]\ncpu = lmcache_transfer.cpu",
    ]:
        assert line in registered


BLOCKING = {
    "time.sleep": "time.sleep(0)",
    "builtins.open": "open('/dev/null').close()",
    "io.open": "pathlib.Path('/dev/null').read_bytes()",
    "os.fsync": "os.fsync(fd)",
    "os.pread": "os.pread(fd, 1, 0)",
    "os.preadv": "os.preadv(fd, [bytearray(1)], 0)",
    "os.pwritev": "os.pwritev(fd, [b'x'], 0)",
    "os.stat": "os.stat('/')",
    "threading.Lock.acquire": "held.acquire(timeout=0.001)",
}


def as_if_in(package: str, statement: str, fd: int) -> Callable[[], None]:
    """A function with that one statement, which to its callers is part of the package."""
    code = (
        f"import os, pathlib, threading, time\nheld = threading.Lock()\nheld.acquire()\ndef call():\n    {statement}\n"
    )
    (path,) = __import__(package).__path__
    names: dict[str, Any] = {"fd": fd}
    exec(compile(code, f"{path}/made_up.py", "exec"), names)
    call: Callable[[], None] = names["call"]
    return call


@pytest.mark.parametrize("package", ["lmcache_core", "lmcache_backends", "lmcache_transfer"])
@pytest.mark.parametrize("name", BLOCKING)
def test_a_blocking_call_on_an_event_loop_is_noticed(
    package: str, name: str, blocking_calls: list[str], tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+b") as file:
        call = as_if_in(package, BLOCKING[name], file.fileno())

        async def swallow_everything() -> str:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - this is the point: what tiers raise gets swallowed
                return str(error)
            return ""

        assert name in asyncio.run(swallow_everything()) or name == "threading.Lock.acquire"
        assert len(blocking_calls) == 1
        blocking_calls.clear()
        call()  # off the loop it may
        assert blocking_calls == []


async def test_a_blocking_call_of_a_test_itself_is_nobodys_business(blocking_calls: list[str], tmp_path: Path) -> None:
    (tmp_path / "seed").write_bytes(b"seed")
    assert blocking_calls == []
