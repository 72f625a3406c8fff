"""Emulators of this package's tests: each is started once, when a test first needs it, and ended with the session."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.backends.objects.kit import Place, Raw, azure_place, gcs_place
from tests.servers import azure, gcs


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if lacking := azure.lacking():
        pytest.skip(lacking)
    with azure.azurite(tmp_path_factory.mktemp("azure")) as server:
        place = azure_place(server)
        place.make()
        yield place


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if lacking := gcs.lacking():
        pytest.skip(lacking)
    with gcs.serving(tmp_path_factory.mktemp("gcs")) as server:
        place = gcs_place(server)
        place.make()
        yield place


@pytest.fixture(params=["azurite", "google"])
def place(request: pytest.FixtureRequest) -> Place:
    """One of each kind."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def prefix() -> str:
    """Names of one test's own."""
    return f"t{uuid4().hex}"


@pytest.fixture
def raw(place: Place, prefix: str) -> Raw:
    return Raw(place, prefix)
