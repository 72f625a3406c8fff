"""The S3 backend against the suite that every backend inherits, on three servers and with both clients."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import settings

from lmcache_backends.s3 import S3Backend
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
from tests.backends.s3.kit import KIB, Raw, options
from tests.servers.s3 import EXPRESS_BUCKET, Server

ALL = "S3_TESTS"
FEWER = settings(MODEL_SETTINGS, max_examples=40 if os.environ.get(ALL) == "all" else 4)
"""Sequences of calls: each call of these is a request or more."""
MANY_REQUESTS = {"test_a_batch_of_thousands", "test_keys_that_are_alike_do_not_collide"}
RACES = {
    "test_racing_verbs_on_one_key_see_whole_values",
    "test_racing_values_of_different_sizes_are_not_mixed",
    "test_racing_callers_of_different_keys_do_not_meet",
}
SAME_CLIENT = {
    "test_a_cancelled_read_leaves_buffer_and_backend_alone",
    "test_a_cancelled_write_leaves_an_old_or_a_new_value",
    "test_behaves_like_a_dict",
}


class OnServer(StorageBackendTests):
    persistent = True
    bucket: str
    left_out: frozenset[str] = frozenset()
    """Tests that take a server that answers 300 requests a second very long, and say no more than on the others."""

    @pytest.fixture(autouse=True)
    def time_enough(self, request: pytest.FixtureRequest) -> None:
        if request.function.__name__ in self.left_out and os.environ.get(ALL) != "all":
            pytest.skip(f"time is missing: {ALL}=all runs this on all servers")

    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent, settings=FEWER)

    @pytest.fixture
    def server(self) -> Server:
        raise NotImplementedError

    @pytest.fixture
    def backend_factory(self, server: Server, prefix: str) -> BackendFactory:
        # Parts are small, so that the suite's values have several.
        return lambda: S3Backend(options(server, bucket=self.bucket, prefix=prefix, part=512 * KIB))

    @pytest.fixture
    def raw_server(self, server: Server) -> Server:
        return server

    @pytest.fixture
    def raw(self, raw_server: Server, prefix: str) -> Raw:
        return Raw(raw_server, prefix, self.bucket)

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


class TestSeaweed(OnServer):
    bucket = "kv-tests"

    @pytest.fixture
    def server(self, seaweed: Server) -> Server:
        return seaweed


class TestMoto(OnServer):
    bucket = "kv-tests"
    left_out = frozenset(MANY_REQUESTS | RACES | SAME_CLIENT)

    @pytest.fixture
    def server(self, moto: Server) -> Server:
        return moto


class TestExpress(OnServer):
    """Behind the shim is moto, which is asked directly by what goes past the code under test."""

    bucket = EXPRESS_BUCKET
    left_out = frozenset(MANY_REQUESTS | RACES | {"test_a_batch_of_many_sizes", "test_behaves_like_a_dict"})

    @pytest.fixture
    def server(self, express: Server) -> Server:
        return express

    @pytest.fixture
    def raw_server(self, moto: Server) -> Server:
        return moto
