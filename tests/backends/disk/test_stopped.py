"""An owner that is stopped (SIGSTOP, a debugger, a hung file system) holds up no other: they take nothing more where
they would have to wait for it, say so once, and go on with what they have."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_backends.disk import volume
from lmcache_core.errors import BackendError
from lmcache_core.protocols import WriteResult
from tests.backends.disk.kit import KIB, MIB, assert_holds, chunk, fill, opened, put, taken

BIG = 256 * KIB
CAPACITY = 4 * MIB

ALLOCATING = """
allocate = os.posix_fallocate
def stopping(*arguments):
    if arguments[2] >= MIB:
        os.kill(os.getpid(), signal.SIGSTOP)
    allocate(*arguments)
os.posix_fallocate = stopping
with opened(path, capacity=4 * MIB, segment=MIB) as store:
    fill(store, chunk(100, 256 * KIB))
    print("stored", flush=True)
    sys.stdin.read()
"""
HOLDING = """
with FileLock.wait(f"{path}/node.lock", 0):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class Stopped:
    """A process that has stopped itself at some place."""

    def __init__(self, path: Path, script: str) -> None:
        lines = ["import os, signal, sys", "from pathlib import Path", "from tests.backends.disk.kit import *"]
        lines += ["from lmcache_backends.disk.locks import FileLock", "path = Path(sys.argv[1])", script]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", "\n".join(lines), str(path)]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Stop = Callable[[str], Stopped]


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Stop]:
    stopped: list[Stopped] = []

    def start(script: str) -> Stopped:
        stopped.append(Stopped(tmp_path, script))
        return stopped[-1]

    yield start
    for each in stopped:
        each.kill()


def test_one_that_is_stopped_while_it_takes_a_segment_holds_up_nobody(tmp_path: Path, stop: Stop) -> None:
    other = stop(ALLOCATING)
    with opened(tmp_path, capacity=CAPACITY, segment=MIB) as store:
        results = put(store, *[chunk(i, BIG) for i in range(9)])
        assert results == [WriteResult.STORED] * 8 + [WriteResult.FULL]
        assert taken(tmp_path) == 3 * MIB, "what the other has reserved counts"
        other.go_on()
        assert other.answer() == "stored"
        assert_holds(store, *[chunk(i, BIG) for i in range(8)])


def test_room_that_a_stopped_one_has_reserved_is_left_to_it(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is free in the eyes of the file system still."""
    stop(ALLOCATING)
    system = SimpleNamespace(f_bavail=MIB // 4096 + 128, f_frsize=4096, f_blocks=MIB)
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    with opened(tmp_path, capacity=CAPACITY, segment=MIB) as store:
        assert put(store, chunk(0, BIG)) == [WriteResult.STORED]
        assert taken(tmp_path) == MIB + 2 * BIG


def test_one_that_is_stopped_with_the_lock_is_said_once_and_what_is_taken_is_used_on(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "PATIENCE", 0.05)
    with opened(tmp_path, capacity=CAPACITY, segment=BIG) as store:
        fill(store, chunk(0, BIG), chunk(1, BIG))
        other = stop(HOLDING)
        with pytest.raises(BackendError, match=r"locked for 0.05 s; another process holds this lock; see who with"):
            put(store, chunk(2, BIG))
        monkeypatch.setattr(volume, "PATIENCE", 3600.0)
        assert put(store, chunk(2, BIG), chunk(3, BIG)) == [WriteResult.FULL] * 2, "it is not waited for again"
        with pytest.raises(BackendError, match="still locked; another process"):
            store.describe(b"s" * 32, b"{}")
        store.delete([chunk(0).key])
        fill(store, chunk(4, BIG))
        assert_holds(store, chunk(1, BIG), chunk(4, BIG))
        other.kill()
        fill(store, chunk(2, BIG), chunk(3, BIG))
        store.describe(b"s" * 32, b"{}")
        assert store.manifests() == {b"s" * 32: b"{}"}


def test_a_path_whose_lock_a_stopped_one_has_is_not_waited_for_forever(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "WAIT", 0.05)
    stop(HOLDING)
    with pytest.raises(BackendError, match=r"locked for 0.05 s; another process holds this lock"), opened(tmp_path):
        pass
