"""Servers that tests share: each test has a prefix of its own on them."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import redis as servers

_prefixes = itertools.count()


@pytest.fixture
def prefix() -> str:
    """For the keys of one test."""
    return f"test{next(_prefixes)}"


def _need(program: str) -> None:
    if missing := servers.lacking(program):
        pytest.skip(missing)


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Valkey]:
    _need("valkey")
    with servers.valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[servers.Valkey]:
    """One that the test may end."""
    _need("valkey")
    with servers.valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> servers.Tls:
    return servers.tls_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def redis7(tmp_path_factory: pytest.TempPathFactory, tls: servers.Tls) -> Iterator[servers.Valkey]:
    """Redis 7 with TLS, which asks for the client's certificate, and a user who may do no more than is needed."""
    _need("redis-server")
    rules = "~test*:* " + " ".join(["-@all", *servers.COMMANDS])
    with servers.redis7(
        tmp_path_factory.mktemp("redis"),
        tls,
        "--tls-auth-clients",
        "yes",
        user="kv",
        password="pa:ss@wo%rd",
        rules=rules,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[servers.Valkey]]:
    _need("valkey")
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Sentinels]:
    _need("valkey")
    with servers.sentinels(tmp_path_factory.mktemp("sentinels")) as found:
        yield found
