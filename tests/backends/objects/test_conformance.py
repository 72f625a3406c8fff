"""Azure Blob Storage and Google Cloud Storage against the suite that every backend inherits, on their emulators."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import settings

from lmcache_core.protocols import Chunk
from lmcache_core.testing import (
    MODEL_SETTINGS,
    BackendFactory,
    RawCorrupt,
    RawRead,
    RawWrite,
    StorageBackendTests,
    run_model,
)
from tests.backends.objects.kit import KIB, Place, Raw

ALL = "OBJECTS_TESTS"
FEWER = settings(MODEL_SETTINGS, max_examples=40 if os.environ.get(ALL) == "all" else 4)
"""Sequences of calls: each call of these is a request or more."""
MANY_REQUESTS = {
    "test_a_batch_of_thousands",
    "test_keys_that_are_alike_do_not_collide",
    "test_racing_verbs_on_one_key_see_whole_values",
}


class OnEmulator(StorageBackendTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def time_enough(self, request: pytest.FixtureRequest) -> None:
        if request.function.__name__ in MANY_REQUESTS and os.environ.get(ALL) != "all":
            pytest.skip(f"time is missing: {ALL}=all runs this on emulators that answer some hundred requests a second")

    @pytest.mark.slow
    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def backend_factory(self, place: Place, prefix: str) -> BackendFactory:
        # Parts are small, so that the suite's values have several.
        return lambda: place.backend(prefix=prefix, part=512 * KIB)

    @pytest.fixture
    def raw_read(self, raw: Raw) -> RawRead:
        return raw.read

    @pytest.fixture
    def raw_write(self, raw: Raw) -> RawWrite:
        def write(chunk: Chunk) -> None:
            raw.write(chunk.key, chunk.data)

        return write

    @pytest.fixture
    def raw_corrupt(self, raw: Raw) -> RawCorrupt:
        return raw.cut


class TestAzure(OnEmulator):
    @pytest.fixture
    def place(self, azurite: Place) -> Place:
        return azurite


class TestGcs(OnEmulator):
    @pytest.fixture
    def place(self, google: Place) -> Place:
        return google
