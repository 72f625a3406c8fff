"""The reference backend passes the kit, and is what the kit can be read against."""

import pytest

from lmcache_backends import cpu
from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.protocols import ReportsUsage, Scannable, Usage, WriteResult
from lmcache_core.testing import BackendFactory, StorageBackendTests, make_chunk, make_key, opened


class TestCpuBackend(StorageBackendTests):
    @pytest.fixture
    def backend_factory(self) -> BackendFactory:
        return lambda: CpuBackend(CpuOptions())

    @pytest.fixture
    def bounded_factory(self) -> BackendFactory:
        return lambda: CpuBackend(CpuOptions(capacity=1 << 20))


async def test_capacity_is_exact() -> None:
    chunks = [make_chunk(make_key(i), 8192) for i in range(4)]
    backend = CpuBackend(CpuOptions(capacity=3 * 8192))
    async with opened(backend):
        stored, full = WriteResult.STORED, WriteResult.FULL
        assert await backend.write(chunks) == [stored, stored, stored, full]
        assert backend.usage() == Usage(3, 24576, 24576)
        assert await backend.write([make_chunk(make_key(0), 8192, version=1)]) == [stored]
        assert await backend.write([make_chunk(make_key(0), 12288)]) == [full]
        assert await backend.write([make_chunk(make_key(0), 4096)]) == [stored]
        assert backend.usage() == Usage(3, 20480, 24576)
    assert backend.usage() == Usage(0, 0, 24576)


def test_capabilities() -> None:
    backend = cpu.lmcache_create_backend(cpu.lmcache_backend_options()())
    assert isinstance(backend, ReportsUsage)
    assert not isinstance(backend, Scannable)
