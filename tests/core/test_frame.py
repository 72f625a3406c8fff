"""A frame is exactly the chunk that was asked for, or it is refused."""

import random
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core import frame
from lmcache_core.errors import FrameError, LayoutError

SPACE = bytes(range(32))
PARENT = b"\x07" * 32


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(1, count + 1)]


def sealed(
    form: frame.FrameShape,
    seed: int = 0,
    space: bytes = SPACE,
    parent: bytes = PARENT,
    pages: list[bytes] | None = None,
) -> bytearray:
    data = bytearray(random.Random(seed).randbytes(form.nbytes))
    frame.seal(memoryview(data), form, space, parent, keys(form.pages) if pages is None else pages)
    return data


def check(data: bytearray, form: frame.FrameShape) -> None:
    frame.verify(memoryview(data), form, SPACE, PARENT, keys(form.pages))


@given(
    pages=st.integers(1, 9),
    shards=st.integers(1, 4),
    page_bytes=st.one_of(st.integers(1, 9000), st.sampled_from([4096, 8192])),
)
def test_a_sealed_frame_verifies_and_keeps_its_payload(pages: int, shards: int, page_bytes: int) -> None:
    form = frame.shape(pages, shards, page_bytes)
    payload = random.Random(pages).randbytes(form.payload_bytes)
    data = bytearray(b"\xff" * form.nbytes)
    data[form.header_bytes : form.header_bytes + form.payload_bytes] = payload
    frame.seal(memoryview(data), form, SPACE, b"", keys(pages))
    frame.verify(memoryview(data), form, SPACE, b"", keys(pages))
    assert data[form.header_bytes : form.header_bytes + form.payload_bytes] == payload
    assert not any(data[form.header_bytes + form.payload_bytes :])
    assert form.nbytes % 4096 == 0
    assert form.header_bytes % 4096 == 0
    found = frame.read_header(memoryview(data))
    assert found == frame.Header(form, SPACE, b"", tuple(keys(pages)), frame.PLAIN, form.nbytes)


@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    form = frame.shape(3, 2, 1000)
    whole = sealed(form)
    bit = data.draw(st.integers(0, form.nbytes * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        check(whole, form)


def test_every_byte_of_a_small_frame_counts() -> None:
    form = frame.shape(1, 1, 100)
    whole = sealed(form)
    for place in range(form.nbytes):
        whole[place] ^= 0x40
        with pytest.raises(FrameError):
            check(whole, form)
        whole[place] ^= 0x40
    check(whole, form)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": b"\x01" * 32}, "another namespace"),
        ({"parent": b"\x01" * 32}, "another parent"),
        ({"pages": [b"\x01" * 32, b"\x01" * 32, b"\x09" * 32]}, "other pages"),
    ],
)
def test_a_valid_frame_of_another_chunk_is_refused(change: dict[str, object], message: str) -> None:
    form = frame.shape(3, 1, 500)
    arguments: dict[str, object] = {"space": SPACE, "parent": PARENT, "pages": keys(3)} | change
    with pytest.raises(FrameError, match=message):
        check(sealed(form, **arguments), form)  # type: ignore[arg-type]


@pytest.mark.parametrize(("told", "asked"), [(PARENT, b""), (b"", PARENT), (b"", b"")])
def test_what_is_in_front_of_a_chunk_may_be_left_out(told: bytes, asked: bytes) -> None:
    """Its first page's key says it; but nothing else that the header says may be another."""
    form = frame.shape(3, 1, 500)
    whole = sealed(form, parent=told)
    frame.verify(memoryview(whole), form, SPACE, asked, keys(3))
    with pytest.raises(FrameError, match="other pages"):
        frame.verify(memoryview(whole), form, SPACE, asked, [b"\x09" * 32, *keys(3)[1:]])
    for place in range(form.header_bytes):
        whole[place] ^= 0x40
        with pytest.raises(FrameError):
            frame.verify(memoryview(whole), form, SPACE, asked, keys(3))
        whole[place] ^= 0x40


def test_swapped_frames_are_refused() -> None:
    form = frame.shape(2, 1, 500)
    other = sealed(form, pages=[b"\x21" * 32, b"\x22" * 32])
    with pytest.raises(FrameError, match="other pages"):
        check(other, form)


@pytest.mark.parametrize(
    ("field", "place", "layout", "value"),
    [
        ("format version", 8, "<H", 1),
        ("codec", 10, "B", 9),
        ("coding", 11, "B", 2),
        ("coding", 11, "B", 1),
        ("page size", 32, "<Q", 499),
        ("reserved field", 56, "B", 1),
        ("key", 128, "B", 1),
        ("salt", 144, "B", 1),
        ("reserved field", 176, "B", 1),
        ("behind its end", 4095, "B", 1),
    ],
)
def test_a_header_with_a_right_checksum_but_other_values_is_refused(
    field: str, place: int, layout: str, value: int
) -> None:
    form = frame.shape(2, 1, 500)
    whole = sealed(form)
    struct.pack_into(layout, whole, place, value)
    whole[40:56] = bytes(16)
    whole[40:56] = xxhash.xxh3_128_digest(whole[: form.header_bytes])
    with pytest.raises(FrameError, match=field):
        check(whole, form)
    with pytest.raises(FrameError):
        frame.read_header(bytes(whole))


