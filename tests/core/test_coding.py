"""Coded frames: what was stored comes back, and nothing else does, whatever happens to the bytes on the way."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import frame
from lmcache_core.coding import frames
from lmcache_core.coding.cipher import Key, Keyring
from lmcache_core.coding.codecs import load_codec
from lmcache_core.coding.frames import Encoded, Subject, Unreadable, decode, encode
from lmcache_core.coding.staging import Staging
from lmcache_core.coding.worth import AGAIN, TRIES, Worth
from lmcache_core.config.keys import key_of
from lmcache_core.errors import FrameError, LayoutError
from lmcache_core.frame import Codec

GOLDEN = Path(__file__).parent / "golden" / "frames.json"
SPACE = bytes(range(32))
PARENT = b"\x07" * 32
SECRET = bytes(range(100, 132))
OTHER = bytes(range(200, 232))
RING = Keyring(SECRET)
CODECS = [Codec.NONE, Codec.LZ4, Codec.ZSTD]
CODINGS = [(codec, secret) for codec in CODECS for secret in (None, SECRET)][1:]


def keys(count: int, start: int = 1) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(start, start + count)]


def subject(pages: int = 3, shards: int = 2, page_bytes: int = 1000, **changes: Any) -> Subject:
    of = Subject(frame.shape(pages, shards, page_bytes), SPACE, PARENT, keys(pages))
    return of._replace(**changes)


def content(of: Subject, seed: int = 0, kinds: str = "smooth") -> bytes:
    """A payload whose pages shrink (`smooth`), don't (`noise`), or some of them (`mixed`)."""
    rng = random.Random(seed)
    pages = []
    for number in range(of.form.pages * of.form.shards):
        size = of.form.page_bytes
        noisy = kinds == "noise" or (kinds == "mixed" and number % 2)
        pages.append(rng.randbytes(size) if noisy else (rng.randbytes(size // 20 + 1) * 20)[:size])
    return b"".join(pages)


def plain(of: Subject, payload: bytes) -> memoryview:
    form = of.form
    data = memoryview(bytearray(b"\xee" * form.nbytes))
    data[form.header_bytes : form.header_bytes + form.payload_bytes] = payload
    return data


def stored(of: Subject, payload: bytes, codec: Codec, secret: bytes | None) -> bytearray:
    """The bytes that a tier gets."""
    source = plain(of, payload)
    into = memoryview(bytearray(b"\xaa" * of.form.nbytes))
    encoded = encode(source, into, of, codec, None if secret is None else Key(secret))
    if not encoded.nbytes:
        frame.seal(source, *of)
        return bytearray(source)
    return bytearray(into[: encoded.nbytes])


def loaded(of: Subject, data: bytes | bytearray | memoryview, ring: Keyring | None) -> bytes | Unreadable:
    """What comes of reading it into a slot that held something else: a plain frame, or why not."""
    slot = memoryview(bytearray(b"\x5a" * max(of.form.nbytes, len(data))))
    slot[: len(data)] = data
    found = decode(slot[: of.form.nbytes], min(len(data), of.form.nbytes), of, ring)
    if isinstance(found, Unreadable):
        return found
    frame.verify(slot[: of.form.nbytes], *of)
    return bytes(slot[of.form.header_bytes : of.form.header_bytes + of.form.payload_bytes])


def never_wrong(of: Subject, data: bytes | bytearray, ring: Keyring | None, payload: bytes) -> bool:
    """Whether it is a hit; a hit with other bytes fails."""
    try:
        found = loaded(of, data, ring)
    except (FrameError, LayoutError):
        return False
    assert isinstance(found, Unreadable) or found == payload, "a hit with wrong bytes"
    return not isinstance(found, Unreadable)


def ring_of(secret: bytes | None) -> Keyring | None:
    return None if secret is None else Keyring(secret)


def summed(data: bytearray, header: int = 4096) -> bytearray:
    """With a right checksum of the header, as anybody could make it."""
    data[40:56] = bytes(16)
    data[40:56] = xxhash.xxh3_128_digest(data[:header])
    return data


# What comes back


@settings(max_examples=60, deadline=None)
@given(
    pages=st.integers(1, 7),
    shards=st.integers(1, 3),
    page_bytes=st.one_of(st.integers(1, 9000), st.sampled_from([4096, 8192])),
    kinds=st.sampled_from(["smooth", "noise", "mixed"]),
    codec=st.sampled_from(CODECS),
    secret=st.sampled_from([None, SECRET]),
    seed=st.integers(0, 99),
)
def test_what_was_stored_comes_back(
    pages: int, shards: int, page_bytes: int, kinds: str, codec: Codec, secret: bytes | None, seed: int
) -> None:
    of = subject(pages, shards, page_bytes)
    payload = content(of, seed, kinds)
    data = stored(of, payload, codec, secret)
    assert len(data) % 4096 == 0
    assert len(data) <= of.form.nbytes
    assert loaded(of, data, ring_of(secret)) == payload
    header = frame.read_header(bytes(data))
    assert (header.form, header.nbytes, header.coding.encrypted) == (of.form, len(data), secret is not None)
    assert header.coding.codec in (Codec.NONE, codec)
    assert frame.verify_stored(memoryview(data), *of) == header.coding


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_what_shrinks_takes_less(codec: Codec, secret: bytes | None) -> None:
    of = subject(4, 2, 64 << 10)
    data = stored(of, content(of), codec, secret)
    assert len(data) < of.form.nbytes / 5
    mixed = stored(of, content(of, kinds="mixed"), codec, secret)
    assert of.form.nbytes * 0.5 < len(mixed) < of.form.nbytes * 0.65


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_what_does_not_shrink_is_stored_as_it_is(codec: Codec, secret: bytes | None) -> None:
    of = subject(4, 2, 64 << 10)
    into = memoryview(bytearray(of.form.nbytes))
    encoded = encode(plain(of, content(of, kinds="noise")), into, of, codec, None if secret is None else Key(secret))
    assert encoded.saving is not None
    assert encoded.saving < 0.001
    assert encoded.nbytes == (0 if secret is None else of.form.nbytes)
    if secret is not None:
        assert frame.read_header(into).coding.codec is Codec.NONE


def test_encryption_alone_keeps_the_size() -> None:
    of = subject(3, 2, 1001)
    assert len(stored(of, content(of), Codec.NONE, SECRET)) == of.form.nbytes


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@given(
    blocks=st.lists(st.sampled_from(["noise", "zeros", "half"]), min_size=1, max_size=9),
    rest=st.integers(1, 100),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_pages_of_many_blocks_come_back(codec: Codec, blocks: list[str], rest: int, seed: int) -> None:
    """Those that shrink behind those that don't, and the other way round: none is overwritten before it is read."""
    rng = random.Random(seed)
    kinds = {"noise": lambda: rng.randbytes(100), "zeros": lambda: bytes(100), "half": lambda: rng.randbytes(50) * 2}
    page = b"".join(kinds[kind]() for kind in blocks) + rng.randbytes(rest)
    of = subject(2, 2, len(page))
    payload = page + bytes(len(page)) + page[::-1] + page
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "BLOCK", 100)
        for secret in (None, SECRET):
            assert loaded(of, stored(of, payload, codec, secret), ring_of(secret)) == payload


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_pages_larger_than_a_block(codec: Codec) -> None:
    of = subject(2, 1, 2 * frames.BLOCK + 5000)
    payload = content(of, kinds="mixed")
    data = stored(of, payload, codec, SECRET)
    assert of.form.nbytes * 0.5 < len(data) < of.form.nbytes * 0.6
    assert loaded(of, data, RING) == payload


# Golden frames


def golden_subject() -> Subject:
    return subject(2, 2, 300)


def golden_payload() -> bytes:
    return (bytes(range(50)) * 24)[:1200]


def write_golden() -> None:
    """Run by hand when the format changes: `python -c 'from tests.core.test_coding import *; write_golden()'`."""
    frames.os.urandom = lambda count: bytes(range(7, 7 + count))  # type: ignore[attr-defined]
    made = {}
    for codec in CODECS:
        for secret in (None, SECRET):
            data = stored(golden_subject(), golden_payload(), codec, secret)
            name = f"{codec.name.lower()}{', encrypted' if secret else ''}"
            made[name] = base64.b64encode(zlib.compress(data, 9)).decode()
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


@pytest.mark.parametrize("name", ["none", "lz4", "zstd", "none, encrypted", "lz4, encrypted", "zstd, encrypted"])
def test_golden_frames_can_be_read(name: str) -> None:
    """Stored chunks must stay readable."""
    data = zlib.decompress(base64.b64decode(json.loads(GOLDEN.read_text())[name]))
    of, encrypted = golden_subject(), name.endswith("encrypted")
    assert loaded(of, data, RING if encrypted else None) == golden_payload()
    codec = name.split(",")[0].upper()
    salt = bytes(range(7, 39)) if encrypted else b""
    key_id = hashlib.sha256(b"lmcache-core key id\0" + SECRET).digest()[:16] if encrypted else b""
    assert frame.read_header(data).coding == (Codec[codec], key_id, salt)
    assert data[8:12] == bytes([2, 0, Codec[codec], encrypted])
    assert data[128:192] == (key_id or bytes(16)) + (salt or bytes(32)) + bytes(16)
    assert data[192:256] == b"".join(keys(2))


@pytest.mark.parametrize("codec", CODECS)
def test_encrypted_frames_are_what_the_documentation_says(codec: Codec) -> None:
    """Decrypted by other means, from the text of docs/coding.md."""
    of = subject(3, 2, 5000)
    payload = content(of, kinds="mixed")
    data = stored(of, payload, codec, SECRET)
    salt = data[144:176]
    extracted = hmac.digest(salt, SECRET, "sha256")
    key = hmac.digest(extracted, b"lmcache-core frame\x01", "sha256")
    identity = hashlib.sha256(data[:40] + bytes(16) + data[56:192] + b"".join(of.pages)).digest()
    at = of.form.header_bytes
    found = b""
    for number, (length, tag) in enumerate(struct.iter_unpack("<Q16s", data[192 + 96 : 192 + 96 + 24 * 6])):
        nonce = struct.pack("<IQ", number // 3, number % 3)
        page = AESGCM(key).decrypt(nonce, bytes(data[at : at + length]) + tag, identity)
        if length < 5000:
            assert struct.unpack("<I", page[-4:]) == (length - 4,)
            page = load_codec(codec)().decompress(memoryview(page)[:-4], 5000)
        found += page
        at += length
    assert found == payload


# What doesn't


@settings(max_examples=300, deadline=None)
@given(data=st.data(), coding=st.sampled_from(CODINGS), kinds=st.sampled_from(["smooth", "mixed"]))
def test_any_flipped_bit_is_found(data: st.DataObject, coding: tuple[Codec, bytes | None], kinds: str) -> None:
    of = subject(3, 2, 3000)
    payload = content(of, kinds=kinds)
    whole = stored(of, payload, *coding)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    assert not never_wrong(of, whole, ring_of(coding[1]), payload)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    coding=st.sampled_from(CODINGS),
    where=st.one_of(st.integers(0, 39), st.integers(56, 400)),
)
def test_any_changed_header_with_a_right_checksum_is_no_wrong_hit(
    data: st.DataObject, coding: tuple[Codec, bytes | None], where: int
) -> None:
    """The header's checksum is no secret."""
    of = subject(3, 2, 3000)
    payload = content(of)
    whole = stored(of, payload, *coding)
    whole[where] = data.draw(st.integers(0, 255))
    never_wrong(of, summed(whole), ring_of(coding[1]), payload)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), coding=st.sampled_from(CODINGS))
def test_any_truncation_is_found(data: st.DataObject, coding: tuple[Codec, bytes | None]) -> None:
    of = subject(3, 2, 3000)
    payload = content(of, kinds="mixed")
    whole = stored(of, payload, *coding)
    end = data.draw(st.one_of(st.integers(0, len(whole) - 1), st.sampled_from(range(4096, len(whole), 4096))))
    assert not never_wrong(of, whole[:end], ring_of(coding[1]), payload)


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_longer_than_it_says_is_refused(coding: tuple[Codec, bytes | None]) -> None:
    of = subject(3, 2, 3000)
    whole = stored(of, content(of), *coding)
    if len(whole) < of.form.nbytes:
        with pytest.raises(FrameError, match="longer than it says"):
            loaded(of, whole + bytes(4096), ring_of(coding[1]))


def swap_pages(whole: bytearray, of: Subject, one: int, two: int) -> bytearray:
    """Exchange two pages of equal length together with what the table says of them."""
    table = 192 + 32 * of.form.pages
    lengths = [struct.unpack_from("<Q", whole, table + 24 * n)[0] for n in range(of.form.pages * of.form.shards)]
    assert lengths[one] == lengths[two]
    for size, at in ((24, table), (lengths[one], of.form.header_bytes)):
        a, b = at + size * one, at + size * two
        whole[a : a + size], whole[b : b + size] = whole[b : b + size], whole[a : a + size]
    return summed(whole)


@pytest.mark.parametrize(("one", "two", "damaged"), [(0, 1, "page 1 of shard 0"), (1, 4, "page 1 of shard 1")])
def test_pages_and_shards_cannot_be_exchanged_in_an_encrypted_frame(one: int, two: int, damaged: str) -> None:
    of = subject(3, 2, 1000)
    whole = swap_pages(stored(of, content(of), Codec.NONE, SECRET), of, one, two)
    with pytest.raises(FrameError, match=damaged):
        loaded(of, whole, RING)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("change", [{"space": b"\x01" * 32}, {"pages": keys(3, start=9)}, {"parent": b"\x08" * 32}])
def test_chunks_cannot_be_exchanged(change: dict[str, Any], coding: tuple[Codec, bytes | None]) -> None:
    """Neither as they are, nor with a header made to look like the other's."""
    of = subject()
    other = of._replace(**change)
    payload = content(of)
    whole = stored(other, payload, *coding)
    with pytest.raises(FrameError, match=r"namespace|parent|other pages"):
        loaded(of, whole, ring_of(coding[1]))
    if coding[1] is None:
        return  # who can write to a tier that is not encrypted can write anything there
    whole[64:128] = of.space + of.parent
    whole[192 : 192 + 96] = b"".join(of.pages)
    with pytest.raises(FrameError, match="is damaged"):
        loaded(of, summed(whole), RING)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("told", "asked"), [(True, False), (False, True)])
