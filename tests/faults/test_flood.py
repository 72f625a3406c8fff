"""Far more is stored than tiers take: what they cannot be given is dropped and counted, and memory stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import redis as servers
from tests.servers.chaos import chaos

ROOT = Path(__file__).parents[2]
POOL = 64 << 20
MORE = 100 << 20
STORES = 10_000

FLOOD = """
import json, sys, psutil
from lmcache_core import Cache
from tests.node.kv import PageView, namespace, tokens

def flood(settings, stores, pool):
    process = psutil.Process()
    with Cache.open(settings, namespace()) as cache:
        print("open", flush=True)
        sys.stdin.readline()
        before = most = process.memory_info().rss
        view = PageView(4)
        for number in range(stores):
            first = number << 8
            prompt = cache.prompt(range(first, first + 64))
            cache.store(prompt, view)
            if number % 100 == 0:
                most = max(most, process.memory_info().rss)
        stats = cache.stats()
        return {
            "grown": most - before,
            "dropped": stats.counts.get("dropped_chunks", {}),
            "up": [tier.up for tier in stats.tiers],
            "pending": [tier.queued for tier in stats.tiers],
        }

print(json.dumps(flood(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
"""


def flood(url: str, spoil: Callable[[], object]) -> dict[str, object]:
    """What becomes of a node whose tier is spoilt once it is open."""
    tier = {
        "backend": "redis",
        "url": url,
        "connect_timeout": 0.2,
        "read_timeout": 0.2,
        "write_timeout": 0.2,
        "breaker": {"cooldown": 0.1},
    }
    settings = {"chunk_tokens": 64, "page_tokens": 16, "cpu": {"capacity": POOL}, "tiers": [tier]}
    words = [sys.executable, "-c", FLOOD, json.dumps(settings), str(STORES), str(POOL)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        spoil()
        told, _ = process.communicate("go\n", timeout=110)
    assert process.returncode == 0
    found: dict[str, object] = json.loads(told)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dead", "frozen", "slow"])
def test_a_flood_of_stores_into_a_tier_that_takes_too_little_stays_within_the_pool(kind: str, tmp_path: Path) -> None:
    if missing := servers.lacking("valkey"):
        pytest.skip(missing)
    with servers.valkey(tmp_path / "valkey") as server, chaos(server.port) as relay:

        def slow() -> None:
            relay.bytes_per_second = 1e6

        spoil = {"dead": server.process.kill, "frozen": server.process.freeze, "slow": slow}[kind]
        found = flood(f"redis://127.0.0.1:{relay.port}", spoil)
    grown = found["grown"]
    assert isinstance(grown, int)
    assert grown < POOL + MORE
    dropped = found["dropped"]
    assert isinstance(dropped, dict)
    assert sum(dropped.values()) > STORES / 2, "what cannot be delivered is counted"
