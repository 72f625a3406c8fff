"""A store of this package's tests: started once, when a test first needs it, and ended with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.servers import mooncake


@pytest.fixture(scope="session")
def store_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := mooncake.lacking():
        pytest.skip(lacking)
    return tmp_path_factory.mktemp("mooncake")


@pytest.fixture(scope="session")
def master(store_files: Path) -> Iterator[str]:
    """Where the master of a store with 512 MiB is."""
    with mooncake.store(store_files / "store", 512 << 20) as (_, _, where):
        yield where


@pytest.fixture
def prefix() -> str:
    """Names of one test's own."""
    return f"t{uuid4().hex}"