def test_who_stores_or_asks_need_not_tell_what_is_in_front(
    told: bool, asked: bool, coding: tuple[Codec, bytes | None]
) -> None:
    """The keys of the pages say it."""
    of = subject()
    unknown = of._replace(parent=b"")
    payload = content(of)
    whole = stored(of if told else unknown, payload, *coding)
    assert loaded(of if asked else unknown, whole, ring_of(coding[1])) == loaded(
        of if told else unknown, whole, ring_of(coding[1])
    )
    if coding[1] is None:
        return
    whole[96:128] = bytes(32) if told else of.parent  # a header that was written anew
    with pytest.raises(FrameError, match="is damaged"):
        loaded(of if asked else unknown, summed(whole), RING)


def test_a_page_of_one_frame_is_none_of_another() -> None:
    """The same chunk, encrypted twice: the second has a salt of its own."""
    of = subject()
    payload = content(of)
    one, two = (stored(of, payload, Codec.NONE, SECRET) for _ in range(2))
    assert one[144:176] != two[144:176]
    start = of.form.header_bytes
    assert all(one[at : at + 16] not in two for at in range(start, start + of.form.payload_bytes, 16))
    two[start:] = one[start:]
    with pytest.raises(FrameError, match="damaged"):
        loaded(of, two, RING)


