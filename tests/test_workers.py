"""How tests are shared out among workers, and that a shell's background does not make processes deaf for Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.process import _share
from tests.workers import unit

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
CONFTEST = (ROOT / "tests" / "conftest.py").read_text()
TESTS = """
    import os, pathlib, pytest

    @pytest.fixture(scope="module")
    def shared(tmp_path_factory):
        (pathlib.Path(os.environ["SEEN"]) / f"{__name__} {os.getpid()}").touch()

    @pytest.mark.parametrize("number", range(COUNT))
    def test_it(shared, number): pass

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(SLOW))
    def test_it_slowly(shared, number):
        with open(os.environ["SEEN"] + "/order", "a") as file:
            file.write(__name__ + "\\n")
"""


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/core/test_keys.py::test_a[x::y/z]", "tests/core/test_keys.py"),
        ("tests/core/test_keys.py::TestIt::test_a", "tests/core/test_keys.py"),
        ("tests/backends/redis/test_resp.py::test_a", "tests/backends/redis"),
        ("tests/backends/test_cpu.py::TestCpu::test_a", "tests/backends"),
        ("tests/cuda/test_driver.py::test_a", "tests/cuda"),
    ],
)
def test_a_file_stays_with_one_worker_and_so_does_a_folder_that_shares_servers(nodeid: str, expected: str) -> None:
    assert unit(nodeid) == expected


def test_every_folder_whose_files_share_what_is_made_once_a_session_is_a_unit() -> None:
    for conftest in (ROOT / "tests").rglob("conftest.py"):
        folder = conftest.parent.relative_to(ROOT).as_posix()
        if 'scope="session"' in conftest.read_text() and folder not in ("tests/vllm", "tests/sglang"):
            assert unit(f"{folder}/test_one.py::test_it") == unit(f"{folder}/test_other.py::test_it") == folder


def test_each_worker_has_ports_of_its_own() -> None:
    shares = [_share(f"gw{number}", 3) for number in range(3)]
    assert len({port for share in shares for port in share}) == sum(map(len, shares))
    assert min(map(len, shares)) > 3000
    assert list(_share("gw0", 1)) == list(range(20_000, 30_000))
    assert _share("gw2", 2) == _share("gw0", 2)  # one that takes the place of another that crashed


def test_two_workers_run_all_of_it_once_and_begin_with_what_is_slow(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pytester.mkdir("seen")
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeini("[pytest]\nmarkers =\n    slow: slow\n    needs_root: root\n")
    pytester.makeconftest(CONFTEST)
    for name, count, slow in [("a_few", 3, 0), ("b_many", 30, 0), ("c_slow", 1, 5), ("d_slower", 1, 9)]:
        pytester.makepyfile(**{f"test_{name}": TESTS.replace("COUNT", str(count)).replace("SLOW", str(slow))})
    result = pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=49, skipped=2)  # what has no slow ones
    names = [path.name.partition(" ")[0] for path in seen.iterdir() if " " in path.name]
    assert sorted(names) == ["test_a_few", "test_b_many", "test_c_slow", "test_d_slower"]  # each by one worker
    assert (seen / "order").read_text().split()[0] in ("test_c_slow", "test_d_slower")


def test_processes_of_tests_hear_ctrl_c_in_a_background_too(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs_root: root\n")
    (tmp_path / "test_it.py").write_text(
        "import os, signal, subprocess, sys\n"
        "def test_it():\n"
        "    code = 'import os, signal; os.kill(os.getpid(), signal.SIGINT); print(5)'\n"
        "    assert subprocess.run([sys.executable, '-c', code], capture_output=True).stdout == b''\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
