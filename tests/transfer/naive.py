"""Engines made up at random, and what a copy of their pages has to do, one element at a time.

Every tensor is a padded, permuted part of a storage. Beside it lies an array of the same shape that says which element
of which storage each of its elements is. The payload is put together from those numbers by the definition alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_transfer.paged import Layout

Numbers = NDArray[np.int64]
DTYPES: dict[str, tuple[Any, Any]] = {
    "uint8": (torch.uint8, np.uint8),
    "float8_e4m3fn": (torch.float8_e4m3fn, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, np.float16),
    "float32": (torch.float32, np.float32),
    "float64": (torch.float64, np.float64),
}


class Content(NamedTuple):
    """What the KV means. Engines that agree in it can share KV."""

    layers: int
    planes: int
    heads: int
    dim: int
    dtype: str


@dataclass
class Engine:
    layers: list[Any]
    numbers: list[list[Numbers]]
    """By layer and tensor: element numbers over all storages, one after another."""
    storages: list[NDArray[np.uint8]]
    dims: str
    itemsize: int
    blocks: int
    block_tokens: int
    content: Content

    def memory(self) -> NDArray[np.uint8]:
        """All elements, `[element, byte]`."""
        return np.concatenate(self.storages).reshape(-1, self.itemsize)

    def payload(self, layout: Layout, page_tokens: int, block_ids: Sequence[int]) -> Numbers:
        """Element numbers in the order of the payload, all whole pages of the block table."""
        walk = self._native if layout == "native" else self._canonical
        pages = len(block_ids) * self.block_tokens // page_tokens
        elements: list[int] = []
        for page in range(pages):
            tokens = range(page * page_tokens, (page + 1) * page_tokens)
            for layer in self.numbers:
                for tensor in layer:
                    elements += walk(tensor, tokens, block_ids)
        return np.array(elements, np.int64)

    def _canonical(self, tensor: Numbers, tokens: range, block_ids: Sequence[int]) -> Iterator[int]:
        size = dict(zip(self.dims, tensor.shape, strict=True))
        for pair, token, head, dim in product(
            range(size.get("2", 1)), tokens, range(size.get("h", 1)), range(size["d"])
        ):
            where = {"2": pair, "h": head, "d": dim}
            where |= {"b": block_ids[token // self.block_tokens], "t": token % self.block_tokens}
            yield int(tensor[tuple(where[axis] for axis in self.dims)])

    def _native(self, tensor: Numbers, tokens: range, block_ids: Sequence[int]) -> Iterator[int]:
        strides = {axis: stride for axis, stride in zip(self.dims, tensor.strides, strict=True)}
        inside = sorted((axis for axis in self.dims if axis != "b"), key=lambda axis: -strides[axis])
        if "2" in inside and strides["2"] > strides["b"]:
            inside.remove("2")
            inside.insert(0, "2")
            outer = ["2", "b"]
        else:
            outer = ["b"]
        blocks = block_ids[tokens.start // self.block_tokens : tokens.stop // self.block_tokens]
        order = [*outer, *(axis for axis in inside if axis not in outer)]
        size = dict(zip(self.dims, tensor.shape, strict=True))
        for index in product(*(blocks if axis == "b" else range(size[axis]) for axis in order)):
            where = dict(zip(order, index, strict=True))
            yield int(tensor[tuple(where[axis] for axis in self.dims)])


KINDS = {
    1: ["btd", "bthd"],
    2: ["2bthd", "b2thd", "2bhtd", "bth2d", "bthd+bthd"],
}
"""By planes: latent only, one of K and V; K and V on an axis, in one block, in one head, as tensors of their own."""


@st.composite
def contents(draw: st.DrawFn) -> Content:
    dim, dtype = draw(st.sampled_from([1, 2, 3, 5, 8, 16])), draw(st.sampled_from(sorted(DTYPES)))
    return Content(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 2])), draw(st.integers(1, 3)), dim, dtype)


@st.composite
def engines(draw: st.DrawFn, content: Content | None = None) -> Engine:
    """Layers in one storage or several, with the axes in any order and padding on all of them."""
    content = content or draw(contents())
    layers, planes, heads, dim, dtype = content
    kind = draw(st.sampled_from([kind for kind in KINDS[planes] if "h" in kind or heads == 1])).split("+")
    dims = "".join(draw(st.permutations(kind[0])))
    make = draw(st.sampled_from([_torch, _numpy] if DTYPES[dtype][1] else [_torch]))
    size = {"2": 2, "b": draw(st.integers(2, 5)), "t": draw(st.sampled_from([1, 2, 3, 4, 8])), "h": heads, "d": dim}
    one_storage = draw(st.booleans())
    names = [*kind[0], "l"] if one_storage else [*kind[0]]
    size["l"] = layers * len(kind)
    # A tidy engine has its axes in the order of `dims` and no padding; it is the usual case, so it is drawn often.
    tidy = draw(st.booleans())
    order = ["l", *dims] if tidy and one_storage else [*dims] if tidy else draw(st.permutations(names))
    padding = {axis: 0 if tidy or axis in "2l" else draw(st.integers(0, 2)) for axis in order}
    storages: list[NDArray[np.uint8]] = []
    tensors: list[tuple[Any, Numbers]] = []
    itemsize: int = DTYPES[dtype][0].itemsize
    for _ in range(1 if one_storage else layers * len(kind)):
        shape = [size[axis] + padding[axis] for axis in order]
        count = math.prod(shape)
        before = sum(storage.size for storage in storages) // itemsize
        raw = np.random.default_rng(before + 1).integers(0, 256, count * itemsize, np.uint8)
        storage = make(raw, dtype)
        storages.append(raw)
        numbers = np.arange(before, before + count).reshape(shape)
        inner = tuple(slice(padding[axis] // 2, padding[axis] // 2 + size[axis]) for axis in order)
        storage, numbers = storage.reshape(shape)[inner], numbers[inner]
        for layer in range(size["l"] if one_storage else 1):
            pick = tuple(layer if axis == "l" else slice(None) for axis in order)
            left = [axis for axis in order if axis != "l"]
            permutation = [left.index(axis) for axis in dims]
            tensors.append((_permuted(storage[pick], permutation), numbers[pick].transpose(permutation)))
    step = len(kind)
    groups = [tensors[i : i + step] for i in range(0, len(tensors), step)]
    return Engine(
        layers=[group[0][0] if step == 1 else tuple(tensor for tensor, _ in group) for group in groups],
        numbers=[[numbers for _, numbers in group] for group in groups],
        storages=storages,
        dims=dims,
        itemsize=itemsize,
        blocks=size["b"],
        block_tokens=size["t"],
        content=content,
    )


def _torch(raw: NDArray[np.uint8], dtype: str) -> Any:
    return torch.from_numpy(raw).view(DTYPES[dtype][0])


def _numpy(raw: NDArray[np.uint8], dtype: str) -> Any:
    return raw.view(DTYPES[dtype][1])


def _permuted(tensor: Any, axes: list[int]) -> Any:
    permute: Callable[..., Any] = tensor.permute if isinstance(tensor, torch.Tensor) else tensor.transpose
    return permute(axes)


@st.composite
def block_tables(draw: st.DrawFn, engine: Engine) -> list[int]:
    """Some of an engine's blocks, none twice."""
    ids = draw(st.permutations(range(engine.blocks)))
    return ids[: draw(st.integers(1, engine.blocks))]
