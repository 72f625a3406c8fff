"""Where the pages of a host pool lie, told by the pool itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lmcache_core.connectors.sglang.hostpages import Buffer, FlatPages, HostPages, as_page_numbers, buffers_of
from lmcache_core.errors import LayoutError


def spaced(first: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> object:
    def locate(pages: Sequence[int]) -> tuple[list[int], list[int]]:
        places = [a + page * stride for page in pages for a, stride in zip(first, strides, strict=True)]
        return places, list(sizes) * len(pages)

    return locate


@pytest.mark.parametrize("pages", [1, 2, 3, 100])
def test_buffers_of_pages_at_even_distances(pages: int) -> None:
    found = buffers_of(spaced([1000, 90000], [8, 4], [8, 16]), pages)  # type: ignore[arg-type]
    second = 16 if pages > 1 else 4
    assert found == [Buffer(1000, 8, 8), Buffer(90000, 4, second)]


@pytest.mark.parametrize(
    ("locate", "text"),
    [
        (lambda pages: ([page**2 * 100 for page in pages], [8] * len(pages)), "even distances"),
        (lambda pages: ([page * 100 for page in pages], [8 + page for page in pages]), "even distances"),
        (lambda pages: ([page * 4 for page in pages], [8] * len(pages)), "overlap"),
        (lambda pages: ([1000 - page * 8 for page in pages], [8] * len(pages)), "overlap"),
        (lambda pages: ([], []), "0 buffers"),
        (lambda pages: ([8] * (len(pages) + 1), [8] * (len(pages) + 1)), "buffers"),
        (lambda pages: ([page * 100 for page in pages], [8]), "buffers"),
    ],
)
def test_pages_that_lie_otherwise_are_refused(locate: object, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        buffers_of(locate, 10)  # type: ignore[arg-type]


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(LayoutError, match="no pages"):
        buffers_of(lambda pages: ([], []), 0)


def test_pages_are_copied_out_and_in() -> None:
    memory = np.arange(2 * 6 * 8, dtype=np.uint8).reshape(2, 6, 8)
    at = memory.ctypes.data
    pages = HostPages([Buffer(at, 8, 8), Buffer(at + 48, 8, 8)], 6, 4, memory)
    assert pages.page_bytes == 16
    taken = bytearray(32)
    pages.view([4, 1]).gather(0, 0, 2, memoryview(taken))
    assert bytes(taken) == b"".join(memory[:, page].tobytes() for page in (4, 1))
    pages.view([0, 3]).scatter(0, 0, 2, memoryview(taken).toreadonly())
    assert np.array_equal(memory[:, 0], memory[:, 4])
    assert np.array_equal(memory[:, 3], memory[:, 1])
    with pytest.raises(LayoutError, match="6 blocks"):
        pages.view([6])


def test_flat_pages_have_their_parts_in_another_order() -> None:
    order = np.array([0, 2, 1, 3])
    pages = [np.frombuffer(bytes(text, "ascii"), np.uint8).copy() for text in ("AABBCCDD", "aabbccdd")]
    taken = bytearray(16)
    FlatPages(pages, order).gather(0, 0, 2, memoryview(taken))
    assert taken == b"AACCBBDDaaccbbdd"
    back = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
    FlatPages(back, order).scatter(0, 0, 2, memoryview(taken))
    assert [page.tobytes() for page in back] == [b"AABBCCDD", b"aabbccdd"]
    FlatPages(pages).gather(0, 1, 1, memoryview(taken)[:8])
    assert taken[:8] == b"aabbccdd"


def test_flat_pages_of_another_size_are_refused() -> None:
    pages = [np.zeros(8, np.uint8), np.zeros(9, np.uint8)]
    with pytest.raises(LayoutError, match="8 bytes"):
        FlatPages(pages).gather(0, 0, 2, memoryview(bytearray(16)))
    with pytest.raises(LayoutError, match="not among"):
        FlatPages(pages).scatter(0, 1, 2, memoryview(bytearray(16)))


def test_page_numbers() -> None:
    places = [8, 9, 10, 11, 0, 1, 2, 3]
    assert as_page_numbers(places, 4, 3).tolist() == [2, 0]
    assert as_page_numbers(np.array([], np.int64), 4, 3).tolist() == []
    for wrong in ([1, 2, 3, 4], [0, 1, 2], [0, 1, 3, 2], [12, 13, 14, 15], [-4, -3, -2, -1], [0.0, 1.0, 2.0, 3.0]):
        with pytest.raises(LayoutError, match="whole pages"):
            as_page_numbers(wrong, 4, 3)