def test_another_key_is_told_from_damage() -> None:
    of = subject()
    payload = content(of)
    whole = stored(of, payload, Codec.NONE, SECRET)
    assert loaded(of, whole, Keyring(OTHER)) is Unreadable.UNKNOWN_KEY
    assert loaded(of, whole, None) is Unreadable.UNKNOWN_KEY
    assert loaded(of, whole, Keyring(OTHER, older=[SECRET])) == payload
    assert loaded(of, whole, Keyring(OTHER, tenants={"acme": SECRET})) == payload
    whole[128:144] = Key(OTHER).id
    with pytest.raises(FrameError, match="damaged"):
        loaded(of, summed(whole), Keyring(OTHER))


def test_the_tenant_is_told_by_its_key() -> None:
    of = subject()
    ring = Keyring(OTHER, tenants={"acme": SECRET})
    assert ring.writing("acme").id == Key(SECRET).id
    assert ring.writing("umbrella").id == ring.writing().id == Key(OTHER).id
    for secret, tenant in ((SECRET, "acme"), (OTHER, "")):
        whole = memoryview(stored(of, content(of), Codec.NONE, secret))
        assert decode(whole, len(whole), of, ring) == tenant


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_encrypted_is_not_taken_where_all_must_be(codec: Codec) -> None:
    of = subject()
    payload = content(of)
    assert loaded(of, stored(of, payload, codec, None), RING) is Unreadable.NOT_ENCRYPTED
    whole = stored(of, payload, codec, SECRET)
    whole[11] = 0
    whole[128:176] = bytes(48)
    assert loaded(of, summed(whole), RING) is Unreadable.NOT_ENCRYPTED


