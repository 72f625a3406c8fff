"""S3 servers for tests and measurements, each in a process of its own on free ports of this host.

SeaweedFS checks signatures; moto does not, but knows all of the protocol; a small one in memory is as fast as sockets
are; and a shim in front of moto asks for the sessions of S3 Express. The first two come with
`make .venv-servers/.stamp`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

__all__ = [
    "ACCESS_KEY",
    "EXPRESS_BUCKET",
    "SECRET_KEY",
    "Server",
    "Tls",
    "express",
    "lacking",
    "make_tls",
    "memory",
    "moto",
    "seaweed",
]

ACCESS_KEY = "testkey"
SECRET_KEY = "a-secret-for-tests-only"
EXPRESS_BUCKET = "kv--use1-az1--x-s3"

_ROOT = Path(__file__).parents[2]
_BIN = _ROOT / ".venv-servers" / "bin"
_STARTS = 60.0
_ATTEMPTS = 3
_LOWEST, _HIGHEST = 20_000, 32_000  # below the ports that clients get

_HERE = Path(__file__).parent


class Server:
    """A server that runs, and can be killed, started again at its place, frozen and thawed."""

    def __init__(self, url: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.url = url
        self._start = start
        self.process = start()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there stays as it is."""
        request = AWSRequest("PUT", f"{self.url}/{name}", data=b"")
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1").add_auth(request)
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("PUT", f"/{name}", headers=dict(request.headers.items()))
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status not in (200, 409):
            raise ChildProcessError(f"no bucket {name}: {answer.status} {text}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        _end(self.process, signal.SIGKILL)

    def restart(self) -> None:
        """Start it again on what it has stored."""
        self.process = self._start()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


class Tls(NamedTuple):
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


def make_tls(directory: Path, *, expired: bool = False) -> Tls:
    """A certificate for 127.0.0.1, signed by itself."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Tls(directory / "certificate.pem", directory / "key.pem")
    subprocess.run([str(_BIN / "python"), str(_HERE / "s3_tls.py"), *made, str(int(expired))], check=True)
    return made


def lacking() -> str:
    """What is missing for SeaweedFS and moto, and how to get it; empty if nothing is."""
    absent = [name for name in ("weed", "moto_server") if not (_BIN / name).is_file()]
    return f"{' and '.join(absent)} missing in .venv-servers: make .venv-servers/.stamp" if absent else ""


@contextmanager
def seaweed(directory: Path) -> Iterator[Server]:
    """SeaweedFS with its files in `directory`. It knows one pair of keys."""
    directory.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    for attempt in range(_ATTEMPTS):
        roles = ("master", "volume", "filer", "s3")
        ports = dict(zip((*roles, *(f"{role}.grpc" for role in roles)), _free_ports(2 * len(roles)), strict=True))
        command = [str(_BIN / "weed"), "server", "-s3", f"-s3.config={config}", f"-dir={directory}", "-s3.iam=false"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-{role}.port={ports[role]}" for role in roles]
        command += [f"-{role}.port.grpc={ports[f'{role}.grpc']}" for role in roles]
        log = directory / "log"
        try:
            server = Server(f"http://127.0.0.1:{ports['s3']}", partial(_started, command, ports["s3"], log))
        except ChildProcessError:  # somebody else took one of the ports meanwhile
            if attempt + 1 == _ATTEMPTS:
                raise
            continue
        with _stopped(server):
            yield server
        return


@contextmanager
def moto(directory: Path, tls: Tls | None = None) -> Iterator[Server]:
    """moto, which keeps all in memory; with a certificate it speaks HTTPS."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = _free_ports(1)
    command = [str(_BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    command += ["-s", "-c", str(tls.certificate), "-k", str(tls.key)] if tls else []
    log = directory / "log"
    server = Server(
        f"{'https' if tls else 'http'}://127.0.0.1:{port}",
        lambda: _started(command, port, log, answers=_accepts if tls else _answers),
    )
    with _stopped(server):
        yield server


@contextmanager
def express(directory: Path, behind: Server) -> Iterator[Server]:
    """What S3 Express has and `behind` has not: sessions, which each request must name."""
    with _own([str(_HERE / "s3_express.py"), behind.url], directory / "express.log") as server:
        yield server


@contextmanager
def memory(directory: Path) -> Iterator[Server]:
    """Objects in memory, with as little between them and the socket as Python can do. Knows no keys and no lists."""
    with _own([str(_HERE / "s3_memory.py")], directory / "memory.log") as server:
        yield server


@contextmanager
def _own(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    log.parent.mkdir(parents=True, exist_ok=True)
    (port,) = _free_ports(1)
    server = Server(
        f"http://127.0.0.1:{port}", lambda: _started([sys.executable, *arguments, str(port)], port, log, _accepts)
    )
    with _stopped(server):
        yield server


@contextmanager
def _stopped(server: Server) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.thaw()
        _end(server.process, signal.SIGKILL)  # nothing of it is kept


def _started(
    command: Sequence[str], port: int, log: Path, answers: Callable[[int], bool] | None = None
) -> subprocess.Popen[bytes]:
    """The process, as soon as it answers.

    Raises:
        ChildProcessError: It does not.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    until = time.monotonic() + _STARTS
    while not (answers or _answers)(port):
        if process.poll() is not None or time.monotonic() > until:
            _end(process, signal.SIGKILL)
            raise ChildProcessError(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)
    return process


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    process.wait()


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, others for each process of tests that runs at the same time."""
    found: list[int] = []
    port = _LOWEST + (os.getpid() * 61 + time.monotonic_ns() // 1000) % (_HIGHEST - _LOWEST)
    while len(found) < count:
        port = port + 1 if port < _HIGHEST else _LOWEST
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
