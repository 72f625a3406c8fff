"""A small model's KV in numpy, and caches of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core import Cache, Encoding, Group, GroupKind, Namespace

PAGE_TOKENS = 4
CHUNK_TOKENS = 16
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
LAYERS = 2
PAGE_LAYER_BYTES = 16384
PAGE_BYTES = LAYERS * PAGE_LAYER_BYTES
FRAME_BYTES = 4096 + CHUNK_PAGES * PAGE_BYTES
"""Of a whole chunk, the header included."""


def make_namespace(model: str = "small-model") -> Namespace:
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(LAYERS)),
        page_layer_bytes=PAGE_LAYER_BYTES,
        dtype="float16",
        kv_heads=1,
        head_size=1024,
    )
    return Namespace(
        weights=model,
        model_name=model,
        page_tokens=PAGE_TOKENS,
        groups=(group,),
        encoding=Encoding(layout="canonical"),
    )


class View:
    """KV of one request as `[page][layer][bytes]`."""

    def __init__(self, tokens: int, seed: int | None = None) -> None:
        shape = (tokens // PAGE_TOKENS, LAYERS, PAGE_LAYER_BYTES)
        self.kv: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        if seed is not None:
            self.kv = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        into[:] = self.kv[first_page : first_page + pages].tobytes()

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        part = np.frombuffer(source, np.uint8).reshape(pages, LAYERS, PAGE_LAYER_BYTES)
        self.kv[first_page : first_page + pages] = part


def prompt_of(number: int, chunks: int, more: int = 0) -> list[int]:
    """Tokens that share no prefix with those of another number."""
    return [number * 1_000_000 + token for token in range(chunks * CHUNK_TOKENS + more)]


def settings(*paths: Path, cpu: str | int = "2MiB", **more: Any) -> dict[str, Any]:
    """A configuration with a disk tier for each path."""
    tiers = [
        {"backend": "disk", "name": path.name, "path": str(path), "capacity": "64MiB", "min_free": 0} for path in paths
    ]
    return {"chunk_tokens": CHUNK_TOKENS, "page_tokens": PAGE_TOKENS, "cpu": {"capacity": cpu}, "tiers": tiers, **more}


def fill(path: Path, prompts: Iterable[list[int]], model: str = "small-model") -> None:
    """Leave the KV of prompts on a disk tier, as an engine that has ended would."""
    with Cache.open(settings(path), make_namespace(model)) as cache:
        for number, tokens in enumerate(prompts):
            assert cache.store(tokens, View(len(tokens), seed=number)).wait(10)
