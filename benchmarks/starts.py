"""What a process waits for: the import, and after a restart the first bytes from disk."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.disks import scratch
from benchmarks.harness import Row, Scale, at_most, plain
from benchmarks.workload import CHUNK_TOKENS, PAGE_TOKENS, Nothing, namespace, opened

__all__ = ["imports", "restart"]

ROOT = Path(__file__).parents[1]
CHUNK_BYTES = 64 << 10
PAGES = CHUNK_TOKENS // PAGE_TOKENS
PROMPT_CHUNKS = 100
MOST_FIRST_HIT = 2.0
MOST_IMPORT = 0.3


def imports(scale: Scale) -> Iterator[Row]:
    """Rows `import_s*`: the import alone, in a new interpreter each time."""
    yield at_most("import_s", _import("lmcache_core", scale.starts), "s", MOST_IMPORT)
    yield plain("import_s.cache", _import("lmcache_core.cache", scale.starts), "s")


def _import(module: str, starts: int) -> float:
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    times = []
    for _ in range(starts + 1):
        times.append(float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout))
    return statistics.median(times[1:])


def restart(scale: Scale) -> Iterator[Row]:
    """Row `restart.first_hit_s`: from the start of a process to bytes that are verified and in the engine's memory,
    with many chunks on disk and a large pool. The files are in the page cache or not; reads go past it."""
    with scratch(scale.directory) as directory:
        fill(directory, scale.stored)
        times = []
        for _ in range(scale.starts + 1):
            start = time.time()
            child = [sys.executable, "-m", "benchmarks.starts", str(directory), str(scale.restart_pool)]
            done = subprocess.run(child, check=True, capture_output=True, text=True, cwd=ROOT)
            times.append(float(done.stdout) - start)
    yield at_most("restart.first_hit_s", statistics.median(times[1:]), "s", MOST_FIRST_HIT)


class Pattern(Nothing):
    """An engine whose KV is the same in every page, and which notes what it is given."""

    def __init__(self) -> None:
        self.seen = 0

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        """See `KVView`."""
        into[:] = self._bytes(first_page, pages)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """See `KVView`."""
        assert bytes(source) == self._bytes(first_page, pages), "not what was stored"
        self.seen += pages

    def _bytes(self, first_page: int, pages: int) -> bytes:
        return b"".join(
            bytes([1 + page % 255]) * (CHUNK_BYTES // PAGES) for page in range(first_page, first_page + pages)
        )


def prompt(number: int, chunks: int) -> list[int]:
    """Tokens of the prompt of that number."""
    return [number, *range(1, chunks * CHUNK_TOKENS)]


def tier(directory: Path) -> dict[str, object]:
    """Settings of the tier."""
    return {"backend": "disk", "path": str(directory), "capacity": "4GiB", "min_free": 0}


def fill(directory: Path, chunks: int) -> None:
    """Put chunks on disk."""
    per_prompt = min(PROMPT_CHUNKS, chunks)
    with opened(namespace(CHUNK_BYTES // PAGES), 64 << 20, (tier(directory),)) as cache:
        for number in range(chunks // per_prompt):
            assert cache.store(prompt(number, per_prompt), Pattern()).wait()


def first_hit(directory: Path, pool: int) -> None:
    """Be the process that was restarted."""
    from lmcache_core.cache import Cache

    config = {"chunk_tokens": CHUNK_TOKENS, "cpu": {"capacity": pool}, "tiers": [tier(directory)]}
    cache = Cache.open(config, namespace(CHUNK_BYTES // PAGES))
    view = Pattern()
    found = cache.retrieve(prompt(0, 1), view)
    assert found.tiers == {"disk": CHUNK_TOKENS}, found
    assert view.seen == PAGES
    print(time.time(), flush=True)
    cache.close()


if __name__ == "__main__":
    first_hit(Path(sys.argv[1]), int(sys.argv[2]))