def test_a_coded_frame_is_no_plain_one() -> None:
    form = frame.shape(2, 1, 500)
    whole = sealed(form)
    whole[10] = frame.Codec.LZ4  # pages may be stored as they are in such a frame too
    whole[40:56] = bytes(16)
    whole[40:56] = xxhash.xxh3_128_digest(whole[: form.header_bytes])
    with pytest.raises(FrameError, match="is coded"):
        check(whole, form)
    stored = frame.verify_stored(memoryview(whole), form, SPACE, PARENT, keys(2))
    assert stored == frame.read_header(bytes(whole)).coding == frame.Coding(frame.Codec.LZ4)


@pytest.mark.parametrize("nbytes", [0, 501, 1 << 63])
def test_a_length_that_cannot_be_is_refused(nbytes: int) -> None:
    form = frame.shape(2, 1, 500)
    for codec in frame.Codec:
        whole = sealed(form)
        whole[10] = codec
        struct.pack_into("<Q", whole, 192 + 2 * 32 + 24, nbytes)
        whole[40:56] = bytes(16)
        whole[40:56] = xxhash.xxh3_128_digest(whole[: form.header_bytes])
        for reads in (frame.verify_stored, frame.verify_header):
            with pytest.raises(FrameError, match="page 1 of shard 0"):
                reads(memoryview(whole), form, SPACE, PARENT, keys(2))
        with pytest.raises(FrameError, match="page 1 of shard 0"):
            frame.read_header(bytes(whole))


def test_a_checksum_swapped_between_pages_is_refused() -> None:
    form = frame.shape(2, 1, 500)
    whole = sealed(form)
    head = form.header_bytes
    whole[head : head + 500], whole[head + 500 : head + 1000] = (
        whole[head + 500 : head + 1000],
        whole[head : head + 500],
    )
    with pytest.raises(FrameError, match="page 0 of shard 0"):
        check(whole, form)


def test_the_damaged_page_and_shard_are_named() -> None:
    form = frame.shape(4, 3, 777)
    whole = sealed(form)
    whole[form.header_bytes + (2 * 4 + 1) * 777 + 5] ^= 1
    with pytest.raises(FrameError, match="page 1 of shard 2"):
        check(whole, form)


@given(st.binary(max_size=9000))
def test_reading_a_header_from_anything_is_refused_or_right(data: bytes) -> None:
    with pytest.raises(FrameError):
        frame.read_header(data)


@given(st.data())
def test_a_header_with_lying_sizes_allocates_nothing_and_is_refused(data: st.DataObject) -> None:
    whole = sealed(frame.shape(2, 1, 500))
    for place, layout in ((12, "<I"), (16, "<Q"), (24, "<I"), (28, "<I"), (32, "<Q")):
        size = struct.calcsize(layout) * 8
        struct.pack_into(layout, whole, place, data.draw(st.integers(0, 2**size - 1)))
    whole[40:56] = bytes(16)
    whole[40:56] = xxhash.xxh3_128_digest(whole[:4096])
    try:
        found = frame.read_header(memoryview(whole))
    except FrameError:
        return
    assert found.form == frame.shape(2, 1, 500)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1 << 40), (1 << 20, 1, 1)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError):
        frame.shape(*sizes)


def test_wrong_buffer_sizes_are_refused() -> None:
    form = frame.shape(2, 1, 500)
    whole = sealed(form)
    with pytest.raises(LayoutError):
        frame.verify(memoryview(whole)[:-4096], form, SPACE, PARENT, keys(2))
    with pytest.raises(LayoutError):
        frame.seal(memoryview(whole), form, SPACE, PARENT, keys(3))
    with pytest.raises(LayoutError):
        frame.seal(memoryview(whole), form, SPACE[:5], PARENT, keys(2))


def test_golden_frame() -> None:
    """The bytes of the format, so that a change of it cannot go unnoticed: stored chunks must stay readable. What is
    coded is in test_coding.py."""
    form = frame.shape(2, 1, 10)
    data = bytearray(form.nbytes)
    data[4096:4116] = bytes(range(20))
    frame.seal(memoryview(data), form, SPACE, PARENT, keys(2))
    assert data[:40].hex() == ("4c4d434b5646520a0200000000100000140000000000000001000000020000000a00000000000000")
    assert data[56:256] == bytes(8) + SPACE + PARENT + bytes(64) + b"\x01" * 32 + b"\x02" * 32
    first, second = xxhash.xxh3_128_digest(bytes(range(10))), xxhash.xxh3_128_digest(bytes(range(10, 20)))
    ten = (10).to_bytes(8, "little")
    assert data[256:304] == ten + first + ten + second
    assert not any(data[304:4096])
    assert data[40:56].hex() == "8ce9147718ddb5fb8fb026923c739d26"
