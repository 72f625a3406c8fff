"""Two processes, each with a node of its own, that know each other by a server only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lmcache_core import Cache
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, retrieve, until
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


def configured(directory: Path, server: Valkey, prefix: str) -> Path:
    file = directory / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\npage_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: redis\n    url: {server.url}\n    prefix: {prefix}\n"
    )
    return file