def test_a_codec_that_is_not_installed_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(codec: Codec) -> None:
        raise ImportError("no module named zstandard")

    of = subject()
    whole = stored(of, content(of), Codec.ZSTD, None)
    monkeypatch.setattr(frames, "load_codec", lacking)
    assert loaded(of, whole, None) is Unreadable.UNKNOWN_CODEC


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_of_the_plaintext_is_in_an_encrypted_frame(codec: Codec) -> None:
    of = subject(4, 2, 4096)
    payload = content(of, kinds="noise" if codec is Codec.NONE else "mixed")
    whole = bytes(stored(of, payload, codec, SECRET))
    assert all(payload[at : at + 8] not in whole for at in range(0, len(payload) - 8))
    behind = 192 + 32 * 4 + 24 * 8
    assert SECRET not in whole
    assert whole[:40] + whole[56:144] == bytes(stored(of, payload, codec, SECRET))[:40] + whole[56:144]
    assert not any(whole[behind:4096])


# Fuzzed


@settings(max_examples=300, deadline=None)
@given(data=st.data(), codec=st.sampled_from(CODECS), secret=st.sampled_from([None, SECRET]))
def test_a_header_with_lying_sizes_is_refused_and_takes_no_memory(
    data: st.DataObject, codec: Codec, secret: bytes | None
) -> None:
    of = subject(2, 2, 500)
    payload = content(of)
    whole = stored(of, payload, codec, secret)
    table = 192 + 64
    for place, layout in data.draw(
        st.lists(
            st.sampled_from(
                [(8, "<H"), (10, "B"), (11, "B"), (12, "<I"), (16, "<Q"), (24, "<I"), (28, "<I"), (32, "<Q")]
                + [(table + 24 * number, "<Q") for number in range(4)]
            ),
            min_size=1,
        )
    ):
        size = struct.calcsize(layout) * 8
        struct.pack_into(layout, whole, place, data.draw(st.one_of(st.integers(0, 2**size - 1), st.integers(0, 9))))
    summed(whole)
    tracemalloc.start()
    try:
        never_wrong(of, whole, ring_of(secret), payload)
        with contextlib.suppress(FrameError):
            frame.read_header(bytes(whole))
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([Codec.LZ4, Codec.ZSTD]))
def test_any_packed_page_is_refused_or_of_its_size(packed: bytes, codec: Codec) -> None:
    try:
        page = load_codec(codec)().decompress(memoryview(packed), 1000)
    except ValueError:
        return
    assert len(page) == 1000


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_page_that_unpacks_to_more_is_refused_and_takes_no_memory(codec: Codec) -> None:
    packer = load_codec(codec)()
    for nbytes in (999, 1001, 64 << 20):
        packed = memoryview(packer.compress(memoryview(bytes(nbytes))))
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=r"."):
                packer.decompress(packed, 1000)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_table_of_blocks_is_refused_or_right(data: st.DataObject) -> None:
    """Who can write to a tier can make the checksums, too."""
    of = subject(1, 1, 950)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "BLOCK", 100)
        whole = stored(of, content(of), Codec.LZ4, None)
        (length,) = struct.unpack_from("<Q", whole, 192 + 32)
        place = data.draw(st.integers(0, length - 1))
        whole[4096 + place] = data.draw(st.integers(0, 255))
        struct.pack_into("<16s", whole, 192 + 32 + 8, xxhash.xxh3_128_digest(whole[4096 : 4096 + length]))
        with contextlib.suppress(FrameError):  # whatever is a page by then may come: nothing else may be raised
            loaded(of, summed(whole), None)


