"""Server processes for tests and measurements: on free ports, ready when they are handed over, ended with the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Process", "accepts", "free_ports", "running"]

STARTS = 60.0
_LOWEST, _HIGHEST = 20_000, 30_000  # below the ports that clients get


class Process:
    """A server that runs, and can be killed, started again at its place, frozen and thawed."""

    def __init__(
        self, command: Sequence[str], log: Path, ready: Callable[[], bool], env: Mapping[str, str] | None = None
    ) -> None:
        # A server must not outlive tests that were killed.
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._command = [*bound, *command]
        self._log = log
        self._ready = ready
        self._env = {**os.environ, **(env or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._env,
                cwd=self._log.parent,
            )
        until = time.monotonic() + STARTS
        while not self._ready():
            if process.poll() is not None or time.monotonic() > until:
                end(process)
                said = self._log.read_text(errors="replace")[-2000:]
                raise ChildProcessError(f"{' '.join(self._command)[:80]} does not start:\n{said}")
            time.sleep(0.02)
        return process

    def kill(self) -> None:
        """End it at once, as a crash would."""
        end(self.process)

    def restart(self) -> None:
        """Start it again on what it has stored."""
        end(self.process)
        self.process = self._start()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, frozen or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def running(*processes: Process) -> Iterator[None]:
    """They are ended afterwards, whatever happens."""
    try:
        yield
    finally:
        for each in processes:
            end(each.process)


def accepts(port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def free_ports(count: int, *, beside: Sequence[int] = ()) -> list[int]:
    """Ports of this host that nobody uses just now, nor those that are as far from them as `beside` says."""
    mine = _share(os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    start = os.getpid() * 37
    found: list[int] = []
    for step in range(len(mine)):
        port = mine[(start + step) % len(mine)]
        if port not in _given and all(_free(port + each) for each in (0, *beside)):
            _given.add(port)
            found.append(port)
            if len(found) == count:
                return found
    raise OSError("there are no free ports")


_given: set[int] = set()


def _share(worker: str, workers: int) -> range:
    """A worker's own ports: nobody else takes that of a server which has ended and is to be started again."""
    number = int(worker.removeprefix("gw")) % workers
    size = (_HIGHEST - _LOWEST) // workers
    return range(_LOWEST + number * size, _LOWEST + (number + 1) * size)


def _free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
