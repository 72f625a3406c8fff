"""Two processes, each with a node of its own, that know each other by a server only."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_core import Cache
from tests.node import kv
from tests.node.kv import (
    CHUNK_FRAME,
    CHUNK_TOKENS,
    PAGE_BYTES,
    PAGE_TOKENS,
    namespace,
    retrieve,
    store,
    tokens,
    until,
)
from tests.servers.redis import Valkey

ROOT = Path(__file__).parents[3]

STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefghij")
"""


def test_what_one_process_stores_another_finds(valkey: Valkey, prefix: str, tmp_path: Path) -> None:
    file = configured(tmp_path, valkey, prefix)
    subprocess.run([sys.executable, "-c", STORES, str(file)], check=True, cwd=ROOT, timeout=60)
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0


def test_a_bit_that_was_changed_on_the_server_is_a_miss_and_the_chunk_is_deleted(
    valkey: Valkey, prefix: str, tmp_path: Path
) -> None:
    file = configured(tmp_path, valkey, prefix)
    subprocess.run([sys.executable, "-c", STORES, str(file)], check=True, cwd=ROOT, timeout=60)
    with Cache.open(file, namespace()) as cache:
        key = cache.prompt([ord(letter) for letter in "abcdefgh" for _ in range(PAGE_TOKENS)]).keys[-1]
        name = f"{prefix}:{cache.namespace.space(0).hex()}:{key.hex()}"
        value = bytearray(valkey.run("GET", name))
        value[-CHUNK_FRAME // 3] ^= 1
        valkey.run("SET", name, bytes(value))
        assert retrieve(cache, "abcdefghij") == 4
        assert cache.stats().counts["corrupt_chunks"] == {"redis": 1}
        until(lambda: not valkey.run("EXISTS", name))


def test_chunks_are_compressed_and_encrypted(
    valkey: Valkey, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def page(key: bytes, group: int = 0) -> Any:
        return np.resize(np.frombuffer(key, np.uint8), PAGE_BYTES)

    monkeypatch.setattr(kv, "page", page)
    file = configured(tmp_path, valkey, prefix)
    key = base64.b64encode(bytes(range(32))).decode()
    file.write_text(f"{file.read_text()}    codec: zstd\n    cipher: {{key: {key}}}\n")
    with Cache.open(file, namespace()) as cache:
        assert store(cache, "abcdefghij")
        prompt = cache.prompt(tokens("abcdefghij"))
        names = [f"{prefix}:{cache.namespace.space(0).hex()}:{prompt.keys[last].hex()}" for last in (3, 7, 9)]
    values = [valkey.run("GET", name) for name in names]
    assert [len(value) for value in values] == [8192] * 3
    assert not any(prompt.keys[number][:12] in value[4096:] for number in range(10) for value in values)
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10


def configured(directory: Path, server: Valkey, prefix: str) -> Path:
    file = directory / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\npage_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: redis\n    url: {server.url}\n    prefix: {prefix}\n"
    )
    return file
