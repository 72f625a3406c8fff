"""Hosts that know of each other by one file system only: GlusterFS, mounted once for each of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_backends.nfs import NfsBackend
from lmcache_core import Cache
from lmcache_core.config import BreakerConfig
from lmcache_core.protocols import Chunk, ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.nfs.kit import HOUR, KIB, MIB, Two, file_of, files, opened, options, unfinished, value
from tests.backends.nfs.kit import until as soon_that
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, open_cache, retrieve, store, until
from tests.servers import gluster

pytestmark = pytest.mark.needs_root
ROOT = Path(__file__).parents[3]
SIZE = 256 * KIB
SOON = 20.0


def settings(path: Path, **tier: object) -> str:
    """A node with room for a few chunks, and a directory below it."""
    lines = "".join(f"    {key}: {value}\n" for key, value in tier.items())
    return (
        f"chunk_tokens: {CHUNK_TOKENS}\npage_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: nfs\n    path: {path}\n{lines}"
    )


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        check=True,
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
    )


STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, sys.argv[2])
"""


def test_what_a_process_of_one_host_stores_a_process_of_another_finds(shared: Two, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(settings(shared.one))
    (tmp_path / "two.yaml").write_text(settings(shared.two))
    run(STORES, tmp_path / "one.yaml", "abcdefghij")
    with Cache.open(tmp_path / "two.yaml", namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0
        assert cache.stats().tiers[0].name == "nfs"
    manifests = [name for name in files(shared.true) if name.startswith("manifests/")]
    assert len(manifests) == 1


def test_what_was_not_there_a_moment_ago_is_found_soon(shared: Two, tmp_path: Path) -> None:
    """A host that has just looked in vain may believe for a second that there is nothing."""
    (tmp_path / "one.yaml").write_text(settings(shared.one))
    (tmp_path / "two.yaml").write_text(settings(shared.two))
    with Cache.open(tmp_path / "two.yaml", namespace()) as two, Cache.open(tmp_path / "one.yaml", namespace()) as one:
        assert retrieve(two, "abcd") == 0
        assert store(one, "abcd")
        until(lambda: retrieve(two, "abcd") == 4, SOON)


async def test_of_two_writers_of_one_key_one_value_stays_whole(shared: Two) -> None:
    versions = [make_chunk(make_key(1), SIZE, version=version) for version in range(20)]
    whole = [bytes(version.data) for version in versions]
    async with opened(shared.one) as one, opened(shared.two) as two:

        async def write(backend: NfsBackend, chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                assert await backend.write([chunk]) == [WriteResult.STORED]

        await asyncio.gather(write(one, versions[::2]), write(two, versions[1::2]))
        final = file_of(shared.true, make_key(1)).read_bytes()
        assert final in (whole[18], whole[19])
        for backend in (one, two):
            await soon(backend, final)
    assert unfinished(shared.true) == []
    assert len(files(shared.true)) == 1


async def soon(backend: NfsBackend, wanted: bytes) -> None:
    """The value is seen in a while; until then it is an older one or a miss, never a mixture."""
    async with asyncio.timeout(SOON):
        while await value(backend, make_key(1), len(wanted)) != wanted:  # noqa: ASYNC110  polling: nobody tells
            await asyncio.sleep(0.05)


async def test_a_reader_that_races_with_a_writer_of_another_host_sees_whole_values(shared: Two) -> None:
    versions = [make_chunk(make_key(1), SIZE, version=version) for version in range(25)]
    whole = {bytes(version.data) for version in versions}
    seen: list[object] = []
    async with opened(shared.one) as writer, opened(shared.two) as reader:
        await writer.write(versions[:1])
        done = False

        async def read() -> None:
            while not done:
                seen.append(await value(reader, make_key(1), SIZE))

        readers = [asyncio.ensure_future(read()) for _ in range(3)]
        for version in versions:
            assert await writer.write([version]) == [WriteResult.STORED]
        done = True
        await asyncio.gather(*readers)
        await soon(reader, bytes(versions[-1].data))
    hits = [each for each in seen if isinstance(each, bytes)]
    assert [len(each) for each in hits if each not in whole] == []
    assert hits
    assert ReadResult.CORRUPT not in seen


async def test_directories_that_one_host_removes_another_makes_again(shared: Two) -> None:
    chunk, newer = make_chunk(make_key(1), SIZE), make_chunk(make_key(1), SIZE, version=1)
    async with opened(shared.one) as one, opened(shared.two) as two:
        await one.write([chunk])
        await soon(two, bytes(chunk.data))
        place = file_of(shared.one, chunk.key)
        place.unlink()
        place.parent.rmdir()
        place.parent.parent.rmdir()
        assert await two.write([newer]) == [WriteResult.STORED]
        assert file_of(shared.true, chunk.key).read_bytes() == newer.data
        await soon(one, bytes(newer.data))


async def test_hosts_that_share_a_capacity_keep_it_and_remove_no_more(
    shared: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old chunks, twice as many as fit; then both hosts sweep, as often as they like."""
    monkeypatch.setattr("lmcache_backends.nfs.session.FIRST", 0.2)
    chunks = [make_chunk(make_key(number), 4 * KIB) for number in range(120)]
    async with opened(shared.one) as one:
        await one.write(chunks)
    for number, chunk in enumerate(chunks):
        then = time.time() - HOUR * (1 + (120 - number) / 60)
        os.utime(file_of(shared.true, chunk.key), (then, then))
    capacity = 60 * 4 * KIB
    monkeypatch.setattr("lmcache_backends.nfs.sweep._LEAST_SHARE", capacity // 16)  # 16 parts
    async with (
        opened(shared.one, capacity=capacity, sweep_interval=1.0) as one,
        opened(shared.two, capacity=capacity, sweep_interval=1.0) as two,
    ):

        def swept() -> int:
            return one.counters()["sweeps"] + two.counters()["sweeps"]

        await soon_that(lambda: min(one.counters()["sweeps"], two.counters()["sweeps"]) > 1 and swept() >= 16)
        counts = [one.counters(), two.counters()]
    kept = len([name for name in files(shared.true) if not name.startswith("manifests/")])
    assert 30 <= kept <= 60
    assert counts[0]["swept_chunks"] + counts[1]["swept_chunks"] == 120 - kept
    assert [each["sweeps_failed"] for each in counts] == [0, 0]


async def test_a_chunk_that_one_host_uses_is_kept_for_all(shared: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_backends.nfs.session.FIRST", 0.0)
    chunks = [make_chunk(make_key(number), 4 * KIB) for number in range(4)]
    async with opened(shared.one) as one:
        await one.write(chunks)
    for chunk in chunks:
        os.utime(file_of(shared.true, chunk.key), (time.time() - 2 * HOUR,) * 2)
    async with opened(shared.two) as two:
        await two.touch([chunks[1].key, make_key(99), chunks[2].key])
        assert two.counters()["touches"] == 2
        await two.touch([chunks[1].key, chunks[2].key])
        assert two.counters()["touches"] == 2, "at most once in an hour"
    async with opened(shared.one, ttl=HOUR) as one:
        await soon_that(lambda: one.counters()["sweeps"] > 0)
    assert [file_of(shared.true, chunk.key).exists() for chunk in chunks] == [False, True, True, False]


@pytest.fixture
def frozen(volume: gluster.Volume) -> Iterator[gluster.Mount]:
    """The second mount, whose client process a test may freeze."""
    yield volume.two
    volume.two.thaw()


def test_a_mount_that_hangs_costs_its_deadline_and_is_used_again_when_it_goes_on(
    shared: Two, frozen: gluster.Mount
) -> None:
    backend, near = NfsBackend(options(shared.two, must_be_mounted=True)), CpuBackend(CpuOptions())
    breaker = BreakerConfig(cooldown=0.1, max_cooldown=0.2)
    rules = {"read_timeout": 0.3, "write_timeout": 1.0, "breaker": breaker}
    with open_cache(backend, near, slots=8, tiers=[rules, {}]) as cache:
        assert store(cache, "abcdefgh")
        cache.clear(["cpu", "t1"])
        assert retrieve(cache, "abcdefgh") == 8
        cache.clear(["cpu", "t1"])
        frozen.freeze()
        start = time.monotonic()
        assert retrieve(cache, "abcdefgh") == 0
        assert time.monotonic() - start < 3
        start = time.monotonic()
        store(cache, "ijklmnop")
        cache.clear(["cpu"])
        assert retrieve(cache, "ijklmnop") == 8, "the other tier has it"
        assert time.monotonic() - start < 5
        frozen.thaw()
        until(lambda: cache.stats().tiers[0].up, SOON)
        until(lambda: retrieve(cache, "abcdefgh") == 8, SOON)


HANGS = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, retrieve, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefgh")
    cache.clear(["cpu"])
    print("stored", flush=True)
    sys.stdin.readline()
    assert retrieve(cache, "abcdefgh") == 0
    assert retrieve(cache, "zyx") == 0
    print("missed", flush=True)
print("closed", flush=True)
"""


def test_a_mount_that_hangs_does_not_hold_up_the_end_of_a_process(
    shared: Two, frozen: gluster.Mount, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(settings(shared.two, read_timeout="300ms", write_timeout="1s"))
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(file)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stored\n"
            frozen.freeze()
            start = time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "missed\n"
            assert process.stdout.readline() == "closed\n"
            assert process.wait(30) == 0
            assert time.monotonic() - start < 20
        finally:
            frozen.thaw()
            process.kill()


async def test_what_hangs_keeps_its_buffer_until_it_has_ended_and_nothing_grows(
    shared: Two, frozen: gluster.Mount
) -> None:
    chunk = make_chunk(make_key(1), MIB)
    async with opened(shared.two, threads=2) as backend:
        await backend.write([chunk])
        frozen.freeze()
        into = aligned_buffer(MIB)
        reading = asyncio.ensure_future(backend.read([chunk.key], [into]))
        done, _ = await asyncio.wait([reading], timeout=0.3)
        assert not done
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=0.3)
        assert not done, "its thread may write to the buffer still"
        frozen.thaw()
        done, _ = await asyncio.wait([reading], timeout=SOON)
        assert reading.cancelled()
        assert await value(backend, chunk.key, MIB) == chunk.data


def test_nodes_with_chunks_of_another_length_leave_each_others_alone(tmp_path: Path) -> None:
    """A name stands for a chunk's last page alone. What lies there with other pages is a miss, shorter or longer."""

    def a_node(chunk_tokens: int) -> Cache:
        tier = {"backend": "nfs", "path": str(tmp_path / "kv"), "must_be_mounted": False}
        pool = {"capacity": "1MiB"}
        settings = {"chunk_tokens": chunk_tokens, "page_tokens": PAGE_TOKENS, "cpu": pool, "tiers": [tier]}
        return Cache.open(settings, namespace())

    short, long = CHUNK_TOKENS, 2 * CHUNK_TOKENS
    with a_node(short) as cache:
        assert store(cache, "abcdefgh")
        assert store(cache, "ijkl")
    with a_node(long) as cache:
        assert store(cache, "ijklmnop")
        assert retrieve(cache, "abcdefgh") < 8
        # What ends there may be the end of a prompt: it is asked for when what was known is forgotten.
        until(lambda: retrieve(cache, "abcdefgh") == 4)
        counts = cache.stats().counts
        assert counts["other_chunks"] == {"nfs": 1}
        assert "corrupt_chunks" not in counts
    with a_node(short) as cache:
        assert retrieve(cache, "abcdefgh") == 8
        until(lambda: retrieve(cache, "ijklmnop") == 4)
        counts = cache.stats().counts
        assert counts["other_chunks"] == {"nfs": 1}
        assert "corrupt_chunks" not in counts
    with a_node(long) as cache:
        assert retrieve(cache, "ijklmnop") == 8
