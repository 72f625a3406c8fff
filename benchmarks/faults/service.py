"""A node as a process and its clients as others: each is killed at any moment, and the node is frozen."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Campaign, Fault, Run, until
from benchmarks.faults.client import MOST_PAGES, PROMPTS
from benchmarks.faults.crash import OVERHEAD, disk_usage
from benchmarks.faults.engine import Engine, Prompt, frame_shape, namespace, settings
from benchmarks.faults.processes import Talking
from benchmarks.faults.stress import leftovers
from lmcache_core import Cache
from lmcache_core.config import Config
from lmcache_core.service.remote import RemoteClient

__all__ = ["FAULTS"]

TIMEOUT = 0.5
"""Seconds in which the node must answer a call."""
PATIENCE = 4.0
"""Seconds that a store or retrieve, of several calls, may take on a busy machine."""
LIFE = 0.4
SOAK = 6.0
"""Seconds of one run of a soak."""
SOAKED = 2 << 20
"""Bytes of the disk tier of a soak: less than what is stored."""
GROWTH = 16 << 20
"""Bytes that a process may take more of after the first quarter of a soak."""
POOL = 64
"""Chunks that the pool has room for: fewer than are stored."""


class Member(Talking):
    """The node, or one of its clients."""

    def __init__(self, *words: str) -> None:
        super().__init__(*words, quiet=True)

    def finish(self) -> None:
        """Let a client end by itself."""
        self.tell(b"end")
        self.hear_until("end")
        self.wait()

    def hear(self, run: Run) -> None:
        """Take down what a client has said."""
        for line in self.said:
            match line.split():
                case ["!", *_]:
                    run.wrong(line)
                case ["?", *_]:
                    run.lost(line)
                case ["=", what, number]:
                    run.seen(what, int(number))
        self.said.clear()


class Host:
    """One directory, the node on it, and its clients."""

    def __init__(self, campaign: Campaign, capacity: int = 64 << 20, **tier: Any) -> None:
        self.socket = campaign.path / "node.sock"
        self._config = campaign.path / "node.yaml"
        pool = POOL * frame_shape().nbytes
        config = settings(campaign.path / "kv", cpu=pool, capacity=capacity, **tier)
        self._config.write_text(json.dumps(config))
        self._clients = 0
        self._seed = campaign.seed
        self.node = self.start()

    def start(self) -> Member:
        node = Member("-m", "lmcache_core", "serve", "--config", str(self._config), "--socket", str(self.socket))
        node.hear_until("serving")
        return node

    def client(self) -> Member:
        self._clients += 1
        words = [str(self.socket), str(self._seed + self._clients), str(TIMEOUT), str(PATIENCE)]
        client = Member("-m", "benchmarks.faults.client", *words)
        client.hear_until("ready")
        return client

    @contextlib.contextmanager
    def engine(self, run: Run) -> Iterator[Engine]:
        with Cache(RemoteClient(str(self.socket), Config(call_timeout=10.0)), namespace()) as cache:
            if not cache.client.wait_until_up(20):  # type: ignore[attr-defined]
                run.lost("the node cannot be reached")
            yield Engine(cache, run, deadline=20.0)

    def judge(self, run: Run) -> None:
        """Nothing is left over, no byte is wrong, and the node serves."""
        with self.engine(run) as engine:
            if not until(lambda: not leftovers(engine.cache.stats()), 20):
                run.lost(f"left over: {leftovers(engine.cache.stats())}")
            hits = sum(engine.retrieve(Prompt(number, MOST_PAGES)) > 0 for number in range(PROMPTS))
            run.seen("prompts with hits", hits)
            if engine.serves(Prompt(PROMPTS + 1 + run.number, MOST_PAGES)):
                run.recovered()

    def close(self) -> None:
        self.node.process.send_signal(signal.SIGCONT)
        self.node.kill()


def kill_clients(campaign: Campaign) -> None:
    host = Host(campaign)
    try:
        for run in campaign:
            with run:
                client = host.client()
                time.sleep(run.rng.random() * LIFE)
                client.kill()
                client.hear(run)
                host.judge(run)
    finally:
        host.close()


def stop_nodes(how: str, campaign: Campaign) -> None:
    host = Host(campaign)
    clients = [host.client(), host.client()]
    try:
        for run in campaign:
            with run:
                time.sleep(0.2 + run.rng.random() * LIFE)
                if how == "kill":
                    host.node.kill()
                    time.sleep(run.rng.random() * 0.2)
                    host.node = host.start()
                else:
                    host.node.process.send_signal(signal.SIGSTOP)
                    time.sleep(2 * TIMEOUT + run.rng.random())
                    host.node.process.send_signal(signal.SIGCONT)
                for client in clients:
                    client.hear(run)
                    client.hear_until("= hits")  # it is back, by itself
                for client in clients:
                    client.finish()
                    client.hear(run)
                host.judge(run)
                clients = [host.client(), host.client()]
    finally:
        for client in clients:
            client.kill()
        host.close()


def soak(campaign: Campaign) -> None:
    """Four clients, two threads each, on a pool and a disk tier that are too small for what they store. All runs are of
    one node and the same clients."""
    host = Host(campaign, capacity=SOAKED, segment=SOAKED // 16)
    clients = [host.client() for _ in range(4)]
    processes = {"node": host.node, **{f"client {number}": client for number, client in enumerate(clients)}}
    before: dict[str, int] = {}
    try:
        for run in campaign:
            with run, host.engine(run) as engine:
                started = time.monotonic()
                while (passed := time.monotonic() - started) < SOAK:
                    time.sleep(0.2)
                    stats = engine.cache.stats()
                    if stats.pool_used > stats.pool_capacity or stats.tiers[0].used > SOAKED:
                        run.lost(f"{stats.pool_used} bytes of the pool, {stats.tiers[0].used} of the tier are taken")
                    if (used := disk_usage(campaign.path / "kv")) > SOAKED + OVERHEAD:
                        run.lost(f"{used} bytes of the disk are taken, {SOAKED} may be")
                    if not before and passed > SOAK / 2:
                        before = {name: own_memory(child) for name, child in processes.items()}
                for name, child in processes.items():
                    grown = own_memory(child) - before[name]
                    run.seen(f"KiB that the {name.split()[0]} has grown", grown >> 10)
                    if grown > GROWTH:
                        run.lost(f"the {name} has grown by {grown} bytes")
                for client in clients:
                    client.hear(run)
                if run.number == campaign.runs - 1:
                    while clients:
                        clients[-1].finish()
                        clients.pop().hear(run)
                    host.judge(run)
                elif engine.serves(Prompt(PROMPTS + 1 + run.number, 1)):
                    run.recovered()
    finally:
        for client in clients:
            client.kill()
        host.close()


def own_memory(child: Member) -> int:
    """Bytes of a process's memory that are its own: the pool is not."""
    for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError("the system does not tell a process's own memory")


FAULTS = [
    Fault("kill -9 of a client of a node", 100, kill_clients, few=5, seconds=1),
    Fault("kill -9 of a node under load", 20, partial(stop_nodes, "kill"), few=1, seconds=5),
    Fault("a node frozen under load", 5, partial(stop_nodes, "freeze"), few=1, seconds=5),
    Fault("four clients of a node, for two minutes", 20, soak, few=1, seconds=8),
]
