"""What becomes of chunks in a store, and what bad days of its processes cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.mooncake import MooncakeBackend, MooncakeOptions
from lmcache_core import Cache
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.mooncake.test_conformance import Raw
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, open_cache, retrieve, store, until
from tests.servers import mooncake

KIB, MIB = 2**10, 2**20
STORED = WriteResult.STORED
ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def opened(master: str, **settings: Any) -> AsyncIterator[MooncakeBackend]:
    backend = MooncakeBackend(MooncakeOptions(master=master, **settings))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def value_of(backend: MooncakeBackend, number: int, nbytes: int) -> bytes | ReadResult:
    buffer = aligned_buffer(nbytes)
    (result,) = await backend.read([make_key(number)], [buffer])
    return bytes(buffer) if result is ReadResult.HIT else result


async def test_a_value_that_is_there_is_not_moved_again(master: str, prefix: str) -> None:
    old, new = make_chunk(make_key(1), MIB), make_chunk(make_key(1), MIB, version=1)
    async with opened(master, prefix=prefix) as backend:
        assert await backend.write([old]) == await backend.write([old]) == [STORED]
        counts = backend.counters()
        assert (counts["bytes_written"], counts["writes_spared"], counts["objects_replaced"]) == (MIB, 1, 0)
        assert await backend.write([new]) == [STORED]
        assert await value_of(backend, 1, MIB) == bytes(new.data)
        assert backend.counters()["objects_replaced"] == 1


async def test_a_mixture_of_values_is_no_hit(master: str, prefix: str) -> None:
    chunk = make_chunk(make_key(1), 64 * KIB)
    async with opened(master, prefix=prefix) as backend:
        assert await backend.write([chunk]) == [STORED]
        raw = Raw(master, prefix)
        name = raw._name(chunk.key)
        mixed = bytearray(raw.store.get(name))
        mixed[32 * KIB : 32 * KIB + 8] = b"anothers"
        assert raw.store.remove(name, True) == 0
        assert raw.store.put(name, bytes(mixed)) == 0
        assert await value_of(backend, 1, 64 * KIB) is ReadResult.CORRUPT
        assert await backend.read_any([chunk.key], [aligned_buffer(MIB)]) == [ReadResult.CORRUPT]
        assert backend.counters()["torn_reads"] == 6
        await asyncio.to_thread(raw.store.close)


async def test_hosts_that_replace_a_value_never_show_a_mixture(master: str, prefix: str) -> None:
    versions = [make_chunk(make_key(1), 2 * MIB, version=version) for version in range(4)]
    whole = [bytes(version.data) for version in versions]
    async with opened(master, prefix=prefix) as writer, opened(master, prefix=prefix) as reader:

        async def replace() -> None:
            for number in range(40):
                assert await writer.write([versions[number % 4]]) == [STORED]

        replacing = asyncio.ensure_future(replace())
        while not replacing.done():
            value = await value_of(reader, 1, 2 * MIB)
            assert value in whole or isinstance(value, ReadResult)
        await replacing
        assert await value_of(reader, 1, 2 * MIB) == whole[3]


async def test_a_host_of_the_store_gives_memory_and_a_full_store_says_so(store_files: Path) -> None:
    with mooncake.master(store_files / "small") as (_, port):
        async with opened(f"127.0.0.1:{port}") as guest:
            assert await guest.write([make_chunk(make_key(0), MIB)]) == [WriteResult.FULL], "nobody gives any"
            async with opened(f"127.0.0.1:{port}", segment=16 * MIB) as backend:
                chunks = [make_chunk(make_key(number), MIB) for number in range(24)]
                results = await backend.write(chunks)
                assert set(results) == {STORED, WriteResult.FULL}
                assert results.count(STORED) >= 10
                for number, result in enumerate(results):
                    if result is STORED:
                        assert await value_of(guest, number, MIB) in (bytes(chunks[number].data), ReadResult.MISS)
                assert backend.counters()["full"] == results.count(WriteResult.FULL)


async def refusal(**settings: Any) -> tuple[type[Exception], str]:
    """What opening with these options raises."""
    backend = MooncakeBackend(MooncakeOptions(**settings))
    with pytest.raises((ConfigError, BackendError)) as caught:
        await backend.open()
    await backend.close()
    return caught.type, str(caught.value)


async def test_a_master_that_is_not_there(master: str) -> None:
    assert await refusal(master="127.0.0.1:1") == (
        BackendError,
        "mooncake: 127.0.0.1:1: connection refused; start mooncake_master, or correct master; the tier tries again by "
        "itself",
    )
    assert await refusal(master="no-such-host.invalid:50051") == (
        BackendError,
        "mooncake: no-such-host.invalid:50051: there is no host no-such-host.invalid; correct master, or the network's "
        "names",
    )
    kind, line = await refusal(master=master, metadata="http://127.0.0.1:1/metadata")
    assert kind is BackendError
    assert line == (
        f"mooncake: {master}: joining the store as 127.0.0.1 with metadata http://127.0.0.1:1/metadata failed (-1): "
        "the store does not work; look at the lines that Mooncake writes to standard error"
    )


def test_what_is_not_installed_is_named_when_it_is_needed() -> None:
    code = """
import asyncio, sys
sys.modules["mooncake"] = None
from lmcache_backends.mooncake import MooncakeBackend, MooncakeOptions
try:
    asyncio.run(MooncakeBackend(MooncakeOptions(master="h:1")).open())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "ConfigError mooncake: mooncake is not installed; pip install 'lmcache-core[mooncake]', or "
        "mooncake-transfer-engine where CUDA is\n"
    )


@pytest.mark.slow
def test_processes_that_die_cost_misses_and_the_tier_serves_again(store_files: Path) -> None:
    with mooncake.store(store_files / "mortal", 64 * MIB) as (master, host, where):
        tier = {"read_timeout": 1.0, "write_timeout": 2.0}
        with open_cache(MooncakeBackend(MooncakeOptions(master=where)), tiers=[tier]) as cache:
            assert store(cache, "abcd")
            cache.clear(["cpu"])
            until(lambda: retrieve(cache, "abcd") == 4)
            master.kill()
            cache.clear(["cpu"])
            started = time.monotonic()
            for letters in ("abcd", "efgh", "ijkl"):
                assert retrieve(cache, letters) == 0
            assert time.monotonic() - started < 6
            master.restart()
            (store_files / "mortal" / "ready").unlink()
            host.restart()
            until(lambda: store(cache, "qrst") and cache.stats().tiers[0].up, 60)

            def found() -> bool:
                cache.clear(["cpu"])
                return retrieve(cache, "qrst") == 4 or not store(cache, "qrst")

            until(found, 60)


STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
cache = Cache.open(sys.argv[1], namespace())
cache.__enter__()
assert store(cache, "abcdefghij")
if sys.argv[2:] == ["leave"]:
    sys.exit(3)  # as it is
cache.__exit__(None, None, None)
"""


@pytest.mark.parametrize(("how", "code"), [([], 0), (["leave"], 3)])
def test_what_one_process_stores_another_finds(
    master: str, prefix: str, tmp_path: Path, how: list[str], code: int
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\n"
        f"page_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: mooncake\n    master: {master}\n    prefix: {prefix}\n"
    )
    done = subprocess.run([sys.executable, "-c", STORES, str(file), *how], cwd=ROOT, timeout=60)
    assert done.returncode == code
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0
