"""Tiers that compress and encrypt: whole nodes that change keys, meet what they cannot read, and write to tiers that
hang."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_backends.disk.backend import DiskBackend
from lmcache_backends.disk.inspection import inspect_path
from lmcache_backends.disk.options import DiskOptions
from lmcache_core import frame, tier
from lmcache_core.cli.verification import verify_entries
from lmcache_core.coding import coder, recipe
from lmcache_core.coding.cipher import Key
from lmcache_core.coding.worth import AGAIN, TRIES
from lmcache_core.config import CipherConfig
from lmcache_core.errors import ConfigError
from lmcache_core.frame import Codec
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult
from lmcache_core.wrappers import Corrupting, Slow
from tests.node import kv
from tests.node.kv import CHUNK_FRAME, PAGE_BYTES, PageView, at_rest, open_cache, retrieve, store, tokens, until
from tests.node.shelf import Shelf


def secret(name: str) -> str:
    return base64.b64encode(random.Random(name).randbytes(32)).decode()


def cipher(key: str = "a", *older: str, **tenants: str) -> dict[str, Any]:
    """Settings of a tier that encrypts, its keys by names."""
    named = {name: secret(each) for name, each in tenants.items()}
    return {"cipher": CipherConfig(secret(key), tuple(map(secret, older)), named)}


def id_of(name: str) -> bytes:
    return Key(base64.b64decode(secret(name))).id


class Medium(CpuBackend):
    """Keeps what it holds over `close`, as what hosts share does."""

    def __init__(self) -> None:
        super().__init__(CpuOptions())
        self._values = {}

    @property
    def values(self) -> dict[ChunkKey, bytes]:
        assert self._values is not None
        return self._values

    async def close(self) -> None:
        pass


def counted(cache: Any, name: str, label: str = "t0") -> float:
    return float(cache.stats().counts.get(name, {}).get(label, 0))


def plaintext(text: str, cache: Any) -> list[bytes]:
    return [kv.page(key).tobytes() for key in cache.prompt(tokens(text)).keys]


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that shrinks to less than half."""

    def page(key: bytes, group: int = 0) -> Any:
        seed = int.from_bytes(key[:8], "little") + group
        return np.resize(np.random.default_rng(seed).integers(0, 256, PAGE_BYTES // 16, np.uint8), PAGE_BYTES)

    monkeypatch.setattr(kv, "page", page)


# Encryption


def test_what_lies_on_an_encrypted_tier_has_nothing_of_the_text_and_the_same_size() -> None:
    shelf = Shelf()
    with open_cache(shelf, tiers=[cipher()]) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        pages = plaintext("abcd", cache) + plaintext("efgh", cache)
        cache.clear(["cpu"])
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [4, 4]
        at_rest(cache)
    for _, value in shelf.values.values():
        assert len(value) == CHUNK_FRAME
        assert frame.read_header(value).coding.key_id == id_of("a")
        assert not any(page[at : at + 12] in value for page in pages for at in range(0, PAGE_BYTES, 12))
    with open_cache(shelf, tiers=[cipher()]) as cache:  # after a restart
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [4, 4]


def test_keys_are_changed_without_losing_a_hit() -> None:
    shelf = Shelf()
    for key, older, text in (("a", (), "abcd"), ("b", ("a",), "efgh"), ("c", ("b", "a"), "ijkl")):
        with open_cache(shelf, tiers=[cipher(key, *older)]) as cache:
            store(cache, text)
    ids = [frame.read_header(value).coding.key_id for _, value in shelf.values.values()]
    assert ids == [id_of("a"), id_of("b"), id_of("c")]
    with open_cache(shelf, tiers=[cipher("c", "b", "a")]) as cache:
        assert [retrieve(cache, text) for text in ("abcd", "efgh", "ijkl")] == [4, 4, 4]
    with open_cache(shelf, tiers=[cipher("c", "b")]) as cache:
        assert [retrieve(cache, text) for text in ("abcd", "efgh", "ijkl")] == [0, 4, 4]


def test_what_a_tenant_stores_is_encrypted_with_its_key() -> None:
    shelf = Shelf()
    keys = cipher("a", acme="acme", umbrella="umbrella")
    for tenant, text in (("acme", "abcd"), ("umbrella", "efgh"), ("initech", "ijkl"), ("", "mnop")):
        with open_cache(shelf, tiers=[keys], tenant=tenant) as cache:
            store(cache, text)
    ids = [frame.read_header(value).coding.key_id for _, value in shelf.values.values()]
    assert ids == [id_of("acme"), id_of("umbrella"), id_of("a"), id_of("a")]
    with open_cache(shelf, tiers=[cipher("a", umbrella="umbrella")]) as cache:
        assert [retrieve(cache, text) for text in ("abcd", "efgh", "ijkl", "mnop")] == [0, 4, 4, 4]
    with open_cache(shelf, tiers=[cipher("b", "a", "umbrella", "acme")]) as cache:
        assert [retrieve(cache, text) for text in ("efgh", "ijkl", "mnop")] == [4, 4, 4]


def test_a_tenants_chunk_keeps_its_key_when_it_is_promoted() -> None:
    """Whoever reads it, and though a restart has forgotten whose it is."""
    remote, near = Medium(), Shelf()
    keys = cipher("a", acme="acme")
    with open_cache(remote, tiers=[keys], tenant="acme") as cache:
        store(cache, "abcd")
    with open_cache(near, remote, tiers=[keys, keys]) as cache:
        until(lambda: not cache.lookup(tokens("abcd")).pending)
        assert retrieve(cache, "abcd") == 4
        until(lambda: len(near.values) == 1)
        assert cache.flush(10)
    ((_, value),) = near.values.values()
    assert frame.read_header(value).coding.key_id == id_of("acme")


def test_an_unknown_key_is_a_miss_and_one_line_and_deletes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    texts = ["abcd", "efgh", "ijkl", "mnop"]
    with open_cache(shelf, tiers=[cipher("a")]) as cache:
        for text in texts:
            store(cache, text)
    before = dict(shelf.values)
    caplog.set_level(logging.WARNING)
    for settings in (cipher("b"), {}):  # another key; none at all
        caplog.clear()
        with open_cache(shelf, tiers=[settings]) as cache:
            assert [retrieve(cache, text) for text in texts] == [0, 0, 0, 0]
            assert counted(cache, "unknown_key_chunks") == 4
            assert counted(cache, "corrupt_chunks") == 0
            assert cache.stats().tiers[0].up
            at_rest(cache)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert "tier t0" in lines[0]
        assert "key" in lines[0]
        assert secret("b") not in caplog.text
    assert shelf.values == before
    with open_cache(shelf, tiers=[cipher("a")]) as cache:
        assert [retrieve(cache, text) for text in texts] == [4, 4, 4, 4]


def test_plain_chunks_on_an_encrypted_tier_are_misses_and_stay(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    with open_cache(shelf) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
    before = dict(shelf.values)
    with open_cache(shelf, tiers=[cipher()]) as cache:
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [0, 0]
        assert counted(cache, "unencrypted_chunks") == 2
        assert cache.flush(10)
        assert shelf.values == before
        store(cache, "abcd")
    # Lines are written on a thread of their own, which has ended with the node.
    assert len([1 for record in caplog.records if "is not encrypted" in record.getMessage()]) == 1
    assert sorted(frame.read_header(value).coding.encrypted for _, value in shelf.values.values()) == [False, True]


def test_an_encrypted_disk_survives_a_restart_and_can_be_inspected(tmp_path: Path) -> None:
    def disk() -> DiskBackend:
        return DiskBackend(DiskOptions(path=str(tmp_path / "kv"), capacity=16 << 20, min_free=0))

    with open_cache(disk(), tiers=[cipher()]) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        pages = plaintext("abcd", cache) + plaintext("efgh", cache)
    files = b"".join(file.read_bytes() for file in (tmp_path / "kv").rglob("*") if file.is_file())
    assert not any(page[at : at + 12] in files for page in pages for at in range(0, PAGE_BYTES, 64))
    found = inspect_path(tmp_path / "kv")
    assert len(list(found.entries())) == 2
    assert verify_entries(tmp_path / "kv", found.entries(), lambda nbytes: None) == []
    with open_cache(disk(), tiers=[cipher("b", "a")]) as cache:
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [4, 4]


def test_what_was_changed_is_deleted() -> None:
    shelf = Shelf()
    with open_cache(shelf, tiers=[cipher()]) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        cache.clear(["cpu"])
        one, two = list(shelf.values)
        (stored_one, value_one), (stored_two, value_two) = shelf.values[one], shelf.values[two]
        shelf.values[one], shelf.values[two] = (stored_one, value_two), (stored_two, value_one)
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [0, 0]
        assert counted(cache, "corrupt_chunks") == 2
        assert cache.flush(10)
        assert shelf.values == {}


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_whatever_comes_back_no_wrong_byte_is_served(codec: str, smooth: None) -> None:
    for seed in range(6):
        medium = Corrupting(Medium(), seed=seed, probability=0.6)
        with open_cache(medium, tiers=[{"codec": codec, **cipher()}]) as cache:
            texts = ["abcd", "efgh", "ijkl", "mnop", "qrst"]
            for text in texts:
                store(cache, text)
            cache.clear(["cpu"])
            for text in texts:  # each byte is checked
                until(lambda text=text: not cache.lookup(tokens(text)).pending)  # type: ignore[misc]
                assert retrieve(cache, text) in (0, 4)
            assert medium.corrupted
            medium.active = False
            at_rest(cache)


# Compression


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_shrinks_takes_less_than_half(codec: str, encrypted: bool, smooth: None) -> None:
    medium = Medium()
    settings = {"codec": codec, **(cipher() if encrypted else {})}
    with open_cache(medium, tiers=[settings]) as cache:
        for text in ("abcd", "efgh", "ijk"):
            store(cache, text)
        sizes = [len(value) for value in medium.values.values()]
        assert sum(sizes) < (2 * CHUNK_FRAME + CHUNK_FRAME - PAGE_BYTES) / 2
        assert all(size % frame.ALIGN == 0 for size in sizes)
        cache.clear(["cpu"])
        assert [retrieve(cache, text) for text in ("abcd", "efgh", "ijk")] == [4, 4, 3]
        assert counted(cache, "coding_stored_bytes") == sum(sizes)
        assert counted(cache, "coding_plain_bytes") == 3 * CHUNK_FRAME - PAGE_BYTES
        assert counted(cache, "encode_seconds") > 0
        assert counted(cache, "decode_seconds") > 0
        at_rest(cache)


def test_what_does_not_shrink_is_stored_plain_and_soon_not_tried() -> None:
    medium = Medium()
    with open_cache(medium, slots=16, tiers=[{"codec": "zstd"}]) as cache:
        texts = [chr(0x4E00 + number) * 4 for number in range(TRIES + AGAIN + 1)]
        for number, text in enumerate(texts):
            store(cache, text)
            assert counted(cache, "incompressible_chunks") == number + 1
            assert counted(cache, "coding_plain_bytes") == CHUNK_FRAME * (
                min(number + 1, TRIES) + (number == TRIES + AGAIN)
            )
        assert {len(value) for value in medium.values.values()} == {CHUNK_FRAME}
        assert {frame.read_header(value).coding for value in medium.values.values()} == {frame.PLAIN}
        cache.clear(["cpu"])
        until(lambda: not cache.lookup(tokens(texts[0])).pending)
        assert retrieve(cache, texts[0]) == 4


def test_nodes_with_and_without_a_codec_read_each_others_chunks(smooth: None) -> None:
    medium = Medium()
    for codec, text in (("none", "abcd"), ("lz4", "efgh"), ("zstd", "ijkl")):
        with open_cache(medium, tiers=[{"codec": codec}]) as cache:
            store(cache, text)
    assert [frame.read_header(value).coding.codec for value in medium.values.values()] == [*Codec]
    for codec in ("none", "lz4", "zstd"):
        with open_cache(medium, tiers=[{"codec": codec}]) as cache:
            for text in ("abcd", "efgh", "ijkl"):
                until(lambda text=text: not cache.lookup(tokens(text)).pending)  # type: ignore[misc]
                assert retrieve(cache, text) == 4
            assert counted(cache, "corrupt_chunks") == 0
    assert len(medium.values) == 3


def test_a_plain_tier_gets_plain_chunks_from_a_coded_one(smooth: None) -> None:
    near, remote = Shelf(), Medium()
    tiers = [{}, {"codec": "zstd", **cipher()}]
    with open_cache(near, remote, tiers=tiers) as cache:
        store(cache, "abcd")
        assert cache.flush(10)
        assert {len(value) for _, value in near.values.values()} == {CHUNK_FRAME}
        assert all(len(value) < CHUNK_FRAME / 2 for value in remote.values.values())
    plain = dict(near.values)
    near.values.clear()
    with open_cache(near, remote, tiers=tiers) as cache:
        until(lambda: not cache.lookup(tokens("abcd")).pending)
        assert retrieve(cache, "abcd") == 4
        assert cache.flush(10)
        assert near.values == plain
        cache.clear(["cpu", "t1"])
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


# Tiers that hang


class Hung(Shelf):
    """Takes chunks, and looks at their bytes only when it is let go. Cannot be aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.taken = 0

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        self.taken += len(chunks)
        cancelled = False
        while not self.let_go.is_set():
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                cancelled = True
        results = await super().write(chunks)
        if cancelled:
            raise asyncio.CancelledError
        return results


def staged(cache: Any) -> int:
    return sum(runner.coder.staging.used for runner in cache.client.node.runners)


def test_a_late_write_stores_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a chunk was encoded into is nobody else's until the write has really ended."""
    monkeypatch.setattr(coder, "STAGED", 3 * CHUNK_FRAME)
    monkeypatch.setattr(tier, "BATCH_BYTES", CHUNK_FRAME)
    hung = Hung()
    settings = {"write_timeout": 0.05, "concurrency": 8, **cipher()}
    with open_cache(hung, slots=48, tiers=[settings]) as cache:
        texts = [chr(number) * 4 for number in range(0x4E00, 0x4E00 + 12)]
        waits = []
        for text in texts:
            prompt = cache.prompt(tokens(text))
            waits.append(cache.store(prompt, PageView.of(prompt.keys)))
        until(lambda: hung.taken >= 3)
        assert [wait.wait(10) for wait in waits] == [False] * len(texts)
        assert staged(cache) <= 3 * CHUNK_FRAME
        assert hung.taken <= 3, "more was encoded than there is memory for"
        assert retrieve(cache, texts[0]) == 4, "host memory serves on"
        hung.let_go.set()
        until(lambda: staged(cache) == 0)
        until(lambda: cache.stats().tiers[0].quarantined == 0)
        until(lambda: cache.stats().tiers[0].up)
    assert len(hung.values) >= 3
    with open_cache(hung, slots=48, tiers=[cipher()]) as cache:
        assert sum(retrieve(cache, text) for text in texts) == 4 * len(hung.values)
        assert counted(cache, "corrupt_chunks") == 0


def test_a_flood_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "STAGED", 4 * CHUNK_FRAME)
    monkeypatch.setattr(tier, "BATCH_BYTES", CHUNK_FRAME)
    most = 0

    class Watched(Shelf):
        async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
            nonlocal most
            most = max(most, staged(cache))
            await asyncio.sleep(0.001)
            return await super().write(chunks)

    shelf = Watched()
    with open_cache(shelf, slots=128, tiers=[{"concurrency": 16, **cipher()}]) as cache:
        texts = [chr(number) * 4 for number in range(0x4E00, 0x4E00 + 60)]
        waits = []
        for text in texts:
            prompt = cache.prompt(tokens(text))
            waits.append(cache.store(prompt, PageView.of(prompt.keys)))
        assert all(wait.wait(30) for wait in waits)
        assert 0 < most <= 4 * CHUNK_FRAME
        cache.clear(["cpu"])
        assert [retrieve(cache, text) for text in texts] == [4] * 60
        at_rest(cache)
        assert staged(cache) == 0


def test_one_batch_that_is_larger_than_the_memory_is_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "STAGED", CHUNK_FRAME // 2 // frame.ALIGN * frame.ALIGN)
    shelf = Shelf()
    with open_cache(shelf, slots=64, tiers=[cipher()]) as cache:
        text = "".join(chr(number) for number in range(0x4E00, 0x4E00 + 64))
        assert store(cache, text)
        cache.clear(["cpu"])
        assert retrieve(cache, text) == 64
        at_rest(cache)


def test_a_read_past_its_deadline_is_decoded_by_nobody() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=1, tiers=[{"read_timeout": 0.05, **cipher()}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 0
        assert cache.stats().tiers[0].quarantined == CHUNK_FRAME
        prompt = cache.prompt(tokens("efgh"))
        assert cache.store(prompt, PageView.of(prompt.keys)).dropped == 64
        slow.release()
        until(lambda: cache.stats().tiers[0].quarantined == 0)
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


def test_closing_while_a_write_hangs_leaves_its_memory_alone() -> None:
    hung = Hung()
    cache = open_cache(hung, tiers=[{"write_timeout": 0.02, **cipher()}])
    prompt = cache.prompt(tokens("abcd"))
    cache.store(prompt, PageView.of(prompt.keys))
    until(lambda: hung.taken == 1)
    threading.Timer(0.3, hung.let_go.set).start()
    started = time.monotonic()
    cache.close()
    assert time.monotonic() - started < 20
    until(lambda: len(hung.values) == 1)
    with open_cache(hung, tiers=[cipher()]) as again:
        assert retrieve(again, "abcd") == 4


class Liar(Medium):
    """Says of each value that it is of another length."""

    answer: Any = 0

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        await super().read_any(keys, into)
        return [self.answer] * len(keys)


@pytest.mark.parametrize("answer", [0, -1, 4095, 4096, 1 << 40, True, "1", None, ReadResult.HIT])
def test_a_backend_may_answer_anything(answer: Any, smooth: None) -> None:
    liar = Liar()
    liar.answer = answer
    with open_cache(liar, tiers=[{"codec": "lz4"}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        until(lambda: not cache.lookup(tokens("abcd")).pending)
        assert retrieve(cache, "abcd") == 0
        assert cache.flush(10)


# Settings


def test_a_codec_needs_a_backend_that_can_read_any_size() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.codec: backend 'test' .*write 'codec: none'"):
        open_cache(Medium(), Shelf(), tiers=[{"codec": "lz4"}, {"codec": "lz4"}])


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_codec_that_is_not_installed_stops_the_start(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(codec: Codec) -> None:
        raise ImportError(f"No module named {codec.name!r}")

    monkeypatch.setattr(recipe, "load_codec", lacking)
    with pytest.raises(ConfigError, match=rf"tiers\[0\]\.codec: .*pip install 'lmcache-core\[{codec}\]'"):
        open_cache(Medium(), tiers=[{"codec": codec}])


def test_encryption_that_is_not_installed_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache_core.coding.cipher", None)
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.cipher: .*pip install 'lmcache-core\[crypto\]'"):
        open_cache(Shelf(), tiers=[cipher()])


def test_a_key_that_is_none_stops_the_start_untold() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.cipher: a key has 6 bytes instead of 32") as caught:
        open_cache(Shelf(), tiers=[{"cipher": CipherConfig("c2VjcmV0")}])
    assert "c2VjcmV0" not in str(caught.value)
