"""What the kernels are told, and what they must never be told."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from lmcache_cuda.errors import GeometryError
from lmcache_cuda.geometry import Payload, Planes, Units, arrange

# 100 blocks of 16 tokens, 8 heads of 128 elements of 2 bytes: K of vLLM.
BLOCK = 16 * 8 * 256
BLOCKS = Units(blocks=100, block_stride=BLOCK, block_units=1, unit_stride=0, axes=((16, 2048), (8, 256)), run=256)
CHUNK = Payload(page_units=4, page_stride=64 * 4 * BLOCK, plane_stride=4 * BLOCK, unit_stride=BLOCK)
PLANES = Planes(table=4096, length=64, alignment=16)


def test_axes_that_lie_together_are_one_run() -> None:
    assert (BLOCKS.axes, BLOCKS.run, BLOCKS.unit_bytes) == ((), BLOCK, BLOCK)


@pytest.mark.parametrize(
    ("axes", "run", "expected_axes", "expected_run"),
    [
        (((16, 4096), (8, 256)), 256, ((16, 4096),), 2048),  # padded tokens
        (((8, 4096), (16, 256)), 256, (), 32768),  # heads outside, and all of it together
        (((16, 256), (8, 4096)), 256, ((16, 256), (8, 4096)), 256),  # heads outside, token by token in the chunk
        (((4, 64), (3, 16)), 2, ((4, 64), (3, 16)), 2),
        (((4, 48), (3, 16)), 2, ((12, 16),), 2),  # two axes that are one
        (((1, 999), (5, 7), (1, 3)), 2, ((5, 7),), 2),  # one of size one is none
    ],
)
def test_axes_are_as_few_as_can_be(
    axes: tuple[tuple[int, int], ...], run: int, expected_axes: tuple[tuple[int, int], ...], expected_run: int
) -> None:
    units = Units(blocks=2, block_stride=1 << 20, block_units=1, unit_stride=0, axes=axes, run=run)
    assert (units.axes, units.run) == (expected_axes, expected_run)


def test_words_of_a_call() -> None:
    units = Units(blocks=9, block_stride=65536, block_units=16, unit_stride=4096, axes=((8, 512),), run=256)
    payload = Payload(page_units=64, page_stride=0x800000, plane_stride=0x20000, unit_stride=2048)
    call = arrange(units, payload, planes=PLANES, chunk=0x7000, numbers=0x8000, count=100)
    assert call.width == 16
    assert call.warps == 64 * 100
    words = list((ctypes.c_int64 * 21).from_buffer_copy(call.copy))
    assert words == [
        *(0x7000, 4096, 0x8000, 64, 100),
        *(16, 65536, 4096),
        *(1, 1, 1, 8, 0, 0, 0, 512),
        *(256, 64, 0x800000, 0x20000, 2048),
    ]


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, 16),
        ({"chunk": 8}, 8),
        ({"chunk": 12}, 4),
        ({"chunk": 1}, 1),
        ({"planes": PLANES._replace(alignment=2)}, 2),
        ({"units": replace(BLOCKS, block_stride=BLOCK + 4)}, 4),
        ({"units": replace(BLOCKS, run=BLOCK - 8)}, 8),
        ({"payload": replace(CHUNK, unit_stride=BLOCK + 2, plane_stride=4 * BLOCK + 16, page_stride=1 << 24)}, 2),
    ],
)
def test_accesses_are_as_wide_as_everything_is_aligned(change: dict[str, object], width: int) -> None:
    told = {"units": BLOCKS, "payload": CHUNK, "chunk": 1 << 20, "planes": PLANES, **change}
    units, payload = told.pop("units"), told.pop("payload")
    assert isinstance(units, Units)
    assert isinstance(payload, Payload)
    assert arrange(units, payload, numbers=8, count=16, **told).width == width  # type: ignore[arg-type]


def test_a_stride_that_is_not_walked_does_not_narrow_an_access() -> None:
    one = replace(BLOCKS, blocks=1, block_stride=3)
    payload = Payload(page_units=1, page_stride=3, plane_stride=BLOCK, unit_stride=5)
    assert arrange(one, payload, planes=PLANES, chunk=16, numbers=8, count=1).width == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_stride": BLOCK - 1}, r"a stride of 32767 B in the engine's memory over parts of 32768 B"),
        ({"block_units": 2, "unit_stride": 100}, r"a stride of 100 B in the engine's memory"),
        ({"run": 32, "axes": ((2, 300), (3, 64), (4, 32))}, r"bytes share memory"),
        ({"run": 32, "axes": tuple((2, 1 << 11 + 2 * i) for i in range(5))}, r"a unit of 5 axes"),
        ({"run": 32, "axes": ((0, 64),)}, r"nothing to copy in the engine's memory"),
        ({"run": 0, "axes": ()}, r"nothing to copy"),
        ({"blocks": 1 << 31}, r"2147483648 blocks of 1 units: there may be 2147483647"),
    ],
)
def test_units_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        replace(BLOCKS, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "count", "message"),
    [
        (replace(CHUNK, unit_stride=BLOCK - 16), 16, r"in the chunk over parts of 32768 B"),
        (replace(CHUNK, plane_stride=3 * BLOCK), 16, r"in the chunk"),
        (replace(CHUNK, page_stride=BLOCK), 16, r"in the chunk"),
        (CHUNK, 0, r"nothing to copy in the chunk"),
        (replace(CHUNK, page_units=1 << 24, page_stride=1 << 60, plane_stride=1 << 50), 1 << 22, r"copy fewer pages"),
    ],
)
def test_chunks_that_cannot_be(payload: Payload, count: int, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        arrange(BLOCKS, payload, planes=PLANES, chunk=16, numbers=8, count=count)


def test_what_a_chunk_takes() -> None:
    assert CHUNK.span(64, 16, BLOCK) == 4 * 64 * 4 * BLOCK
    assert CHUNK.span(64, 5, BLOCK) == 64 * 4 * BLOCK + 63 * 4 * BLOCK + BLOCK + 3 * BLOCK
    assert CHUNK.span(64, 0, BLOCK) == 0


def test_planes_of_some_layers() -> None:
    assert PLANES.layers(3, 2, planes_a_layer=2) == Planes(4096 + 3 * 2 * 8, 4, 16)
    assert PLANES.layers(0, 32, planes_a_layer=2) == PLANES
    for first, count in [(31, 2), (-1, 1), (0, 33)]:
        with pytest.raises(GeometryError, match=r"layers .* of 32"):
            PLANES.layers(first, count, planes_a_layer=2)


def test_what_divides_addresses() -> None:
    assert [Planes.alignment_of(each) for each in ([4096, 64], [4096, 8], [6], [])] == [16, 8, 2, 16]
