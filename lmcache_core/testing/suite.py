"""The suite that every backend inherits."""

from __future__ import annotations

import asyncio

from lmcache_core.testing.cancels import CancelTests
from lmcache_core.testing.capabilities import CapabilityTests
from lmcache_core.testing.case import BackendFactory
from lmcache_core.testing.life import LifeTests
from lmcache_core.testing.loop import LoopTests
from lmcache_core.testing.model import run_model
from lmcache_core.testing.races import RaceTests
from lmcache_core.testing.room import RoomTests, given
from lmcache_core.testing.values import ValueTests


# pytest runs the last base's tests first: the simple ones.
class StorageBackendTests(RoomTests, CapabilityTests, LifeTests, CancelTests, RaceTests, LoopTests, ValueTests):
    """Everything the contract in `lmcache_core.protocols` says, as tests.

        class TestMyBackend(StorageBackendTests):
            persistent = True  # a new instance finds what an earlier one stored

            @pytest.fixture
            def backend_factory(self, tmp_path):
                return lambda: MyBackend(MyOptions(path=tmp_path))

            @pytest.fixture
            def bounded_factory(self, tmp_path):  # optional: tests what happens when it is full
                return lambda: MyBackend(MyOptions(path=tmp_path, capacity=4 * 2**20))

    What only some backends can do is found out by `isinstance` with the capability protocols, and skipped without.
    """

    async def test_behaves_like_a_dict(self, backend_factory: BackendFactory) -> None:
        await asyncio.to_thread(run_model, backend_factory, persistent=self.persistent)

    async def test_behaves_like_a_dict_when_nearly_full(self, bounded_factory: BackendFactory | None) -> None:
        await asyncio.to_thread(run_model, given(bounded_factory), persistent=self.persistent, fill=True)
