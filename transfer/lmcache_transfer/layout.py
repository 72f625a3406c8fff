"""Where the KV of a page lies: an engine's tensors as planes of strided blocks.

An engine says what the axes of its tensors mean; sizes and strides are read from the tensors, never assumed, so padded,
permuted and sliced ones are described as they are. Nothing here touches the bytes.

    tensor --describe--> address, TensorLayout --native_planes | canonical_planes--> Plane, Plane, ...

A `Plane` is what the payload of one layer consists of. For each page it holds, in this order, the page's units (blocks,
or the parts of a block that are as long as a page), and of each unit the elements of `axes`, the last axis fastest.
Tensors of many layers differ in their address only, so all but the address is worked out once for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from lmcache_core.errors import LayoutError

__all__ = ["Axis", "Described", "Plane", "PlaneShape", "Tensor", "TensorLayout", "describe"]

AXES = "12bthdo"
"""1: of size one; 2: K|V; b: block; t: token; h: KV head; d: inside a head, or latent; o: opaque, inside a block."""


class Tensor(Protocol):
    """What is asked of an engine's tensor. Tensors of torch have it; numpy arrays are taken as well."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


class Axis(NamedTuple):
    name: str
    size: int
    stride: int
    """In bytes."""


@dataclass(frozen=True)
class PlaneShape:
    """How the units of a plane lie."""

    blocks: int
    block_stride: int
    units: int
    """Units in a block: 1, unless pages are not whole blocks."""
    unit_stride: int
    outer: tuple[Axis, ...]
    """Axes inside a unit in the order of the payload, without those of size one."""
    run: int
    """Bytes that lie together, both in a unit and in the payload: the innermost axis."""

    @cached_property
    def unit_bytes(self) -> int:
        return math.prod(axis.size for axis in self.outer) * self.run

    @cached_property
    def span(self) -> int:
        """Bytes from the first to behind the last."""
        blocks = (self.blocks - 1) * self.block_stride + (self.units - 1) * self.unit_stride
        return blocks + sum((axis.size - 1) * axis.stride for axis in self.outer) + self.run

    @cached_property
    def step(self) -> int:
        """Greatest common divisor of the run and all distances between runs."""
        blocks = self.block_stride if self.blocks > 1 else 0
        units = self.unit_stride if self.units > 1 else 0
        return math.gcd(self.run, blocks, units, *(axis.stride for axis in self.outer))


class Plane(NamedTuple):
    """One part of the payload of a page and layer: all of it, or its K or V."""

    address: int
    shape: PlaneShape

    @property
    def end(self) -> int:
        return self.address + self.shape.span


