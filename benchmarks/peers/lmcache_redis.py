"""LMCache's Redis connectors on a server that is given: times of batches in seconds, as JSON on standard output.

    LMCACHE_PYTHON -m benchmarks.peers.lmcache_redis '{"port": 6379, "size": 33554432, "count": 8, "rounds": 3}'

Runs in an environment that has LMCache and not this project, so nothing is imported that needs ours. `redis` is its
asyncio connector (redis://), `resp` the one in C++ (resp://). All values go in one batch, as its engine gives them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector, RESPConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

TOKENS, HEADS, DIM, ELEMENT = 256, 8, 128, 2
PATIENCE = 100.0


def main() -> None:
    work = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    layers = work["size"] // (2 * TOKENS * HEADS * DIM * ELEMENT)
    shape = (layers, 2, TOKENS, HEADS, DIM)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=TOKENS)
    config = LMCacheEngineConfig.from_defaults(chunk_size=TOKENS, local_cpu=True, max_local_cpu_size=2.0)
    PinMonitor.GetOrCreate(config)
    memory = LocalCPUBackend(config, metadata, "cpu")
    size = torch.Size([2, layers, TOKENS, HEADS * DIM])
    values = [memory.allocate(size, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(work["count"])]
    for value in values:
        value.tensor.copy_(torch.randn(size).to(torch.bfloat16))
    expected = bytes(values[-1].byte_array)

    def run(work_: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work_, loop).result(PATIENCE)

    makes: dict[str, Callable[[], Any]] = {
        "redis": lambda: RedisConnector(f"redis://127.0.0.1:{work['port']}", loop, memory),
        "resp": lambda: RESPConnector("127.0.0.1", work["port"], loop, memory, work["connections"]),
    }
    told: dict[str, dict[str, list[float]]] = {}
    for name, make in makes.items():

        async def made(make: Callable[[], Any] = make) -> Any:
            return make()

        connector = run(made())
        keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(len(values))]
        took: dict[str, list[float]] = {"put": [], "get": []}
        for number in range(work["rounds"] + 1):
            start = time.perf_counter()
            run(connector.batched_put(keys, values))
            put = time.perf_counter() - start
            start = time.perf_counter()
            got = run(_got(connector, keys))
            get = time.perf_counter() - start
            assert bytes(got[-1].byte_array) == expected
            for value in got:
                value.ref_count_down()
            if number:
                took["put"].append(put)
                took["get"].append(get)
        told[name] = took
    print(json.dumps(told), flush=True)
    os._exit(0)


async def _got(connector: Any, keys: list[Any]) -> list[Any]:
    if connector.support_batched_get():
        return list(await connector.batched_get(keys))
    return list(await asyncio.gather(*(connector.get(key) for key in keys)))


if __name__ == "__main__":
    main()
