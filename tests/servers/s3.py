"""S3 servers for tests and measurements.

SeaweedFS checks signatures; moto does not, but knows all of the protocol; a small one in memory is as fast as sockets
are; and a shim in front of moto asks for the sessions of S3 Express. The first two come with
`make .venv-servers/.stamp`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.servers.process import Process, accepts, free_ports, running

__all__ = [
    "ACCESS_KEY",
    "EXPRESS_BUCKET",
    "SECRET_KEY",
    "Server",
    "express",
    "lacking",
    "memory",
    "moto",
    "seaweed",
]

ACCESS_KEY = "testkey"
SECRET_KEY = "a-secret-for-tests-only"
EXPRESS_BUCKET = "kv--use1-az1--x-s3"

_HERE = Path(__file__).parent
_BIN = _HERE.parents[1] / ".venv-servers" / "bin"


class Server(Process):
    """A server on a port of its own."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, ready: Callable[[int], bool], scheme: str = "http"
    ) -> None:
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(command, log, lambda: ready(port))

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there stays as it is."""
        self._ask("PUT", name, (200, 409))

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket that is empty."""
        self._ask("DELETE", name, (204,))

    def _ask(self, verb: str, name: str, expected: tuple[int, ...]) -> None:
        request = AWSRequest(verb, f"{self.url}/{name}", data=b"")
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1").add_auth(request)
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(verb, f"/{name}", headers=dict(request.headers.items()))
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status not in expected:
            raise ChildProcessError(f"{verb} {name}: {answer.status} {text}")


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
    roles = ("master", "volume", "filer", "s3")
    ports = dict(zip((*roles, *(f"{role}.grpc" for role in roles)), free_ports(2 * len(roles)), strict=True))
    command = [str(_BIN / "weed"), "server", "-s3", f"-s3.config={config}", f"-dir={directory}", "-s3.iam=false"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{role}.port={ports[role]}" for role in roles]
    command += [f"-{role}.port.grpc={ports[f'{role}.grpc']}" for role in roles]
    with _running(Server(command, ports["s3"], directory / "log", _answers)) as server:
        yield server


@contextmanager
def moto(directory: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Server]:
    """moto, which keeps all in memory; with a certificate and its key it speaks HTTPS."""
    (port,) = free_ports(1)
    command = [str(_BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    if certificate is not None:
        command += ["-s", "-c", str(certificate[0]), "-k", str(certificate[1])]
    scheme, ready = ("https", accepts) if certificate else ("http", _answers)
    with _running(Server(command, port, directory / "log", ready, scheme)) as server:
        yield server


@contextmanager
def express(directory: Path, behind: Server) -> Iterator[Server]:
    """What S3 Express has and `behind` has not: sessions, which each request must name."""
    (port,) = free_ports(1)
    command = [sys.executable, str(_HERE / "s3_express.py"), behind.url, str(port)]
    with _running(Server(command, port, directory / "express.log", accepts)) as server:
        yield server


@contextmanager
def memory(directory: Path, *, old: bool = False) -> Iterator[Server]:
    """Objects in memory, with as little between them and the socket as Python can do. Knows no keys and no lists; one
    that is `old` knows no conditions and no deletes of several objects either."""
    (port,) = free_ports(1)
    command = [sys.executable, str(_HERE / "s3_memory.py"), str(port), *(["old"] if old else [])]
    with _running(Server(command, port, directory / "memory.log", accepts)) as server:
        yield server


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    with running(server):
        yield server


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()
