"""What is read from tensors, and the bytes that follow from it, by example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Encoding
from lmcache_transfer.cpu import Layout, PagedKV
from lmcache_transfer.layout import Axis, describe


def counted(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(int(np.prod(shape)), dtype=np.uint8).reshape(shape)


def payload(kv: PagedKV, *block_ids: int) -> list[int]:
    view = kv.view(block_ids)
    into = bytearray(view.pages * kv.page_bytes)
    view.gather(0, 0, view.pages, memoryview(into))
    return list(into)


def test_strides_are_read_from_the_tensor() -> None:
    tensor = torch.zeros(3, 2, 5, 8, dtype=torch.bfloat16)[:, :, :4, :6].permute(0, 2, 1, 3)
    described = describe(tensor, "bthd")
    assert described.address == tensor.data_ptr()
    assert described.layout.dtype == "bfloat16"
    assert described.layout.axes == (Axis("b", 3, 160), Axis("t", 4, 16), Axis("h", 2, 80), Axis("d", 6, 2))


def test_numpy_and_torch_are_described_alike() -> None:
    array = np.zeros((2, 3, 4), np.float32)[:, ::2]
    assert describe(array, "bhd") == describe(torch.from_numpy(array), "bhd")


# One layer, 2 blocks of 2 tokens, 2 heads of 1 byte; the comment says what each number is of.
BY_TOKEN = [
    # K and V apart: k of block 1, then v of block 1 (which starts at 8 + 4)
    ("2bthd", (2, 2, 2, 2, 1), "native", [1], [4, 5, 6, 7, 12, 13, 14, 15]),
    ("2bthd", (2, 2, 2, 2, 1), "canonical", [1], [4, 5, 6, 7, 12, 13, 14, 15]),
    # K and V in one block: the same order, but here a block is one piece
    ("b2thd", (2, 2, 2, 2, 1), "native", [1], [8, 9, 10, 11, 12, 13, 14, 15]),
    ("b2thd", (2, 2, 2, 2, 1), "canonical", [1], [8, 9, 10, 11, 12, 13, 14, 15]),
    # heads outside tokens: as they lie, or token by token
    ("2bhtd", (2, 2, 2, 2, 1), "native", [0], [0, 1, 2, 3, 8, 9, 10, 11]),
    ("2bhtd", (2, 2, 2, 2, 1), "canonical", [0], [0, 2, 1, 3, 8, 10, 9, 11]),
    # K and V of a head side by side
    ("bht2d", (2, 2, 2, 2, 1), "native", [0], [0, 1, 2, 3, 4, 5, 6, 7]),
    ("bht2d", (2, 2, 2, 2, 1), "canonical", [0], [0, 4, 2, 6, 1, 5, 3, 7]),
    # latent
    ("btd", (2, 2, 2), "native", [1, 0], [4, 5, 6, 7, 0, 1, 2, 3]),
    # opaque blocks
    ("bo", (2, 3), "native", [1, 0], [3, 4, 5, 0, 1, 2]),
    # without a block axis two tokens are a block: of each head two tokens
    ("htd", (2, 4, 1), "native", [1], [2, 3, 6, 7]),
    ("htd", (2, 4, 1), "canonical", [1], [2, 6, 3, 7]),
    ("1htd", (1, 2, 4, 1), "native", [1], [2, 3, 6, 7]),
    ("thd", (4, 2, 1), "native", [1], [4, 5, 6, 7]),
]


@pytest.mark.parametrize(("dims", "shape", "layout", "block_ids", "expected"), BY_TOKEN)
def test_bytes_of_a_page(
    dims: str, shape: tuple[int, ...], layout: Layout, block_ids: list[int], expected: list[int]
) -> None:
    kv = PagedKV([counted(*shape)], dims=dims, page_tokens=2, block_tokens=2, layout=layout)
    assert payload(kv, *block_ids) == expected


def test_pages_hold_their_layers_and_layers_their_blocks() -> None:
    first = counted(2, 4, 1, 1, 1)  # K 0 to 3, V 4 to 7, a block each
    kv = PagedKV([first, first + 100], dims="2bthd", page_tokens=2)
    # page 0: blocks 3 and 0 of K, of V, of the first layer, of the second
    assert payload(kv, 3, 0, 2, 1) == [3, 0, 7, 4, 103, 100, 107, 104, 2, 1, 6, 5, 102, 101, 106, 105]
    assert (kv.page_layer_bytes, kv.layers, kv.page_bytes) == (4, 2, 8)


def test_canonical_pages_may_be_parts_of_blocks() -> None:
    kv = PagedKV([counted(2, 4, 1)], dims="btd", page_tokens=1, layout="canonical")
    assert payload(kv, 1, 0) == [4, 5, 6, 7, 0, 1, 2, 3]
    view = kv.view([1, 0])
    one = bytearray(1)
    view.gather(0, 2, 1, memoryview(one))
    assert (view.pages, list(one)) == (8, [6])


def test_canonical_pages_may_straddle_blocks() -> None:
    kv = PagedKV([counted(3, 4, 1)], dims="btd", page_tokens=6, layout="canonical")
    assert payload(kv, 2, 0, 1) == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    assert kv.view([2, 0]).pages == 1  # and two tokens more, which are no page


@pytest.mark.parametrize(("key_size", "value_size"), [(3, 2), (48, 32)])
def test_keys_and_values_may_be_tensors_of_their_own_and_of_other_sizes(key_size: int, value_size: int) -> None:
    keys, values = counted(2, 2, 1, key_size), counted(2, 2, 1, value_size) + 7
    kv = PagedKV([(keys, values), (keys + 1, values + 1)], dims="bthd", page_tokens=4)
    expected = [keys[[1, 0]], values[[1, 0]], keys[[1, 0]] + 1, values[[1, 0]] + 1]
    assert payload(kv, 1, 0) == [byte for part in expected for byte in part.ravel()]


def test_strides_tell_orders_apart_but_not_padding_or_the_number_of_blocks() -> None:
    def strides(dims: str, *shape: int) -> tuple[int, ...]:
        return PagedKV([np.zeros(shape, np.uint16)], dims=dims, page_tokens=4).strides

    assert strides("2bthd", 2, 9, 4, 3, 8) == strides("2bthd", 2, 5, 4, 3, 8) == (0, 48, 16, 2)
    assert strides("2bhtd", 2, 9, 3, 4, 8) == (0, 16, 64, 2)
    assert strides("b2thd", 9, 2, 4, 3, 8) == (192, 48, 16, 2)
    assert strides("2bthd", 2, 9, 4, 1, 8) == (0, 16, 0, 2)
    assert strides("2b1td", 2, 9, 1, 4, 8) == (0, 16, 0, 2)
    assert strides("btd", 9, 4, 8) == (0, 16, 0, 2)
    # As many heads as tokens: the tensors differ in nothing but what their axes mean.
    assert (strides("2bthd", 2, 9, 4, 4, 8), strides("2bhtd", 2, 9, 4, 4, 8)) == ((0, 64, 16, 2), (0, 16, 64, 2))
    padded = np.zeros((2, 9, 4, 3, 10), np.uint16)[..., :8]
    assert PagedKV([padded], dims="2bthd", page_tokens=4).strides == (0, 48, 16, 2)
    assert PagedKV([padded], dims="2bthd", page_tokens=4, layout="canonical").strides == ()


def test_one_block_keeps_keys_and_values_apart_as_many_do() -> None:
    for blocks in (1, 2):
        kv = PagedKV([counted(2, blocks, 1, 1, 2)], dims="2bthd", page_tokens=1)
        assert kv.strides == (0, 0, 0, 1)
        kv = PagedKV([counted(blocks, 2, 1, 1, 2)], dims="b2thd", page_tokens=1)
        assert kv.strides == (2, 0, 0, 1)


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def test_the_encoding_tells_how_bytes_lie() -> None:
    kv = PagedKV([np.zeros((2, 9, 4, 3, 8), np.uint16)], dims="2bthd", page_tokens=8)
    assert kv.encoding("mine", backend="flash", isa="avx512") == Encoding(
        layout="native", engine="mine", backend="flash", block_tokens=4, strides=(0, 48, 16, 2), isa="avx512"
    )
    shared = PagedKV([np.zeros((2, 9, 4, 3, 8), np.uint16)], dims="2bthd", page_tokens=8, layout="canonical")
    assert shared.encoding("mine", backend="flash", isa="avx512") == Encoding(layout="canonical")
    opaque = PagedKV([np.zeros((9, 96), np.uint8)], dims="bo", page_tokens=4, block_tokens=4)
    assert opaque.encoding("mine") == Encoding(layout="native", engine="mine", block_tokens=4, strides=(0, 0, 0, 0, 1))


REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("an axis too many", [zeros(2, 3, 4)], {"dims": "bt"}, "one letter of"),
    ("an unknown axis", [zeros(2, 3)], {"dims": "bx"}, "one letter of"),
    ("an axis named twice", [zeros(2, 3, 4)], {"dims": "btt"}, "one letter of"),
    ("three planes", [zeros(3, 2, 4, 1)], {"dims": "2btd"}, "axis '2'"),
    ("a batch", [zeros(3, 2, 4)], {"dims": "1td", "block_tokens": 1}, "axis '1'"),
    ("no blocks", [zeros(0, 4, 1)], {"dims": "btd"}, "axis 'b'"),
    ("shared elements", [torch.zeros(1, 4, 1).expand(3, 4, 1)], {"dims": "btd"}, "share memory"),
    ("overlapping windows", [torch.zeros(64).as_strided((4, 4, 4), (8, 4, 1))], {"dims": "btd"}, "share memory"),
    ("a reversed axis", [zeros(2, 4, 1)[:, ::-1]], {"dims": "btd"}, "share memory"),
    ("memory of a device", [torch.zeros(2, 4, 1, device="meta")], {"dims": "btd"}, "not in host memory"),
    ("no layers", [], {"dims": "btd"}, "0 layers"),
    ("numbers for layers", [1, 2], {"dims": "btd"}, "a layer is a tensor"),
    ("lists of numbers", [[[1, 2]]], {"dims": "btd"}, "a layer is a tensor"),
    ("a layer of nothing", [()], {"dims": "btd"}, "neither may be empty"),
    ("no tokens a page", [zeros(2, 4, 1)], {"dims": "btd", "page_tokens": 0}, "pages of 0"),
    ("half a block a page", [zeros(2, 4, 1)], {"dims": "btd", "page_tokens": 2}, "not whole blocks of 4"),
    ("a block of other size", [zeros(2, 4, 1)], {"dims": "btd", "block_tokens": 2}, "have blocks of 4"),
    ("blocks of unknown size", [zeros(2, 4)], {"dims": "bo"}, "must be given"),
    ("neither blocks nor their size", [zeros(8, 4)], {"dims": "td"}, "number of tokens a block"),
    ("less than a block", [zeros(3, 4)], {"dims": "td", "block_tokens": 4}, "in tensors of 3 tokens"),
    ("opaque blocks", [zeros(2, 4)], {"dims": "bo", "block_tokens": 4, "layout": "canonical"}, "use native"),
    ("an unknown layout", [zeros(2, 4, 1)], {"dims": "btd", "layout": "paged"}, "native or canonical"),
    ("layers of other sizes", [zeros(2, 4, 1), zeros(2, 4, 2)], {"dims": "btd"}, "same number of bytes"),
    ("layers of other types", [zeros(2, 4, 1), zeros(2, 4, 1).astype(np.int32)], {"dims": "btd"}, "one data type"),
    ("layers of other blocks", [zeros(2, 4, 1), zeros(2, 2, 2)], {"dims": "btd"}, "tokens a block"),
    (
        "layers of other orders",
        [zeros(2, 4, 2), zeros(2, 2, 4).transpose(0, 2, 1)],
        {"dims": "btd"},
        "same order",
    ),
]


@pytest.mark.parametrize(("layers", "options", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_does_not_fit_is_refused(layers: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PagedKV(layers, **({"page_tokens": 4} | options))


def test_a_block_id_must_be_one_of_every_layer() -> None:
    kv = PagedKV([counted(3, 4, 1), counted(2, 4, 1)], dims="btd", page_tokens=4)
    assert kv.blocks == 2
    with pytest.raises(LayoutError, match="there are 2 blocks"):
        kv.view([2])


def test_an_axis_of_size_one_does_not_break_runs() -> None:
    """One head of several, say: its stride means nothing."""
    tensor = np.zeros((2, 4, 3, 8), np.uint16)[:, :, 1:2, :]
    (plane,) = describe(tensor.copy(), "bthd").layout.native_planes()
    assert (plane.shape.outer, plane.shape.run) == ((), 4 * 8 * 2)
    (plane,) = describe(tensor, "bthd").layout.native_planes()
    assert (plane.shape.outer, plane.shape.run) == ((Axis("t", 4, 48),), 8 * 2)
    (plane,) = describe(tensor[:, :1], "bthd").layout.native_planes()
    assert (plane.shape.outer, plane.shape.run) == ((), 8 * 2)
