"""Names of chunks and texts in paths: injective, bounded, and of few characters."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_core.errors import LayoutError
from lmcache_core.names import MAX_COMPONENT, object_name, parse_object_name, safe_component
from lmcache_core.protocols import ChunkKey

GOLDEN = json.loads((Path(__file__).parent / "golden" / "identity.json").read_text())

digests = st.binary(min_size=32, max_size=32)
keys = st.builds(ChunkKey, digests, digests)
# Characters that separate, escape or differ by case only, and lengths around the bound.
awkward = st.text("aA_-./%@h0\0 é\ud800", max_size=8) | st.text(max_size=300)
awkward |= st.builds(lambda text, times: text * times, st.text("aA_é", min_size=1, max_size=3), st.integers(1, 300))

CHUNK = ChunkKey(bytes(range(32)), bytes(range(128, 160)))


def test_names_are_the_committed_ones() -> None:
    assert object_name(CHUNK) == GOLDEN["object_name"]
    assert {text: safe_component(text) for text in GOLDEN["components"]} == GOLDEN["components"]


@given(keys)
def test_a_chunks_name_leads_back_to_it(key: ChunkKey) -> None:
    assert parse_object_name(object_name(key)) == key


@given(keys, keys)
def test_two_chunks_have_two_names(one: ChunkKey, two: ChunkKey) -> None:
    assert (object_name(one) == object_name(two)) == (one == two)


@given(keys)
def test_a_chunks_name_is_short_portable_and_lower_case(key: ChunkKey) -> None:
    name = object_name(key)
    assert re.fullmatch(r"[0-9a-f/]{133}", name)
    assert [len(part) for part in name.split("/")] == [64, 3, 64]


def test_chunks_of_a_space_spread_over_4096_directories() -> None:
    pages = [hashlib.sha256(str(number).encode()).digest() for number in range(40_960)]
    directories = [object_name(ChunkKey(bytes(32), page)).rsplit("/", 1)[0] for page in pages]
    assert 4000 < len(set(directories)) <= 4096
    assert max(Counter(directories).values()) < 40, "ten each on average"


@pytest.mark.parametrize(
    "name",
    [
        "",
        object_name(CHUNK).upper(),
        object_name(CHUNK) + "\n",
        object_name(CHUNK) + ".tmp",
        "/" + object_name(CHUNK),
        object_name(CHUNK).replace("/808/", "/809/"),
        object_name(CHUNK).replace("/808/", "/"),
        object_name(CHUNK)[:-1],
        "../" + object_name(CHUNK)[3:],
    ],
)
def test_other_names_are_no_chunks(name: str) -> None:
    with pytest.raises(LayoutError, match="not the name of a chunk"):
        parse_object_name(name)


@pytest.mark.parametrize("key", [ChunkKey(b"", bytes(32)), ChunkKey(bytes(32), bytes(31)), ChunkKey(bytes(33), b"")])
def test_keys_of_another_length_have_no_name(key: ChunkKey) -> None:
    with pytest.raises(LayoutError, match="32 bytes each"):
        object_name(key)


@given(awkward)
@example("")
@example(".")
@example("..")
@example("\0")
@example("meta/llama@v1")
def test_a_component_is_bounded_portable_and_no_special_directory(text: str) -> None:
    name = safe_component(text)
    assert re.fullmatch(r"[a-z0-9_-][a-z0-9._-]*", name)
    assert len(name) <= MAX_COMPONENT < 255


@given(awkward, awkward)
@example("", "_")
@example("A", "a")
@example("A", "_41")
@example("a/b", "a_2fb")
@example("a/b", "a-b")
@example("\ud83d\ude00", "\U0001f600")
def test_two_texts_have_two_components(one: str, two: str) -> None:
    assert (safe_component(one) == safe_component(two)) == (one == two)


@given(st.text("abc_A/", min_size=MAX_COMPONENT, max_size=MAX_COMPONENT + 40))
@example("a" * MAX_COMPONENT)
@example("a" * (MAX_COMPONENT + 1))
def test_no_text_is_named_like_the_cut_form_of_another(text: str) -> None:
    name = safe_component(text)
    assert safe_component(name) != name or name == text
    assert ("_h" in name) == (len(re.sub("[^abc]", "xxx", text)) > MAX_COMPONENT)


def test_a_component_can_be_read_where_it_is_plain() -> None:
    assert safe_component("tenant-7.prod") == "tenant-7.prod"
    assert safe_component("a" * MAX_COMPONENT) == "a" * MAX_COMPONENT
    assert safe_component("a" * 201) == "a" * 134 + "_h" + hashlib.sha256(b"a" * 201).hexdigest()
