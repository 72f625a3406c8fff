"""Two processes, each with a node of its own, that know each other by a bucket only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core import Cache
from tests.backends.s3.conftest import BUCKET
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, retrieve
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, Server

ROOT = Path(__file__).parents[3]

STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefghij")
"""


def test_what_one_process_stores_another_finds(
    seaweed: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\n"
        f"page_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        "tiers:\n"
        "  - backend: s3\n"
        f"    bucket: s3://{BUCKET}/{prefix}\n"
        f"    endpoint: {seaweed.url}\n"
        f"    access_key: {ACCESS_KEY}\n"
        "    secret_key: ${env:SECRET}\n"
    )
    monkeypatch.setenv("SECRET", SECRET_KEY)
    subprocess.run([sys.executable, "-c", STORES, str(file)], check=True, cwd=ROOT, timeout=60)
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0
