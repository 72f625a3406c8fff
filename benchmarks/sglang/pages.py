"""Pages of SGLang's host pool, stored and read as SGLang does it, beside its own file backend and beside memcpy:
`make bench-sglang`.

    python -m benchmarks.sglang [--out bench-sglang.json] [--pages 512] [--rounds 3] [--directory DIR]

512 pages of 64 tokens in the shape of Llama-3-8B are 4 GiB; they move in batches of 128, by the interface without
copies (v1) for ours, by that with copies (v0) for the file backend, which has no other. In each round all are measured
one right after the other. Reads of files are from the page cache, and cold: after `POSIX_FADV_DONTNEED`. Our disk tier
goes past the page cache always, and checks each byte it reads. Then 100,000 pages of 4 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disks import scratch
from benchmarks.harness import GB, Buffer, Row, plain, rate, seconds
from tests.sglang.engine import ENVIRONMENT, STANDINS, extra_config

__all__ = ["main"]

BATCH = 128
"""Pages that SGLang hands over at once."""
PAGE = 64
LAYERS, HEADS, DIM = 32, 8, 128
SMALL_PAGES, SMALL_CHUNK = 100_000, 128
_FILLED = 1 << 24
_SAMPLE = 1021
"""Of so many numbers one is looked at."""


def keys_of(seed: int, pages: int) -> list[str]:
    """Names of a prompt's pages."""
    from lmcache_core.keys import page_keys

    return [key.hex() for key in page_keys(np.arange(pages, dtype=np.uint32) + (seed << 20), 1)]


def make_pool(pages: int, page: int, layers: int, heads: int, dim: int, layout: str) -> Any:
    """A host pool of SGLang's, all of it given to one prompt and filled with numbers. Returns it and its places."""
    import torch

    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
    device = MHATokenToKVPool(
        size=4 * page,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        page,
        layout,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * page,
    )
    fill(pool)
    return pool, pool.alloc(pages * page)


def fill(pool: Any) -> None:
    """Give each number of a pool one that follows from its place."""
    import torch

    bits = pool.kv_buffer.view(torch.int16).view(-1)
    for start in range(0, len(bits), _FILLED):
        end = min(start + _FILLED, len(bits))
        bits[start:end] = torch.arange(start, end).to(torch.int16)


def read(pool: Any, get: Callable[[], None]) -> float:
    """Seconds that a read into an empty pool takes, after which each page must be what it was."""
    import torch

    bits = pool.kv_buffer.view(torch.int16).view(-1)
    bits.zero_()
    took = seconds(get)
    found = bits[::_SAMPLE]
    assert bool((found == torch.arange(0, len(bits), _SAMPLE).to(torch.int16)).all()), (
        "what came is not what was stored"
    )
    return took


def backend(kind: str, pool: Any, folder: Path, cache: dict[str, Any] | None = None) -> Any:
    """A storage backend, made and attached as SGLang does it."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name="m",
        extra_config=extra_config(cache, weights_id="bench", read_timeout="60s", lookup_timeout="60s"),
    )
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)):
        made = StorageBackendFactory.create_backend(kind, config, pool)
    made.register_mem_pool_host(pool)
    return made


class Ours:
    """Our backend, used by v1."""

    def __init__(self, pool: Any, places: Any, folder: Path, capacity: int, chunk: int, *, disk: bool) -> None:
        self.pool, self.places = pool, places
        size = int(pool.page_size)
        self.step = BATCH * size
        cache: dict[str, Any] = {"cpu": {"capacity": capacity}, "chunk_tokens": chunk}
        if disk:
            tier = {"backend": "disk", "path": str(folder / "tier"), "capacity": 3 * capacity, "min_free": 0}
            cache["tiers"] = [tier | {"read_timeout": "60s", "write_timeout": "60s"}]
        self.backend = backend("dynamic", pool, folder, cache)
        self.client = self.backend._client
        while self.client.stats().pool_usable < capacity:  # its memory is being faulted in
            time.sleep(0.05)

    def set(self, keys: Sequence[str]) -> None:
        """Store all pages."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        for at in range(0, len(keys), BATCH):
            batch, info = list(keys[at : at + BATCH]), HiCacheStorageExtraInfo(prefix_keys=list(keys[:at]))
            start = at * int(self.pool.page_size)
            part = self.places[start : start + self.step]
            assert all(self.backend.batch_set_v1(batch, part, info)), "a page was not stored"

    def get(self, keys: Sequence[str]) -> None:
        """Look all pages up, and read them."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        assert self.backend.batch_exists(list(keys), HiCacheStorageExtraInfo(prefix_keys=[])) == len(keys)
        for at in range(0, len(keys), BATCH):
            batch, info = list(keys[at : at + BATCH]), HiCacheStorageExtraInfo(prefix_keys=list(keys[:at]))
            start = at * int(self.pool.page_size)
            part = self.places[start : start + self.step]
            assert all(self.backend.batch_get_v1(batch, part, info)), "a page was not read"

    def flush(self) -> None:
        assert self.client.flush(300)

    def clear(self, *places: str) -> None:
        self.client.clear(None, list(places) or None)


class Files:
    """SGLang's own file backend, used by v0 as SGLang uses it."""

    def __init__(self, pool: Any, places: Any, folder: Path) -> None:
        self.pool, self.places, self.folder = pool, places, folder
        self.backend = backend("file", pool, folder)

    def _starts(self, at: int, count: int) -> list[Any]:
        page = int(self.pool.page_size)
        return [self.places[(at + number) * page] for number in range(count)]

    def set(self, keys: Sequence[str]) -> None:
        """Store all pages."""
        for at in range(0, len(keys), BATCH):
            batch = list(keys[at : at + BATCH])
            data = [self.pool.get_data_page(start) for start in self._starts(at, len(batch))]
            assert self.backend.batch_set(batch, data)

    def get(self, keys: Sequence[str]) -> None:
        """Look all pages up, and read them."""
        assert self.backend.batch_exists(list(keys)) == len(keys)
        for at in range(0, len(keys), BATCH):
            batch = list(keys[at : at + BATCH])
            empty = [self.pool.get_dummy_flat_data_page() for _ in batch]
            data = self.backend.batch_get(batch, empty)
            for start, page in zip(self._starts(at, len(batch)), data, strict=True):
                self.pool.set_from_flat_data_page(start, page)

    def cool(self) -> None:
        """Have the kernel forget what it has of the files."""
        for path in self.folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


