"""What was reported durable stays so, whatever is stored after it."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.faults.campaign import Report, Run
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace, settings
from lmcache_backends.disk import DiskBackend, DiskOptions
from lmcache_core import Cache
from lmcache_core.config import Config, CpuConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.wrappers import Slow


def a_run(path: Path) -> Run:
    return Run(Report("a test"), 0, 0, path)


def test_a_durable_tail_stays_until_the_longer_chunk_is_durable(tmp_path: Path) -> None:
    """A crash while the longer chunk is being written must find one of them."""
    disk = Slow(DiskBackend(DiskOptions(path=str(tmp_path / "kv"), capacity=1 << 24, min_free=0)))
    config = Config(16, 4, CpuConfig(capacity=1 << 20), (TierConfig("disk"),))
    run = a_run(tmp_path)
    with Cache(DirectClient(Node(config, [disk]), owns=True), namespace()) as cache:
        engine = Engine(cache, run)
        short, long = Prompt(1, CHUNK_PAGES - 1), Prompt(1, CHUNK_PAGES)
        assert engine.stored(short)
        disk.hang("write")
        result = engine.store(long)
        assert disk.wait_until_hanging()
        shutil.copytree(tmp_path / "kv", tmp_path / "crash")
        disk.release()
        assert result is not None
        assert result.wait(10)
        assert cache.flush(10)
        shutil.copytree(tmp_path / "kv", tmp_path / "later")
    for copy, there, gone in [("crash", short, long), ("later", long, None)]:
        with Cache.open(settings(tmp_path / copy), namespace()) as cache:
            engine = Engine(cache, run)
            assert engine.retrieve(there) == there.pages
            assert gone is None or engine.retrieve(gone) == short.pages
            assert engine.tier().chunks == 1
    assert run.is_wrong is run.is_lost is False


def test_a_description_that_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    """No file may stay that nothing needs, however often a process is killed while it starts."""
    for _ in range(2):
        with Cache.open(settings(tmp_path / "kv"), namespace()) as cache:
            assert cache.flush(10)
        (manifest,) = (tmp_path / "kv" / "manifests").iterdir()
        manifest.with_name(f"{manifest.name}.0123abcd.tmp").write_bytes(b"{")
        with Cache.open(settings(tmp_path / "kv"), namespace()) as cache:
            assert cache.flush(10)
        assert list((tmp_path / "kv" / "manifests").iterdir()) == [manifest]
