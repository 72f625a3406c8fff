"""The arena holds what transformers' own cache would hold."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmcache_core.connectors.transformers.arena import Arena, ArenaCache, Shape, allocate

SHAPE = Shape(layers=3, kv_heads=2, head_size=4, dtype=torch.float32, device=torch.device("cpu"))


def step(tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4)


def feed(tokens: int, *caches: DynamicCache, batch: int = 1) -> None:
    for layer in range(3):
        keys, values = step(tokens, batch)
        seen = [cache.update(keys, values, layer) for cache in caches]
        for mine, its in seen[1:]:
            assert torch.equal(mine, seen[0][0])
            assert torch.equal(its, seen[0][1])


def same(mine: DynamicCache, its: DynamicCache) -> bool:
    pairs: Any = zip(mine.layers, its.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


def test_it_grows_as_the_plain_cache_does() -> None:
    torch.manual_seed(0)
    mine, its = ArenaCache(Arena(SHAPE, 10), 0), DynamicCache()
    assert mine.get_seq_length() == its.get_seq_length() == 0
    for tokens in [5, 1, 1, 3, 1, 9, 40, 1]:
        feed(tokens, its, mine)
        assert same(mine, its)
        assert mine.get_seq_length() == its.get_seq_length() == mine.tokens
    assert mine.arena.capacity >= 61


def test_it_starts_with_what_was_restored() -> None:
    torch.manual_seed(0)
    arena = Arena(SHAPE, 12)
    restored = [step(6) for _ in range(3)]
    for (keys, values), (new_keys, new_values) in zip(arena.layers(), restored, strict=True):
        keys[:, :, :6], values[:, :, :6] = new_keys, new_values
    mine, its = ArenaCache(arena, 6), DynamicCache()
    for number, (keys, values) in enumerate(restored):
        its.update(keys, values, number)
    feed(8, its, mine)
    assert same(mine, its)
    assert mine.tokens == 14


def test_layers_lie_in_one_block() -> None:
    arena = Arena(SHAPE, 10, step=8)
    assert arena.capacity == 16
    pointers = [tensor.data_ptr() for layer in arena.layers() for tensor in layer]
    assert pointers == [pointers[0] + number * 2 * 16 * 4 * 4 for number in range(6)]


@pytest.mark.parametrize("act", ["crop", "repeat", "select", "reset"])
def test_what_changes_its_layers_takes_them_out_of_the_arena(act: str) -> None:
    torch.manual_seed(0)
    mine, its = ArenaCache(Arena(SHAPE, 10), 0), DynamicCache()
    feed(6, its, mine)
    for cache in (mine, its):
        if act == "crop":
            cache.crop(-2)
        elif act == "repeat":
            cache.batch_repeat_interleave(2)
        elif act == "select":
            cache.batch_select_indices(torch.tensor([0, 0]))
        else:
            cache.reset()  # type: ignore[no-untyped-call]
    feed(2, its, mine, batch=1 if act in ("crop", "reset") else 2)
    assert same(mine, its)
    assert mine.tokens == 0 or act == "reset"


def test_a_copy_grows_by_itself() -> None:
    mine = ArenaCache(Arena(SHAPE, 10), 0)
    feed(6, mine)
    twin = copy.deepcopy(mine)
    before = copy.deepcopy(mine)
    feed(2, twin)
    assert twin.tokens == 8
    assert same(mine, before)


@pytest.mark.parametrize("shape", [(3, 5), (1 << 10, 1 << 10), (0, 4)])
def test_memory_is_of_the_shape_asked_for(shape: tuple[int, ...]) -> None:
    made = allocate(shape, torch.float32, torch.device("cpu"))
    assert made.shape == shape
    assert made.is_contiguous()
    made.fill_(3.0)
    assert bool((made == 3.0).all())