class Copies:
    """As many bytes by memcpy, a page's K or V at a time."""

    def __init__(self, nbytes: int, piece: int) -> None:
        self._nbytes, self._piece = nbytes, piece
        self._source = Buffer(min(nbytes, 1 << 30), shared=False)
        self._target = Buffer(min(nbytes, 1 << 30), shared=True)

    def copy(self) -> None:
        import ctypes

        size = len(self._source.memory)
        for at in range(0, self._nbytes, self._piece):
            place = at % size
            ctypes.memmove(self._target.address + place, self._source.address + place, min(self._piece, size - place))


def large(folder: Path, pages: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Rows `sglang.*` of pages of 8 MiB."""
    pool, places = make_pool(pages, PAGE, LAYERS, HEADS, DIM, "page_first")
    nbytes = pool.kv_buffer.nbytes
    (folder / "files").mkdir()
    took: dict[str, list[float]] = defaultdict(list)
    limits: list[float] = []
    copies = Copies(nbytes, nbytes // pages // 2)
    ours = Ours(pool, places, folder, nbytes + (nbytes >> 3) + (256 << 20), 256, disk=True)
    files = Files(pool, places, folder / "files")
    for number in range(rounds + 1):
        keys = keys_of(number, pages)
        now: dict[str, float] = {}
        limits.append(seconds(copies.copy))
        now["sglang.set.cpu"] = seconds(lambda keys=keys: ours.set(keys))  # type: ignore[misc]
        now["sglang.get.cpu"] = read(pool, lambda keys=keys: ours.get(keys))  # type: ignore[misc]
        now["sglang.set.disk"] = now["sglang.set.cpu"] + seconds(ours.flush)
        ours.clear("cpu")
        now["sglang.get.disk"] = read(pool, lambda keys=keys: ours.get(keys))  # type: ignore[misc]
        ours.clear()
        now["sglang.file.set"] = seconds(lambda keys=keys: files.set(keys))  # type: ignore[misc]
        now["sglang.file.get"] = read(pool, lambda keys=keys: files.get(keys))  # type: ignore[misc]
        files.cool()
        now["sglang.file.get_cold"] = read(pool, lambda keys=keys: files.get(keys))  # type: ignore[misc]
        files.clear()
        say(f"round {number}: " + ", ".join(f"{name} {nbytes / GB / each:.2f} GB/s" for name, each in now.items()))
        if number:  # in the first, memory and files are touched for the first time
            for name, each in now.items():
                took[name].append(each)
    ours.backend.close()
    return [rate(name, nbytes, each, limits[1:]) for name, each in took.items()]


def small(folder: Path) -> list[Row]:
    """Rows `sglang.small.*` of 100,000 pages of 4 KiB, one token each."""
    pool, places = make_pool(SMALL_PAGES, 1, 4, 2, 128, "page_first")
    ours = Ours(pool, places, folder, 256 << 20, SMALL_CHUNK, disk=True)
    keys = keys_of(99, SMALL_PAGES)
    rows = []

    def store() -> None:
        ours.set(keys)
        ours.flush()

    rows.append(plain("sglang.small.set_pages_per_s", SMALL_PAGES / seconds(store), "1/s"))
    stats = ours.client.stats()
    files = sum(1 for path in (folder / "tier").rglob("*") if path.is_file())
    rows.append(plain("sglang.small.chunks", stats.tiers[0].chunks, "chunks"))
    rows.append(plain("sglang.small.files", files, "files"))
    asked = keys[:512]
    took = [seconds(lambda: ours.backend.batch_exists(asked)) for _ in range(300)]
    rows.append(plain("sglang.small.exists_512_us", statistics.median(took) * 1e6, "us"))
    ours.clear("cpu")
    rows.append(plain("sglang.small.get_pages_per_s", 4096 / seconds(lambda: ours.get(keys[:4096])), "1/s"))
    ours.backend.close()
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="a directory on the disk to measure")
    parser.add_argument("--pages", type=int, default=512, help="pages of 8 MiB to move at a time")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(STANDINS))
    from tests.sglang.standins import hostpools

    hostpools.activate()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rows: list[Row] = []
    with scratch(given.directory) as folder:
        rows += large(folder, given.pages, given.rounds, say)
    with scratch(given.directory) as folder:
        rows += small(folder)
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:10.2f} {row.ratio:6.2f}"
        print(f"{row.name:30s} {row.value:12.2f} {row.unit:6s} {limit}")
    if given.out:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        figures = {"machine": machine, "rows": [row._asdict() for row in rows]}
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
