"""Nodes and clients in processes of their own, and caches over a socket inside one."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_core import Cache
from lmcache_core.config import Config
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from tests.node import kv

_numbers = itertools.count()


class Served(RemoteClient):
    """A client, and with it the node of a cache that it goes through the socket to."""

    def __init__(self, path: Path, cache: Cache) -> None:
        self.node: Node = cache.client.node  # type: ignore[attr-defined]
        self.server = NodeServer(self.node, str(path))
        self.node.servers.append(self.server)
        self._cache = cache
        super().__init__(str(path), self.node.config)

    def close(self) -> None:
        super().close()
        kv.until(lambda: not self.server.sessions)  # the node has read all that was sent to it
        self._cache.close()


def open_served(
    directory: Path,
    *backends: StorageBackend,
    slots: int = 8,
    kinds: str = "f",
    tiers: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> Cache:
    """As `tests.node.kv.open_cache`, but every call goes through a socket."""
    settings = {"call_timeout": 10.0} | settings
    cache = kv.open_cache(*backends, slots=slots, kinds=kinds, tiers=tiers, **settings)
    return Cache(Served(directory / f"s{next(_numbers)}", cache), kv.namespace(kinds))


def remote(path: Path | str, **settings: Any) -> Cache:
    """A cache at a node's socket."""
    return Cache(RemoteClient(str(path), Config(**{"call_timeout": 10.0} | settings)), kv.namespace())


class Process:
    """A process that says on its standard output how far it is."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
        )

    def line(self, seconds: float = 30.0) -> str:
        """Its next line; empty at its end."""
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout)
        assert poll.poll(1000 * seconds), "the process says nothing"
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM, and wait for its end. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        for stream in (self.process.stdout, self.process.stdin):
            assert stream is not None
            stream.close()


@contextmanager
def serving(directory: Path, name: str = "node.sock", **settings: Any) -> Iterator[tuple[Process, Path]]:
    """`lmcache-core serve` as a process, with a pool and a disk tier in `directory`."""
    path = directory / name
    config = directory / f"{name}.yaml"
    tier = {"backend": "disk", "path": str(directory / "kv"), "capacity": "64MiB"}
    settings = {
        "chunk_tokens": kv.CHUNK_TOKENS,
        "page_tokens": kv.PAGE_TOKENS,
        "cpu": {"capacity": "4MiB"},
        "tiers": [tier],
    } | settings
    config.write_text(json.dumps(settings))
    process = Process("-m", "lmcache_core", "serve", "--config", str(config), "--socket", str(path))
    try:
        assert process.line().startswith(f"serving at {path}")
        yield process, path
    finally:
        process.close()