def test_a_frame_whose_page_unpacks_to_less_is_damaged() -> None:
    of = subject(1, 1, 1000)
    packed = load_codec(Codec.LZ4)().compress(memoryview(bytes(500)))
    into = memoryview(bytearray(of.form.nbytes))
    packed += struct.pack("<I", len(packed))
    into[4096 : 4096 + len(packed)] = packed
    table = [frame.Page(len(packed), xxhash.xxh3_128_digest(packed))]
    nbytes = frame.finish(into, *of, frame.Coding(Codec.LZ4), table)
    with pytest.raises(FrameError, match="page 0 of shard 0"):
        loaded(of, into[:nbytes], None)


# Keys


def test_keys_are_shown_by_their_ids_only() -> None:
    key = Key(SECRET)
    assert repr(key) == f"<Key {key.id.hex()}>"
    assert key.id not in SECRET
    assert Key(OTHER).id != key.id
    with pytest.raises(InvalidTag):
        AESGCM(SECRET).decrypt(bytes(12), bytes(32), b"")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 bytes"),
        ("c2hvcnQ=", "5 bytes"),
        (base64.b64encode(bytes(33)).decode(), "33 bytes"),
        ("no base64!", "is not base64"),
        (SECRET.hex(), "48 bytes"),
        ("ü" * 43, "is not base64"),
    ],
)
def test_what_is_no_key(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        key_of(text)


def test_a_key_may_end_with_a_line() -> None:
    assert key_of(base64.b64encode(SECRET).decode() + "\n") == SECRET


# Whether it pays


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    worth = Worth()
    for _ in range(TRIES):
        assert worth.tries(SPACE)
        worth.learn(SPACE, 0.05)
    for _ in range(3):
        assert [worth.tries(SPACE) for _ in range(AGAIN + 1)] == [False] * AGAIN + [True]
        worth.learn(SPACE, 0.09)
    assert worth.tries(b"another")
    for _ in range(AGAIN):
        worth.tries(SPACE)
    worth.tries(SPACE)
    worth.learn(SPACE, 0.5)
    assert all(worth.tries(SPACE) for _ in range(3))


def test_a_few_chunks_that_do_not_pay_decide_nothing() -> None:
    worth = Worth()
    for saving in [0.0] * (TRIES - 1) + [0.3] + [0.0] * (TRIES - 1) + [0.3]:
        assert worth.tries(SPACE)
        worth.learn(SPACE, saving)
    assert worth.tries(SPACE)


# Memory


async def test_staging_is_bounded_and_waited_for_in_order() -> None:
    staging = Staging(64 << 10)
    first = await staging.take([16 << 10, 16 << 10])
    assert staging.used == 32 << 10
    served: list[str] = []

    async def take(name: str, *sizes: int) -> list[Any]:
        stages = await staging.take(sizes)
        served.append(name)
        return list(stages)

    large = asyncio.create_task(take("large", 48 << 10))
    small = asyncio.create_task(take("small", 4 << 10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == []
    assert staging.waiting == 2
    staging.give_back(first)
    one, two = await asyncio.gather(large, small)
    assert served == ["large", "small"]
    assert staging.used == 52 << 10
    staging.give_back(one)
    staging.give_back(two)
    assert staging.used == 0


async def test_what_is_larger_than_all_gets_memory_when_nothing_is_in_use() -> None:
    staging = Staging(64 << 10)
    (small,) = await staging.take([4 << 10])
    huge = asyncio.create_task(staging.take([1 << 20]))
    await asyncio.sleep(0)
    assert not huge.done()
    staging.give_back([small])
    (stage,) = await huge
    assert (stage.memory.nbytes, stage.offset) == (1 << 20, -1)
    after = asyncio.create_task(staging.take([64 << 10]))
    await asyncio.sleep(0)
    staging.give_back([stage])
    assert (await after)[0].memory.nbytes == 64 << 10


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    staging = Staging(64 << 10)
    first = await staging.take([64 << 10])
    waiting = [asyncio.create_task(staging.take([64 << 10])) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    staging.give_back(first)
    waiting[1].cancel()  # it has been served just now
    (stage,) = await waiting[2]
    assert staging.used == stage.memory.nbytes
    for cancelled in waiting[:2]:
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_stages_do_not_overlap_and_are_aligned() -> None:
    staging = Staging(256 << 10)
    rng = random.Random(1)
    held: list[Any] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            staging.give_back([held.pop(rng.randrange(len(held)))])
        elif staging.used < 128 << 10:
            held += await staging.take([rng.randint(1, 8) * 4096])
        places = sorted((stage.offset, stage.offset + stage.memory.nbytes) for stage in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert all(start % 4096 == 0 for start, _ in places)


def test_encoded_says_nothing_is_to_be_stored_where_nothing_is_asked() -> None:
    of = subject()
    assert encode(plain(of, content(of)), memoryview(bytearray(of.form.nbytes)), of, Codec.NONE, None) == Encoded(0)