@dataclass(frozen=True)
class TensorLayout:
    """Axes of a tensor, those of size one that mean nothing left out."""

    dtype: str
    itemsize: int
    axes: tuple[Axis, ...]

    def axis(self, name: str) -> Axis | None:
        return next((axis for axis in self.axes if axis.name == name), None)

    def blocked(self, block_tokens: int | None) -> TensorLayout:
        """The same with a block axis: without one, each `block_tokens` consecutive tokens are a block."""
        token = self.axis("t")
        if self.axis("b"):
            if token and block_tokens not in (None, token.size):
                raise LayoutError(f"blocks of {block_tokens} tokens: the tensors have blocks of {token.size}")
            return self
        if token is None or not block_tokens:
            raise LayoutError("tensors without a block axis 'b' need a token axis 't' and the number of tokens a block")
        if not 0 < block_tokens <= token.size:
            raise LayoutError(f"blocks of {block_tokens} tokens in tensors of {token.size} tokens")
        split = (
            Axis("b", token.size // block_tokens, token.stride * block_tokens),
            Axis("t", block_tokens, token.stride),
        )
        axes = [each for axis in self.axes for each in (split if axis is token else (axis,))]
        return TensorLayout(self.dtype, self.itemsize, tuple(axes))

    def native_planes(self) -> list[Plane]:
        """Blocks as they lie: their axes in the order of their strides. K and V are two planes where they lie apart,
        that is, where not both are inside a block. Addresses are relative to the tensor's."""
        return self._planes(self._inside(), self._apart(), 1, 0)

    def native_strides(self) -> tuple[int, ...]:
        """What tells the bytes of `native_planes` from those in another order: the strides inside a block in bytes, of
        K and V, tokens, heads, elements and then the opaque axes, however the tensor orders them. Padding is left out
        as it is not copied; an axis of size one, or that is not inside a block, has a stride of 0."""
        strides: dict[Axis | None, int] = {}
        step = self.itemsize
        for axis in reversed(self._inside()):
            strides[axis] = step if axis.size > 1 else 0
            step *= axis.size
        named = (strides.get(self.axis(name), 0) for name in "2thd")
        return (*named, *(strides[axis] for axis in self.axes if axis.name == "o"))

    def canonical_planes(self, page_tokens: int) -> list[Plane]:
        """K, then V; tokens, then heads, then the elements of a head. A page may be any number of tokens."""
        token = self.axis("t")
        if token is None or any(axis.name == "o" and axis.size > 1 for axis in self.axes):
            raise LayoutError("the canonical layout needs a token axis 't' and no opaque axis 'o'; use native")
        unit = math.gcd(page_tokens, token.size)
        inside = [Axis("t", unit, token.stride)]
        inside += [axis for name in "hd" if (axis := self.axis(name))]
        return self._planes(inside, self.axis("2"), token.size // unit, unit * token.stride)

    def _block(self) -> Axis:
        block = self.axis("b")
        assert block is not None, "only called on what `blocked` returned"
        return block

    def _apart(self) -> Axis | None:
        pair = self.axis("2")
        return pair if pair and pair.stride >= self._block().stride else None

    def _inside(self) -> list[Axis]:
        outside = (self._block(), self._apart())
        return sorted((axis for axis in self.axes if axis not in outside), key=lambda axis: -axis.stride)

    def _planes(self, inside: list[Axis], pair: Axis | None, units: int, unit_stride: int) -> list[Plane]:
        block = self._block()
        outer = [axis for axis in inside if axis.size > 1]
        run = self.itemsize
        while outer and outer[-1].stride == run:
            run *= outer.pop().size
        shape = PlaneShape(block.size, block.stride, units, unit_stride, tuple(outer), run)
        return [Plane(i * pair.stride, shape) for i in range(pair.size)] if pair else [Plane(0, shape)]


class Described(NamedTuple):
    address: int
    layout: TensorLayout
    writable: bool


def describe(tensor: Tensor | np.ndarray[Any, Any], dims: str, on: str = "cpu") -> Described:
    """Read the layout of `tensor`, whose axes `dims` names by one letter each (see `AXES`), for example '2bthd' (vLLM
    NHD), 'b2thd' (FlashInfer), '2bhtd' (HND), 'btd' (MLA), 'thd' (a row a token), '1htd' (transformers).

    Raises:
        LayoutError: `dims` doesn't fit the tensor, the tensor isn't on a device of kind `on`, or elements share memory.
    """
    where = "host memory" if on == "cpu" else f"memory of a device of kind {on}"
    if isinstance(tensor, np.ndarray):
        if on != "cpu":
            raise LayoutError(f"an array of numpy is not in {where}")
        layout = _layout(dims, tensor.shape, tensor.strides, tensor.itemsize, tensor.dtype.name)
        return Described(tensor.ctypes.data, layout, tensor.flags.writeable)
    device = getattr(tensor, "device", None)
    if device is not None and device.type != on:
        raise LayoutError(f"a tensor on {device} is not in {where}")
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    layout = _layout(dims, tuple(tensor.shape), strides, itemsize, _name(tensor.dtype))
    return Described(tensor.data_ptr(), layout, True)


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(64)
def _layout(dims: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, dtype: str) -> TensorLayout:
    if (
        len(dims) != len(shape)
        or set(dims) - set(AXES)
        or any(dims.count(name) > 1 for name in dims if name not in "1o")
    ):
        raise LayoutError(f"dims {dims!r} for a tensor of shape {shape}: one letter of {AXES!r} per axis is expected")
    axes = [Axis(name, size, stride) for name, size, stride in zip(dims, shape, strides, strict=True)]
    for axis in axes:
        if axis.size < 1 or axis.size != {"1": 1, "2": 2}.get(axis.name, axis.size):
            raise LayoutError(f"axis {axis.name!r} of dims {dims!r} has size {axis.size} in shape {shape}")
    taken = itemsize
    for axis in sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.stride):
        if axis.stride < taken:
            raise LayoutError(f"axis {axis.name!r} of dims {dims!r} has stride {axis.stride} B: elements share memory")
        taken += (axis.size - 1) * axis.stride
    return TensorLayout(dtype, itemsize, tuple(axis for axis in axes if axis.name != "1"))
