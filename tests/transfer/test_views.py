"""What a view promises besides the right bytes."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, Transfer
from lmcache_transfer import views
from lmcache_transfer.cpu import CpuTransfer, GroupedView, PagedKV

BLOCKS, TOKENS = 8, 4


@pytest.fixture
def layers() -> list[Any]:
    """4 layers, K and V apart, heads of 64 bytes."""
    raw = np.random.default_rng(3).integers(0, 256, (4, 2, BLOCKS, TOKENS, 2, 64), np.uint8)
    return list(torch.from_numpy(raw))


@pytest.fixture
def kv(layers: list[Any]) -> PagedKV:
    return PagedKV(layers, dims="2bthd", page_tokens=TOKENS)


def pages_of(layers: Sequence[Any], block_ids: Sequence[int]) -> bytes:
    return b"".join(layer[pair, block].numpy().tobytes() for block in block_ids for layer in layers for pair in (0, 1))


def gathered(view: KVView, group: int, first: int, pages: int, page_bytes: int) -> bytes:
    into = bytearray(pages * page_bytes)
    view.gather(group, first, pages, memoryview(into))
    return bytes(into)


def test_a_view_that_is_too_short_says_what_to_pass() -> None:
    layer = np.zeros((2, 8, 4, 2, 8), np.float16)
    view = load_transfer("cpu").create({}).register([layer], dims="2bthd", page_tokens=8).view([0, 1, 2])
    with pytest.raises(LayoutError) as refused:
        view.gather(0, 0, 4, memoryview(bytearray(10)))
    assert str(refused.value) == (
        "the view has 1 whole pages, and pages 0 to 4 are to be copied; pass to `view` the blocks of all 4, or limit "
        "the call (`max_tokens` of a retrieve, fewer tokens of a store)"
    )


def test_the_transfer_is_found_by_name(layers: list[Any]) -> None:
    transfer = load_transfer("cpu").create({})
    assert isinstance(transfer, Transfer)
    view = transfer.register(layers, dims="2bthd", page_tokens=TOKENS).view([5])
    assert isinstance(view, KVView)
    assert gathered(view, 0, 0, 1, 4096) == pages_of(layers, [5])


def test_options_of_the_transfer() -> None:
    with pytest.raises(ConfigError, match=r"transfer cpu: .*stream"):
        load_transfer("cpu").create({"stream": True})
    with pytest.raises(ConfigError, match=r"staging.*64KiB"):
        load_transfer("cpu").create({"streams": True, "staging": 5})


@pytest.mark.parametrize("block_ids", [(6, 1, 3), [6, 1, 3], np.array([6, 1, 3], np.int32), torch.tensor([6, 1, 3])])
def test_block_tables_of_all_kinds(kv: PagedKV, layers: list[Any], block_ids: Any) -> None:
    assert gathered(kv.view(block_ids), 0, 0, 3, kv.page_bytes) == pages_of(layers, [6, 1, 3])


def test_a_block_table_is_copied(kv: PagedKV, layers: list[Any]) -> None:
    block_ids = np.array([6, 1])
    view = kv.view(block_ids)
    block_ids[:] = 1000
    assert gathered(view, 0, 0, 2, kv.page_bytes) == pages_of(layers, [6, 1])


@pytest.mark.parametrize("block_ids", [[0, 8], [-1], [2**40], [0.0], [[0, 1]], np.array([2**64 - 1], np.uint64)])
def test_block_ids_that_are_none(kv: PagedKV, block_ids: Any) -> None:
    with pytest.raises(LayoutError, match="block ids"):
        kv.view(block_ids)


def test_an_empty_view(kv: PagedKV) -> None:
    view = kv.view([])
    assert view.pages == 0
    view.gather(0, 0, 0, memoryview(bytearray()))
    view.scatter(0, 0, 0, memoryview(b""))


def test_all_blocks_in_order(kv: PagedKV, layers: list[Any]) -> None:
    view = kv.view_all()
    assert gathered(view, 0, 0, view.pages, kv.page_bytes) == pages_of(layers, range(BLOCKS))


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("group", "first", "pages", "size"),
    [(1, 0, 1, 4096), (0, -1, 1, 4096), (0, 2, 2, 8192), (0, 4, 1, 4096), (0, 1, -1, 0), (0, 0, 1, 4095), (0, 0, 1, 0)],
)
def test_pages_and_buffers_that_do_not_fit(
    kv: PagedKV, layers: list[Any], verb: str, group: int, first: int, pages: int, size: int
) -> None:
    before = pages_of(layers, range(BLOCKS))
    buffer = bytearray(b"\xaa" * size)
    with pytest.raises(LayoutError):
        getattr(kv.view([0, 1, 2]), verb)(group, first, pages, memoryview(buffer))
    assert buffer == b"\xaa" * size
    assert pages_of(layers, range(BLOCKS)) == before


def test_a_buffer_in_pieces_is_refused(kv: PagedKV) -> None:
    with pytest.raises(LayoutError, match="in one piece"):
        kv.view([0]).gather(0, 0, 1, memoryview(bytearray(2 * kv.page_bytes))[::2])


def test_a_read_only_buffer_can_only_be_read(kv: PagedKV, layers: list[Any]) -> None:
    source = pages_of(layers, [0])
    kv.view([3]).scatter(0, 0, 1, memoryview(source))
    assert pages_of(layers, [3]) == source
    with pytest.raises(LayoutError, match="read-only"):
        kv.view([3]).gather(0, 0, 1, memoryview(source))


def test_read_only_tensors_can_only_be_read(layers: list[Any]) -> None:
    arrays = [layer.numpy() for layer in layers]
    arrays[2].flags.writeable = False
    view = PagedKV(arrays, dims="2bthd", page_tokens=TOKENS).view([2])
    assert gathered(view, 0, 0, 1, 4096) == pages_of(layers, [2])
    with pytest.raises(LayoutError, match="read-only"):
        view.scatter(0, 0, 1, memoryview(bytes(4096)))


@pytest.mark.parametrize("format_", ["B", "b", "H", "d"])
def test_buffers_of_any_format(kv: PagedKV, layers: list[Any], format_: str) -> None:
    into = bytearray(kv.page_bytes)
    kv.view([4]).gather(0, 0, 1, memoryview(into).cast(format_))  # type: ignore[call-overload]
    assert into == pages_of(layers, [4])


def test_pages_in_any_order_and_number(kv: PagedKV, layers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    block_ids = [7, 0, 6, 1, 5, 2, 4, 3]
    for ahead in (1 << 20, 1):
        monkeypatch.setattr(views, "INDEX_AHEAD", ahead)
        view = kv.view(block_ids)
        for first, pages in [(3, 2), (0, 1), (1, 1), (2, 4), (6, 2), (5, 1), (0, 8), (7, 1)]:
            assert gathered(view, 0, first, pages, kv.page_bytes) == pages_of(layers, block_ids[first : first + pages])


def test_groups_are_views_by_number(kv: PagedKV, layers: list[Any]) -> None:
    latent = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 64)
    other = PagedKV([latent], dims="btd", page_tokens=1)
    grouped = GroupedView([kv.view([6]), other.view([3, 2])])
    assert isinstance(grouped, KVView)
    assert gathered(grouped, 0, 0, 1, 4096) == pages_of(layers, [6])
    assert gathered(grouped, 1, 1, 1, 64) == latent[2].numpy().tobytes()
    grouped.scatter(1, 0, 1, memoryview(bytes(range(64))))
    assert latent[3].flatten().tolist() == list(range(64))
    for group in (-1, 2):
        with pytest.raises(LayoutError, match=f"group {group}"):
            grouped.gather(group, 0, 0, memoryview(b""))


@pytest.mark.parametrize("dim", [64, 3])
def test_a_view_keeps_the_tensors(dim: int) -> None:
    """Also where heads of 3 bytes are copied as strided elements."""
    tensor = np.arange(2 * 4 * dim, dtype=np.uint8).reshape(2, 4, dim)
    padded = np.zeros((2, 4, dim + 1), np.uint8)
    padded[..., :dim] = tensor
    alive = weakref.ref(padded)
    view = CpuTransfer().register([padded[..., :dim]], dims="btd", page_tokens=4).view([1])
    del padded
    gc.collect()
    assert alive() is not None
    assert gathered(view, 0, 0, 1, 4 * dim) == tensor[1].tobytes()
    del view
    gc.collect()
    assert alive() is None


def test_threads_may_share_a_view(kv: PagedKV, layers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "INDEX_AHEAD", 1)
    block_ids = [7, 0, 6, 1, 5, 2, 4, 3]
    view = kv.view(block_ids)
    wrong: list[int] = []

    def work(page: int) -> None:
        expected = pages_of(layers, [block_ids[page]])
        wrong.extend(page for _ in range(200) if gathered(view, 0, page, 1, kv.page_bytes) != expected)

    threads = [threading.Thread(target=work, args=(page,)) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3, 1, 2], [3, 0, 2, 1]])
def test_a_buffer_between_the_tensors(order: list[int], shift: int) -> None:
    """Layers below and above the slots, in any order: the same bytes, nothing else written, no copy on the way."""
    size = BLOCKS * 2 * 4 * 2048
    slot_bytes = 4 * size
    memory = np.random.default_rng(1).integers(0, 256, 4 * (size + shift) + 2 * slot_bytes, np.uint8)
    starts = [0, size + shift, 2 * (size + shift) + 2 * slot_bytes, 3 * (size + shift) + 2 * slot_bytes]
    layers = [torch.from_numpy(memory[at : at + size]).view(2, BLOCKS, 4, 2048) for at in starts]
    layers = [layers[i] for i in order]
    kv = PagedKV(layers, dims="2btd", page_tokens=4)
    slot = memoryview(memory.data)[2 * (size + shift) :][:slot_bytes]
    view = kv.view(range(BLOCKS)[::-1])
    view.gather(0, 0, 1, slot[: kv.page_bytes])  # so that the index is there
    before = memory.copy()
    tracemalloc.start()
    view.gather(0, 0, 4, slot[: 4 * kv.page_bytes])
    view.scatter(0, 4, 4, slot[: 4 * kv.page_bytes])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert slot[: 4 * kv.page_bytes] == pages_of(layers, [7, 6, 5, 4])
    assert pages_of(layers, [3, 2, 1, 0]) == pages_of(layers, [7, 6, 5, 4])
    assert peak < kv.page_bytes
    at = 2 * (size + shift)
    before[at : at + 4 * kv.page_bytes] = memory[at : at + 4 * kv.page_bytes]
    for start in starts:
        layer = before[start : start + size].reshape(2, BLOCKS, -1)
        layer[:, [3, 2, 1, 0]] = layer[:, [7, 6, 5, 4]]
    np.testing.assert_array_equal(memory, before)
