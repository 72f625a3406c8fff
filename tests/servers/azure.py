"""Azurite, the emulator of Azure Blob Storage, for tests and measurements. It checks signatures, and keeps blobs in
memory. Comes with `make servers`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.servers.process import Process, accepts, free_ports, running

__all__ = ["ACCESS_KEY", "ACCOUNT", "Azurite", "azurite", "lacking", "shared_access"]

ACCOUNT = "kvtests"
ACCESS_KEY = base64.b64encode(b"a-key-for-tests-only").decode()

_VERSION = "2021-08-06"
_HERE = Path(__file__).parents[2] / ".venv-servers"
_BLOB = _HERE / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def _node() -> str | None:
    own = _HERE / "bin" / "node"
    return str(own) if own.is_file() else shutil.which("node")


def lacking() -> str:
    """What is missing, and how to get it; empty if nothing is."""
    return "" if _BLOB.is_file() and _node() else "Azurite is missing in .venv-servers: make servers"


class Azurite(Process):
    """One on a port of its own."""

    def __init__(self, directory: Path, certificate: tuple[Path, Path] | None = None) -> None:
        (self.port,) = free_ports(1)
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}/{ACCOUNT}"
        directory.mkdir(parents=True, exist_ok=True)
        command = [str(_node()), str(_BLOB), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
        if certificate is not None:
            command += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
        accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCESS_KEY}"}
        super().__init__(command, directory / "log", lambda: accepts(self.port), accounts)

    def make_container(self, name: str) -> None:
        """Make a container; one that is there stays as it is."""
        self._ask("PUT", name, (201, 409))

    def remove_container(self, name: str) -> None:
        """Remove a container with all that is in it."""
        self._ask("DELETE", name, (202,))

    def _ask(self, verb: str, name: str, expected: tuple[int, ...]) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        named = "".join(f"{key}:{value}\n" for key, value in headers.items())
        signed = _signature(f"{verb}\n{'':\n<11}{named}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container")
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signed}"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(verb, f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status not in expected:
            raise ChildProcessError(f"{verb} {name}: {answer.status} {text}")


def shared_access(container: str, *, allows: str = "rwdlc") -> str:
    """A signature that lets its owner do so much in a container for an hour."""
    ends = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = [allows, "", ends, f"/blob/{ACCOUNT}/{container}", "", "", "", _VERSION, "c", "", "", "", "", "", "", ""]
    known = {"sv": _VERSION, "sr": "c", "sp": allows, "se": ends, "sig": _signature("\n".join(fields))}
    return urlencode(known, quote_via=quote)


def _signature(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(ACCESS_KEY), text.encode(), hashlib.sha256)).decode()


@contextmanager
def azurite(directory: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Azurite]:
    """One that runs; with a certificate and its key it speaks HTTPS."""
    server = Azurite(directory, certificate)
    with running(server):
        yield server
