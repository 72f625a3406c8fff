"""A power cut: with `fsync: true` what was reported durable comes back, with its bytes."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from benchmarks.faults.campaign import Campaign, Fault, Run
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace, settings
from benchmarks.faults.mounts import LoopMount
from lmcache_core import Cache

__all__ = ["FAULTS", "cut_power"]

THREADS = 3
MOST = 1.0
"""Seconds until the cut."""


def cut_power(campaign: Campaign, fsync: bool = True) -> None:
    for run in campaign:
        with run, LoopMount(run.path) as disk:
            config = settings(disk.where / "kv", fsync=fsync, segment="2MiB")
            durable = _store_until_the_cut(run, config, disk)
            disk.umount()
            disk.mount()
            run.seen("durable before the cut", len(durable))
            with Cache.open(config, namespace()) as cache:
                engine = Engine(cache, run)
                run.seen("came back", sum([engine.expect(prompt) for prompt in durable]))
                if engine.serves(Prompt(THREADS << 16, 2 * CHUNK_PAGES)):
                    run.recovered()


def _store_until_the_cut(run: Run, config: dict[str, Any], disk: LoopMount) -> list[Prompt]:
    """What was durable when the power was cut; the engine goes on for a while after that."""
    durable: list[Prompt] = []
    cut, stop = threading.Event(), threading.Event()

    def work(thread: int) -> None:
        number = thread << 16
        engine = Engine(cache, run)
        while not stop.is_set():
            prompt = Prompt(number, 1 + number % (3 * CHUNK_PAGES))
            number += 1
            if engine.stored(prompt) and not cut.is_set():
                durable.append(prompt)
            engine.lookup(prompt)
            engine.retrieve(prompt, timeout=1.0)

    with Cache.open(config, namespace()) as cache:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        time.sleep(0.2 + run.rng.random() * MOST)
        cut.set()
        disk.cut_power()
        time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.join()
    return durable


XFS = ("mkfs.xfs", "xfs_io", "mount", "umount")

FAULTS = [
    Fault("power cut, fsync", 10, partial(cut_power, fsync=True), few=2, programs=XFS, root=True, seconds=4),
]
