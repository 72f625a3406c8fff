"""LMCache's multiprocess server on a CPU: its times, and memcpy's in the same turns, as JSON on standard output.

    LMCACHE_PYTHON -m benchmarks.peers.lmcache_daemon '{"layers": 32, ...}'

Runs in an environment that has LMCache and not this project, so nothing is imported here that needs ours. The server
and its client are set up for speed: KV goes through shared memory (`engine_driven`, `--shm-name`), not the socket.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.harness import Buffer, memcpy, seconds

GIB = 1 << 30
PATIENCE = 60.0
"""Seconds that the server has to start, and for each answer."""
LOOKUP_BLOCK = 64

instances = count(1)
requests = count()


class Engine:
    """KV of a model, `[2, blocks, block, heads, dim]` for each layer, registered with the server. A prompt of `chunks`
    chunks has two thirds of the blocks, in random order."""

    def __init__(
        self, client: Any, chunk_tokens: int, chunks: int, layers: int, block: int, heads: int, dim: int
    ) -> None:
        self.tokens = chunks * chunk_tokens
        self.chunks = chunks
        used = self.tokens // block
        shape = (2, used * 3 // 2, block, heads, dim)
        self.kv = {f"layer.{each}": torch.ones(shape, dtype=torch.bfloat16) for each in range(layers)}
        # The server takes block 0 for one that holds nothing.
        self.block_ids = random.Random(0).sample(range(1, used * 3 // 2), used)
        self.nbytes = self.tokens * layers * 2 * heads * dim * 2
        self._client, self._instance = client, next(instances)
        self._model = f"model-{self._instance}"
        self._blocks_in_chunk = chunk_tokens // block
        self._random = random.Random(self._instance)
        self._context = EngineDrivenTransferContext(self._instance, client)
        group = EngineGroupInfo(engine_group_id=0, layer_indices=tuple(range(layers)), tokens_per_block=block)
        self._context.register(
            self.kv,
            self._model,
            1,
            self._blocks_in_chunk,
            PATIENCE,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    def prompt(self) -> tuple[int, ...]:
        """Tokens that were never seen before."""
        return tuple(self._random.randrange(128_256) for _ in range(self.tokens))

    def request(self, prompt: tuple[int, ...]) -> tuple[IPCCacheServerKey, IPCCacheServerKey]:
        """What a request names its prompt by, to look it up and to copy it."""
        copy = IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=0,
            token_ids=prompt,
            start=0,
            end=self.tokens,
            request_id=f"request-{next(requests)}",
            num_kv_readers=1,
        )
        return copy.no_worker_id_version(), copy

    def lookup(self, key: IPCCacheServerKey) -> int:
        """Chunks that were found; they are locked until they are retrieved or `forget` is called."""
        self._client.lookup(key, 1).result(timeout=PATIENCE)
        while (found := self._client.query_prefetch_status(key.request_id).result(timeout=PATIENCE)) is None:
            pass
        return int(found)

    def forget(self, key: IPCCacheServerKey, *, locked: bool = False) -> None:
        """End a request."""
        if locked:
            self._client.free_lookup_locks(key, 1).result(timeout=PATIENCE)
        self._client.end_session(key.request_id).result(timeout=PATIENCE)

    def store(self, key: IPCCacheServerKey) -> None:
        """Copy the KV of a prompt to the server."""
        self._copied(self._context.submit_store, key)

    def retrieve(self, key: IPCCacheServerKey) -> None:
        """Copy it back; it must have been looked up."""
        self._copied(self._context.submit_retrieve, key)

    def _copied(self, submit: Any, key: IPCCacheServerKey) -> None:
        future = submit(key.request_id, key, self.kv, [self.block_ids], None, self._blocks_in_chunk)
        assert future.result(timeout=PATIENCE)

    def check(self) -> None:
        """What is stored comes back."""
        for layer in self.kv.values():
            layer.random_()
        before = [layer[:, self.block_ids].clone() for layer in self.kv.values()]
        lookup, copy = self.request(self.prompt())
        self.store(copy)
        for layer in self.kv.values():
            layer.zero_()
        assert self.lookup(lookup) == self.chunks
        self.retrieve(copy)
        assert all(map(torch.equal, before, (layer[:, self.block_ids] for layer in self.kv.values())))
        self.forget(lookup)


def copies(client: Any, work: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Seconds of a store and of a retrieve of one chunk, and of memcpy of as much. A round stores to places that the
    last one has left; the first touches them and is thrown away."""
    engine = Engine(client, work["chunk_tokens"], 1, work["layers"], work["block_tokens"], work["heads"], work["dim"])
    engine.check()
    mine = Buffer(engine.nbytes, shared=False)
    pools = [Buffer(engine.nbytes, shared=True) for _ in range(work["copies"])]
    took: dict[str, dict[str, list[float]]] = {verb: {"took": [], "limits": []} for verb in ("store", "retrieve")}
    for number in range(work["rounds"] + 1):
        client.clear(True).result(timeout=PATIENCE)
        for pool in pools:
            lookup, copy = engine.request(engine.prompt())
            for verb, target, source in (("store", pool, mine), ("retrieve", mine, pool)):
                limit = seconds(partial(memcpy, target, source, engine.nbytes))
                if verb == "retrieve":
                    assert engine.lookup(lookup) == 1
                needed = seconds(partial(getattr(engine, verb), copy))
                if number:
                    took[verb]["limits"].append(limit)
                    took[verb]["took"].append(needed)
            engine.forget(lookup)
    return took


def lookups(client: Any, work: dict[str, Any], chunks: int) -> list[float]:
    """Seconds of a lookup that finds all of a prompt. KV is as small as it may be: a lookup reads none."""
    engine = Engine(client, work["chunk_tokens"], chunks, 1, LOOKUP_BLOCK, work["heads"], work["lookup_dim"])
    prompt = engine.prompt()
    lookup, copy = engine.request(prompt)
    engine.store(copy)
    engine.forget(lookup)
    took = []
    for _ in range(work["calls"]):
        lookup, _ = engine.request(prompt)
        start = time.perf_counter()
        found = engine.lookup(lookup)
        took.append(time.perf_counter() - start)
        assert found == chunks
        engine.forget(lookup, locked=True)
    return took


@contextmanager
def served(nbytes: int) -> Iterator[Any]:
    """A server whose pool has room for so much before it evicts anything; yields a client of it."""
    port, http_port = _free_ports(2)
    words = [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(port), "--http-port", str(http_port)]
    words += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"bench_{os.getpid()}"]
    words += ["--l1-size-gb", str(nbytes / 0.75 / GIB), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        client = None
        try:
            _wait_for(port, process)
            client = RequestClientFactory.create(f"tcp://localhost:{port}", context=context)
            yield client
        finally:
            if client is not None:
                client.close()
            context.term()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit("LMCache's server does not start")
            time.sleep(0.1)


def main() -> None:
    """See the module."""
    work = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    chunk = work["chunk_tokens"] * work["layers"] * 2 * work["heads"] * work["dim"] * 2
    with served(work["copies"] * chunk + (64 << 20)) as client:
        found: dict[str, Any] = copies(client, work)
        found["lookup"] = {chunks: lookups(client, work, chunks) for chunks in work["lookups"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
