"""Servers of this package's tests: each is started once, when a test first needs it, and ended with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.servers import s3

BUCKET = "kv-tests"


@pytest.fixture(scope="session")
def server_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := s3.lacking():
        pytest.skip(lacking)
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="session")
def seaweed(server_files: Path) -> Iterator[s3.Server]:
    with s3.seaweed(server_files / "seaweed") as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def moto(server_files: Path) -> Iterator[s3.Server]:
    with s3.moto(server_files / "moto") as server:
        server.make_bucket(BUCKET)
        server.make_bucket(s3.EXPRESS_BUCKET)
        yield server


@pytest.fixture(scope="session")
def express(server_files: Path, moto: s3.Server) -> Iterator[s3.Server]:
    with s3.express(server_files, moto) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Names of one test's own."""
    return f"t{uuid4().hex}"
