"""KV of one layout is not found by a pool of another, unless both asked for what they can share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmcache_core import Cache, Group, GroupKind, Namespace
from lmcache_core.errors import LayoutError
from lmcache_transfer.cpu import Layout, PagedKV

BLOCKS, PAGE, DIM = 8, 16, 8
TOKENS = list(range(BLOCKS * PAGE))


class Pool:
    """An engine with one layer of `heads` heads, in blocks of 16 tokens."""

    def __init__(self, dims: str, heads: int, layout: Layout, planes: int = 2) -> None:
        sizes = {"2": 2, "b": BLOCKS, "t": PAGE, "h": heads, "d": DIM}
        self.memory: np.ndarray[Any, Any] = np.zeros([sizes[name] for name in dims], np.float16)
        self.kv = PagedKV([self.memory], dims=dims, page_tokens=PAGE, layout=layout)
        group = Group(
            kind=GroupKind.FULL,
            layers=(0,),
            page_layer_bytes=self.kv.page_layer_bytes,
            dtype="float16",
            kv_heads=heads,
            head_size=DIM,
            planes=planes,
        )
        self.namespace = Namespace(
            weights="test", groups=(group,), page_tokens=PAGE, encoding=self.kv.encoding("test", backend="none")
        )
        self.by_token = self.memory.transpose([dims.index(name) for name in "2bthd" if name in dims])


def moved(source: Pool, target: Pool) -> bool:
    """Whether the target finds what the source stored; then it has the same numbers."""
    source.by_token[:] = np.arange(source.by_token.size).reshape(source.by_token.shape) % 2048
    config = {"page_tokens": PAGE, "chunk_tokens": 2 * PAGE, "cpu": {"capacity": "4MiB"}}
    with Cache.open(config, source.namespace) as cache:
        assert cache.store(TOKENS, source.kv.view(range(BLOCKS))).wait(10)
        found = Cache(cache.client, target.namespace).retrieve(TOKENS, target.kv.view(range(BLOCKS))).tokens
    assert found in (0, len(TOKENS))
    assert not found or np.array_equal(source.by_token, target.by_token)
    return found > 0


@pytest.mark.parametrize("heads", [2, PAGE])  # with as many heads as tokens, shapes tell nothing
@pytest.mark.parametrize(("source", "target"), [("2bthd", "2bhtd"), ("2bhtd", "2bthd"), ("b2thd", "bh2td")])
def test_native_kv_is_found_in_its_own_layout_only(source: str, target: str, heads: int) -> None:
    assert not moved(Pool(source, heads, "native"), Pool(target, heads, "native"))
    assert moved(Pool(source, heads, "native"), Pool(source, heads, "native"))


@pytest.mark.parametrize(("source", "target"), [("2bthd", "2bhtd"), ("b2thd", "bh2td")])
def test_canonical_kv_is_found_in_all(source: str, target: str) -> None:
    assert moved(Pool(source, PAGE, "canonical"), Pool(target, PAGE, "canonical"))
    assert not moved(Pool(source, PAGE, "canonical"), Pool(source, PAGE, "native"))


def test_a_latent_has_one_plane() -> None:
    assert moved(Pool("btd", 1, "native", planes=1), Pool("btd", 1, "native", planes=1))
    with pytest.raises(LayoutError, match="2 planes x 16 tokens x 1 heads x 8 float16 are 512 bytes"):
        Pool("btd", 1, "native", planes=2)
