"""The kit passes what is right, and its parts do what they say."""

import subprocess
import sys

import pytest

from lmcache_core.protocols import (
    Abortable,
    CountsEvents,
    Describes,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
)
from lmcache_core.testing import (
    BackendFactory,
    GuardedBuffer,
    RawCorrupt,
    RawRead,
    RawWrite,
    StorageBackendTests,
    aligned_buffer,
    flip_bit,
    make_chunk,
    make_key,
    random_frame,
)
from tests.testing.reference import Medium, ReferenceBackend


class TestReference(StorageBackendTests):
    persistent = True

    @pytest.fixture
    def medium(self) -> Medium:
        return Medium()

    @pytest.fixture
    def backend_factory(self, medium: Medium) -> BackendFactory:
        return lambda: ReferenceBackend(medium)

    @pytest.fixture
    def bounded_factory(self) -> BackendFactory:
        medium = Medium(capacity=1 << 20)
        return lambda: ReferenceBackend(medium)

    @pytest.fixture
    def raw_read(self, medium: Medium) -> RawRead:
        return medium.read

    @pytest.fixture
    def raw_write(self, medium: Medium) -> RawWrite:
        return medium.write

    @pytest.fixture
    def raw_corrupt(self, medium: Medium) -> RawCorrupt:
        return medium.corrupt

    def test_has_every_capability_so_that_no_test_is_skipped(self) -> None:
        backend: StorageBackend = ReferenceBackend(Medium())
        for capability in (Abortable, CountsEvents, Describes, RemembersUse, ReportsUsage, Scannable):
            assert isinstance(backend, capability)


def address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize("nbytes", [4096, 12288, 1 << 20])
def test_buffers_are_aligned(nbytes: int) -> None:
    for view in (aligned_buffer(nbytes), random_frame(nbytes, 1), GuardedBuffer(nbytes).view):
        assert address(view) % 4096 == 0
        assert view.nbytes == nbytes
        assert view.format == "B"


@pytest.mark.parametrize("nbytes", [0, -4096, 100, 4097])
def test_other_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        aligned_buffer(nbytes)


def test_frames_follow_from_their_seed() -> None:
    assert random_frame(8192, 1) == random_frame(8192, 1)
    assert random_frame(8192, 1) != random_frame(8192, 2)
    assert random_frame(8192, 1).readonly
    assert len(set(random_frame(8192, 1))) == 256


def test_a_chunk_is_as_the_contract_says() -> None:
    chunk, other = make_chunk(make_key(1), 8192, pages=3), make_chunk(make_key(1), 8192, version=1)
    assert chunk.key == make_key(1) != make_key(2)
    assert chunk.pages[-1] == chunk.key.page
    assert len(set(chunk.pages)) == 3
    assert {len(digest) for digest in (*chunk.pages, *chunk.key)} == {32}
    assert chunk.data.readonly
    assert chunk.data != other.data
    assert make_chunk(make_key(1), pages=1).pages == (make_key(1).page,)


def test_one_bit_is_flipped() -> None:
    digest = make_key(1).page
    assert [a ^ b for a, b in zip(digest, flip_bit(digest, 9), strict=True)] == [0, 2] + [0] * 30
    assert flip_bit(flip_bit(digest, 255), 255) == digest


@pytest.mark.parametrize("offset", [-1, -4096, 8192, 8192 + 4095])
def test_a_guard_notices_one_byte(offset: int) -> None:
    buffer = GuardedBuffer(8192)
    buffer.view[:] = b"\xff" * 8192
    buffer.assert_intact()
    buffer._memory[4096 + offset] ^= 1
    with pytest.raises(AssertionError, match="in front" if offset < 0 else "behind"):
        buffer.assert_intact()


@pytest.mark.parametrize("absent", ["hypothesis", "pytest", "pytest_asyncio"])
def test_without_the_extra_the_error_names_it(absent: str) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None; import lmcache_core.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "pip install 'lmcache-core[testing]'" in last
    assert absent in last


def test_nothing_else_needs_the_extra() -> None:
    code = "import sys, lmcache_core.protocols, lmcache_core.wrappers, lmcache_backends.cpu\n"
    code += "print(sorted({'pytest', 'hypothesis', '_pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
