"""Payloads past host memory: with KvikIO's stand-in here, with KvikIO itself on a fake driver in `test_driven.py`.
Every byte that a device gets is looked at."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lmcache_backends.gds import GdsBackend
from lmcache_backends.nfs import NfsBackend, NfsOptions
from lmcache_core.errors import BackendError, UsageError
from lmcache_core.frame import Codec, Coding, Page, finish, verify
from lmcache_core.protocols import DeviceDirect, DirectWrite, ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer
from tests.backends.gds.kit import KIB, MIB, Device, Framed, file_of, files, framed, opened, options, value

UNTOUCHED = b"\xa5"


def fresh(device: Device, nbytes: int) -> int:
    """Device memory with nothing of ours in it."""
    address = device.allocate(nbytes)
    device.put(address, UNTOUCHED * nbytes)
    return address


def corrupt(path: Path, one: Framed, at: int) -> None:
    """Change a bit of a file."""
    with file_of(path, one.chunk.key).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def no_copies(address: int, into: memoryview) -> None:
    raise AssertionError("nothing is to be copied back")


def test_it_says_that_it_can(path: Path) -> None:
    assert isinstance(GdsBackend(options(path)), DeviceDirect)
    assert not isinstance(NfsBackend(NfsOptions(path=str(path))), DeviceDirect)


RUNS = [(4, 2, 16 * KIB), (1, 1, 4 * KIB), (3, 2, 5 * KIB + 8), (2, 1, 5 * MIB + 512), (7, 3, 100)]


@pytest.mark.parametrize(("pages", "shards", "page_bytes"), RUNS)
async def test_pages_arrive_where_they_shall_and_nowhere_else(
    device: Device, path: Path, pages: int, shards: int, page_bytes: int
) -> None:
    one = framed(pages=pages, shards=shards, page_bytes=page_bytes)
    async with opened(path) as backend:
        assert await backend.write([one.plain()]) == [WriteResult.STORED]
        runs = [
            (shard, first, end - first)
            for shard in range(shards)
            for first, end in itertools.combinations(range(pages + 1), 2)
        ]
        around = 64
        for shard, first, count in runs[:: max(1, len(runs) // 12)]:
            nbytes = count * page_bytes
            address = fresh(device, nbytes + 2 * around)
            read = one.pages(shard, first, count, address + around)
            assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
            wanted = one.of_shard(shard)[first * page_bytes :][:nbytes]
            assert device.get(address, nbytes + 2 * around) == UNTOUCHED * around + wanted + UNTOUCHED * around


@pytest.mark.parametrize(("pages", "shards", "page_bytes"), RUNS)
@pytest.mark.parametrize("trust", [False, True])
async def test_what_is_written_from_a_device_is_a_frame_as_any_other(
    device: Device, path: Path, pages: int, shards: int, page_bytes: int, trust: bool
) -> None:
    """Byte for byte what the same chunk is when it comes from host memory, so every reader can check it."""
    one = framed(pages=pages, shards=shards, page_bytes=page_bytes)
    async with opened(path, trust=trust) as backend:
        assert await backend.write_direct([one.on(device)], device.copy_back) == [WriteResult.STORED]
        assert await value(backend, one.chunk.key, one.form.nbytes) == one.frame
        verify(one.frame, one.form, one.chunk.key.space, one.chunk.parent, one.chunk.pages)
        address = fresh(device, one.form.shard_bytes)
        read = one.pages(shards - 1, 0, pages, address)
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
        assert device.get(address, one.form.shard_bytes) == one.of_shard(shards - 1)
        counted = backend.counters()
    assert file_of(path, one.chunk.key).read_bytes() == one.frame
    assert counted["direct_bytes_written"] == one.form.payload_bytes
    assert counted["direct_bytes_read"] == one.form.shard_bytes
    compared = one.form.payload_bytes * (1 if trust else 2) + (0 if trust else one.form.shard_bytes)
    assert counted["direct_verified_bytes"] == compared


async def test_many_at_once_do_not_meet(device: Device, path: Path) -> None:
    chunks = [framed(number) for number in range(24)]
    async with opened(path, threads=4) as backend:
        writes = [one.on(device) for one in chunks]
        assert await backend.write_direct(writes, device.copy_back) == [WriteResult.STORED] * 24
        addresses = [fresh(device, one.form.shard_bytes) for one in chunks]
        pairs = list(zip(chunks, addresses, strict=True))
        reads = [one.pages(number % 2, 0, 4, address) for number, (one, address) in enumerate(pairs)]
        halves = await asyncio.gather(*(backend.read_direct(reads[n::2], device.copy_back) for n in range(2)))
        assert halves == [[ReadResult.HIT] * 12] * 2
        for number, (one, address) in enumerate(pairs):
            assert device.get(address, one.form.shard_bytes) == one.of_shard(number % 2)
    assert len(files(path)) == 24


async def test_results_are_in_the_order_of_what_was_asked(device: Device, path: Path) -> None:
    there, cut, absent = framed(1), framed(2), framed(3)
    address = fresh(device, there.form.shard_bytes)
    async with opened(path) as backend:
        await backend.write([there.plain(), cut.plain()])
        os.truncate(file_of(path, cut.chunk.key), cut.form.nbytes - 4 * KIB)
        reads = [one.pages(0, 0, 1, address) for one in (absent, cut, there, absent)]
        results = await backend.read_direct(reads, device.copy_back)
        assert results == [ReadResult.MISS, ReadResult.CORRUPT, ReadResult.HIT, ReadResult.MISS]
        assert await backend.read_direct([], device.copy_back) == []
        assert await backend.write_direct([], device.copy_back) == []
        assert backend.counters()["direct_corrupt"] == 1


async def test_writes_of_one_key_in_a_batch_are_made_in_turn(device: Device, path: Path) -> None:
    """The last one is to stay: each finds the one in front of it stored."""
    versions = [framed(version=version) for version in range(3)]
    file = file_of(path, versions[0].chunk.key)
    writes = [one.on(device) for one in versions]
    found: list[bytes | None] = []

    def looking(address: int, into: memoryview) -> None:
        if any(address == write.addresses[0] for write in writes):
            found.append(file.read_bytes() if file.exists() else None)
        device.copy_back(address, into)

    async with opened(path) as backend:
        assert await backend.write_direct(writes, looking) == [WriteResult.STORED] * 3
    assert found == [None, versions[0].frame, versions[1].frame]
    assert file.read_bytes() == versions[2].frame


def places(one: Framed) -> Iterator[tuple[int, bool]]:
    """A bit in every part of a frame, and whether it matters for page 1 of shard 0 if pages are trusted."""
    header = one.form.header_bytes
    page = header + one.chunk.page_bytes
    yield from ((at, True) for at in (0, 8, 40, 64, 100, 200, 320, header - 1))
    yield from ((at, False) for at in (page, page + 5000, page + one.chunk.page_bytes - 1))


@pytest.mark.parametrize("trust", [False, True])
async def test_a_bit_that_changed_is_found_unless_payloads_are_trusted(device: Device, path: Path, trust: bool) -> None:
    one = framed()
    address = fresh(device, one.chunk.page_bytes)
    read = one.pages(0, 1, 1, address)
    async with opened(path, trust=trust) as backend:
        for at, in_header in places(one):
            await backend.write([one.plain()])
            corrupt(path, one, at)
            (result,) = await backend.read_direct([read], no_copies if trust else device.copy_back)
            assert result is (ReadResult.CORRUPT if in_header or not trust else ReadResult.HIT), at


async def test_what_is_damaged_elsewhere_in_the_chunk_does_not_matter(device: Device, path: Path) -> None:
    """As partial reads have it everywhere: the pages that are read are checked."""
    one = framed()
    address = fresh(device, one.chunk.page_bytes)
    async with opened(path) as backend:
        await backend.write([one.plain()])
        corrupt(path, one, one.form.header_bytes + 3 * one.chunk.page_bytes)
        for page, result in ((2, ReadResult.HIT), (3, ReadResult.CORRUPT)):
            assert await backend.read_direct([one.pages(0, page, 1, address)], device.copy_back) == [result]


async def test_another_chunk_in_its_place_is_no_hit(device: Device, path: Path) -> None:
    one = framed()
    address = fresh(device, one.form.shard_bytes)
    others = [framed(2), framed(pages=3), framed(shards=1), framed(page_bytes=8 * KIB)]
    async with opened(path, trust=True) as backend:
        for other in others:
            await backend.write([one.plain()])
            file_of(path, one.chunk.key).write_bytes(other.frame)
            assert await backend.read_direct([one.pages(0, 0, 1, address)], no_copies) == [ReadResult.CORRUPT]
        await backend.write([one.plain()])
        orphan = one._replace(chunk=one.chunk._replace(parent=bytes(31) + b"p"))
        assert await backend.read_direct([orphan.pages(0, 0, 1, address)], no_copies) == [ReadResult.CORRUPT]
        assert await backend.read_direct([one.pages(0, 0, 1, address)], no_copies) == [ReadResult.HIT]


@pytest.mark.parametrize("nbytes", [0, 1, 4 * KIB - 1, 4 * KIB, 8 * KIB, -1, 4 * KIB + 10**6])
async def test_a_file_of_another_length_is_no_hit(device: Device, path: Path, nbytes: int) -> None:
    one = framed()
    address = fresh(device, one.form.shard_bytes)
    async with opened(path, trust=True) as backend:
        await backend.write([one.plain()])
        os.truncate(file_of(path, one.chunk.key), nbytes if nbytes >= 0 else one.form.nbytes - 1)
        assert await backend.read_direct([one.pages(0, 0, 4, address)], no_copies) == [ReadResult.CORRUPT]


@pytest.mark.parametrize(
    "coding", [Coding(Codec.ZSTD), Coding(Codec.NONE, b"k" * 16, b"s" * 32)], ids=["compressed", "encrypted"]
)
async def test_a_coded_frame_is_a_miss_and_stays(device: Device, path: Path, coding: Coding) -> None:
    """It can be read through host memory, where it is decoded."""
    one = framed()
    chunk = one.chunk
    table = [Page(chunk.page_bytes, b"t" * 16)] * 8
    finish(one.frame, one.form, chunk.key.space, chunk.parent, chunk.pages, coding, table)
    address = fresh(device, chunk.page_bytes)
    async with opened(path) as backend:
        await backend.write([one.plain()])
        assert await backend.read_direct([one.pages(0, 0, 1, address)], device.copy_back) == [ReadResult.MISS]
        assert backend.counters()["direct_coded"] == 1
        assert await backend.contains([chunk.key]) == [True]
    assert device.get(address, chunk.page_bytes) == UNTOUCHED * chunk.page_bytes


async def test_sums_of_the_caller_are_those_of_the_header(device: Device, path: Path) -> None:
    one = framed()
    size = one.chunk.page_bytes
    sums = tuple(xxhash.xxh3_128_digest(one.payload[at : at + size]) for at in range(0, one.form.payload_bytes, size))
    async with opened(path) as backend:
        write = one.on(device)._replace(sums=sums)
        assert await backend.write_direct([write], no_copies) == [WriteResult.STORED]
        assert file_of(path, one.chunk.key).read_bytes() == one.frame


@pytest.mark.parametrize("trust", [False, True])
async def test_wrong_sums_of_the_caller_never_become_a_hit(device: Device, path: Path, trust: bool) -> None:
    one, older = framed(), framed(version=1)
    address = fresh(device, one.form.shard_bytes)
    async with opened(path, trust=trust) as backend:
        await backend.write([older.plain()])
        write = one.on(device)._replace(sums=(b"wrong" + bytes(11),) * 8)
        if trust:
            assert await backend.write_direct([write], no_copies) == [WriteResult.STORED]
        else:
            with pytest.raises(BackendError, match="is not on the medium as it was on the device; look in dmesg"):
                await backend.write_direct([write], no_copies)
            assert await value(backend, one.chunk.key, one.form.nbytes) == older.frame, "the old value stays"
    async with opened(path) as careful:
        expected = ReadResult.CORRUPT if trust else ReadResult.HIT
        assert await careful.read_direct([older.pages(0, 0, 4, address)], device.copy_back) == [expected]
    assert len(files(path)) == 1, "nothing unfinished is left"


@pytest.mark.parametrize(("pages", "shards", "page_bytes"), RUNS)
@pytest.mark.parametrize("left", [0, 0.5, -1])
async def test_a_copy_back_that_leaves_bytes_out_is_no_hit(
    device: Device, path: Path, pages: int, shards: int, page_bytes: int, left: float
) -> None:
    """What a thread copied for the read before is in the same memory, and would be right."""
    one = framed(pages=pages, shards=shards, page_bytes=page_bytes)

    def lacking(address: int, into: memoryview) -> None:
        copied = bytearray(len(into))
        device.copy_back(address, memoryview(copied))
        end = int(len(into) * left) if left >= 0 else len(into) - 8
        into[:end] = copied[:end]

    async with opened(path, threads=1) as backend:
        await backend.write([one.plain()])
        read = one.pages(0, pages - 1, 1, fresh(device, page_bytes))
        for _ in range(3):
            assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
            assert await backend.read_direct([read], lacking) == [ReadResult.CORRUPT]


class Medium:
    """How a file is each time that it is asked to be on the medium, by the frame that it shall become."""

    def __init__(self, one: Framed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, bool, bool]] = []
        """Which call, whether what is behind the first page is all there, and whether the first page is."""
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._spied(name, getattr(os, name), one))

    def _spied(self, name: str, real: Callable[[int], None], one: Framed) -> Callable[[int], None]:
        def spy(fd: int) -> None:
            content = Path(f"/proc/self/fd/{fd}").read_bytes()
            start, rest = bytes(one.frame[: 4 * KIB]), bytes(one.frame[4 * KIB :])
            self.found.append((name, content[4 * KIB :][: len(rest)] == rest, content[: 4 * KIB] == start))
            real(fd)

        return spy


@pytest.mark.parametrize("verb", ["write_direct", "write"])
@pytest.mark.parametrize("host_memory", ["plain", "kvikio"])
@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize("page_bytes", [16 * KIB, 5 * KIB + 8])
async def test_a_header_that_is_believed_is_written_once_the_payload_is_on_the_medium(
    device: Device,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    host_memory: str,
    direct: str,
    page_bytes: int,
) -> None:
    """A machine that stops may leave what was written last and nothing of what was written before it."""
    one = framed(page_bytes=page_bytes)
    medium = Medium(one, monkeypatch)
    for changes, expected in (
        ({"trust": True}, [("fdatasync", True, False)]),
        ({"trust": True, "fsync": True}, [("fsync", True, True)]),  # it has no name before that
        ({}, []),
    ):
        medium.found.clear()
        async with opened(path, host_memory=host_memory, direct=direct, **changes) as backend:
            write = backend.write([one.plain()])
            if verb == "write_direct":
                write.close()
                write = backend.write_direct([one.on(device)], device.copy_back)
            assert await write == [WriteResult.STORED]
            assert file_of(path, one.chunk.key).read_bytes() == one.frame
        whole_header = one.form.header_bytes == 4 * KIB
        assert whole_header
        assert medium.found == expected


@pytest.mark.parametrize(("code", "result"), [(errno.EIO, None), (errno.ENOSPC, WriteResult.FULL)])
async def test_a_payload_that_does_not_get_to_the_medium_is_not_stored(
    device: Device, path: Path, monkeypatch: pytest.MonkeyPatch, code: int, result: WriteResult | None
) -> None:
    one = framed()

    def fails(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", fails)
    async with opened(path, trust=True) as backend:
        for call in (backend.write([one.plain()]), backend.write_direct([one.on(device)], device.copy_back)):
            if result is None:
                with pytest.raises(BackendError, match="Input/output error"):
                    await call
            else:
                assert await call == [result]
    assert files(path) == []


async def test_a_copy_back_that_fails_is_a_failure_of_the_tier(device: Device, path: Path) -> None:
    one = framed()
    address = fresh(device, one.form.shard_bytes)

    def lost(address: int, into: memoryview) -> None:
        raise ValueError("the device is lost")

    async with opened(path) as backend:
        await backend.write([one.plain()])
        for call in (
            backend.read_direct([one.pages(0, 0, 1, address)], lost),
            backend.write_direct([framed(2).on(device)], lost),
        ):
            with pytest.raises(BackendError, match="gds: a device's memory cannot be copied back: the device is lost"):
                await call
    assert len(files(path)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shard": 2}, "pages 0 to 0 of shard 2 are not in a chunk of 4 pages and 2 shards"),
        ({"shard": -1}, "pages 0 to 0 of shard -1 are not"),
        ({"first": 4}, "pages 4 to 4 of shard 0 are not"),
        ({"first": -1}, "pages -1 to -1 of shard 0 are not"),
        ({"first": 2, "pages": 3}, "pages 2 to 4 of shard 0 are not"),
        ({"pages": 0}, "are not in a chunk"),
        ({"address": 0}, "0 is no address of a device's memory"),
        ({"address": 2**64}, f"{2**64} is no address of a device's memory"),
        ({"address": 2**64 - 16 * KIB + 1}, "is no address of a device's memory"),
    ],
)
async def test_pages_that_cannot_be_are_refused_before_anything_is_touched(
    device: Device, path: Path, changes: dict[str, Any], said: str
) -> None:
    one = framed()
    async with opened(path) as backend:
        await backend.write([one.plain()])
        fine = one.pages(0, 0, 1, fresh(device, one.chunk.page_bytes))
        with pytest.raises(UsageError, match=said):
            await backend.read_direct([fine, fine._replace(**changes)], device.copy_back)
        assert device.get(fine.address, one.chunk.page_bytes) == UNTOUCHED * one.chunk.page_bytes


async def test_chunks_that_cannot_be_are_refused(device: Device, path: Path) -> None:
    one = framed()
    write = one.on(device)
    wrong: list[tuple[DirectWrite, str]] = [
        (write._replace(addresses=write.addresses[:1]), "a chunk of 2 shards is written from as many addresses"),
        (write._replace(addresses=(write.addresses[0], 0)), "is written from as many addresses"),
        (write._replace(addresses=(write.addresses[0], 2**64)), "is written from as many addresses"),
        (write._replace(addresses=(2**64 - 4 * 16 * KIB + 1, 4096)), "is written from as many addresses"),
        (write._replace(sums=(bytes(16),) * 7), "a chunk of 8 pages in all its shards has as many sums"),
        (write._replace(sums=(bytes(8),) * 8), "has as many sums of 16 bytes"),
        (
            write._replace(chunk=one.chunk._replace(pages=one.chunk.pages[:-1])),
            "a chunk's key is that of its last page",
        ),
        (write._replace(chunk=one.chunk._replace(pages=())), "a chunk's key is that of its last page"),
    ]
    async with opened(path) as backend:
        for each, said in wrong:
            with pytest.raises(UsageError, match=said):
                await backend.write_direct([each], device.copy_back)
        assert files(path) == []


@pytest.mark.parametrize("what", ["space", "page", "last page", "parent"])
async def test_keys_of_another_length_are_refused(device: Device, path: Path, what: str) -> None:
    one = framed()
    chunk, key = one.chunk, one.chunk.key
    wrong = {
        "space": chunk._replace(key=key._replace(space=b"s" * 5)),
        "page": chunk._replace(pages=(b"p" * 3, *chunk.pages[1:])),
        "last page": chunk._replace(key=key._replace(page=b"p" * 33), pages=(*chunk.pages[:-1], b"p" * 33)),
        "parent": chunk._replace(parent=b"p"),
    }[what]
    said = "keys of a chunk's space and pages have 32 bytes, its parent has as many or none"
    async with opened(path) as backend:
        write = one.on(device)
        with pytest.raises(UsageError, match=said):
            await backend.write_direct([write._replace(chunk=wrong)], device.copy_back)
        read = one.pages(0, 0, 1, write.addresses[0])
        with pytest.raises(UsageError, match=said):
            await backend.read_direct([read._replace(chunk=wrong)], device.copy_back)
        assert files(path) == []


async def test_memory_that_is_no_devices_is_left_alone(device: Device, path: Path) -> None:
    """Host memory, or an address that has nothing: an error, and no byte moves."""
    one = framed()
    into = aligned_buffer(one.chunk.page_bytes)
    async with opened(path) as backend:
        await backend.write([one.plain()])
        with pytest.raises((BackendError, AssertionError)):
            await backend.read_direct([one.pages(0, 0, 1, 4096)], device.copy_back)
        assert into == bytes(one.chunk.page_bytes)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.needs_root
async def test_a_full_file_system_stores_nothing_and_loses_nothing(device: Device, small: Path) -> None:
    chunks = [framed(number, page_bytes=128 * KIB) for number in range(12)]
    async with opened(small / "kv") as backend:
        results = []
        for one in chunks:
            results += await backend.write_direct([one.on(device)], device.copy_back)
        assert results.count(WriteResult.STORED) >= 5
        assert results[-1] is WriteResult.FULL
        assert backend.counters()["full"] == results.count(WriteResult.FULL)
        address = fresh(device, chunks[0].form.shard_bytes)
        assert await backend.read_direct([chunks[0].pages(1, 0, 4, address)], device.copy_back) == [ReadResult.HIT]
        assert device.get(address, chunks[0].form.shard_bytes) == chunks[0].of_shard(1)
    assert len(files(small / "kv")) == results.count(WriteResult.STORED)
