"""Namespaces: what makes KV another KV, what doesn't, and what can't be described."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import LayoutError
from lmcache_core.namespace import (
    Encoding,
    Group,
    GroupKind,
    Namespace,
    chunk_tokens_for,
    new_epoch,
    page_tokens_for,
)

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "identity.json").read_text())["namespace"]

FULL: dict[str, Any] = {
    "kind": GroupKind.FULL,
    "layers": (0, 2),
    "page_layer_bytes": 4096,
    "dtype": "bfloat16",
    "kv_heads": 2,
    "head_size": 8,
    "name": "full",
}
WINDOW: dict[str, Any] = {**FULL, "kind": GroupKind.WINDOW, "layers": (1, 3), "window_tokens": 512, "name": "window"}
STATE: dict[str, Any] = {**FULL, "kind": GroupKind.STATE, "layers": (4,), "kv_heads": 0, "head_size": 0, "planes": 1}
NATIVE: dict[str, Any] = {
    "layout": "native",
    "engine": "vllm",
    "backend": "FLASH_ATTN",
    "block_tokens": 16,
    "strides": (512, 32, 16),
}
SPACE: dict[str, Any] = {
    "weights": "a1" * 32,
    "groups": (Group(**FULL), Group(**WINDOW)),
    "page_tokens": 64,
    "encoding": Encoding(**NATIVE),
    "shards": 2,
    "heads": (0, 4),
    "config": "rope-1e6",
    "model_name": "Qwen/Qwen3",
}


def namespace(**changes: Any) -> Namespace:
    return Namespace(**{**SPACE, **changes})


def with_group(**changes: Any) -> Namespace:
    return namespace(groups=(Group(**{**FULL, **changes}), Group(**WINDOW)))


def with_encoding(**changes: Any) -> Namespace:
    return namespace(encoding=Encoding(**{**NATIVE, **changes}))


def naive(value: Any) -> bytes:
    """The encoding of identities, written down a second time."""
    match value:
        case None:
            return b"n" + bytes(8)
        case str():
            return b"s" + struct.pack("<Q", len(value.encode())) + value.encode()
        case bytes():
            return b"b" + struct.pack("<Q", len(value)) + value
        case int():
            return b"i" + struct.pack("<Q", len(str(value))) + str(value).encode()
        case _:
            body = b"".join(naive(item) for item in value)
            return b"t" + struct.pack("<Q", len(body)) + body


def naive_digest(domain: str, **fields: Any) -> bytes:
    flat: list[Any] = [domain]
    for name in sorted(fields):
        flat += [name, fields[name]]
    message = naive(tuple(flat)) + b"\0"
    return hashlib.sha256(message if len(message) % 2 else message + b"\0").digest()


def naive_spaces() -> dict[str, Any]:
    """Digests of `namespace()`, from its values."""
    geometry: dict[str, Any] = {"page_layer_bytes": 4096, "dtype": "bfloat16", "kv_heads": 2, "head_size": 8}
    full = naive_digest("lmcache-core group 1", kind="full", layers=(0, 2), planes=2, window_tokens=None, **geometry)
    window = naive_digest("lmcache-core group 1", kind="window", layers=(1, 3), planes=2, window_tokens=512, **geometry)
    content = naive_digest(
        "lmcache-core content 1",
        weights="a1" * 32,
        groups=tuple(sorted([full, window])),
        page_tokens=64,
        shards=2,
        heads=(0, 4),
        config="rope-1e6",
        weights_epoch=0,
    )
    encoding = naive_digest(
        "lmcache-core encoding 1",
        layout="native",
        version=1,
        engine="vllm",
        backend="FLASH_ATTN",
        block_tokens=16,
        strides=(512, 32, 16),
        isa="",
    )
    spaces = [
        naive_digest("lmcache-core space 1", content=content, encoding=encoding, group=group).hex()
        for group in (full, window)
    ]
    return {"content": content.hex(), "encoding": encoding.hex(), "spaces": spaces}


def test_digests_are_the_committed_ones() -> None:
    ours = namespace()
    assert naive_spaces() == GOLDEN
    assert ours.content.hex() == GOLDEN["content"]
    assert ours.encoding_digest.hex() == GOLDEN["encoding"]
    assert [ours.space(0).hex(), ours.space(1).hex()] == GOLDEN["spaces"]


def test_digests_depend_on_nothing_of_the_process() -> None:
    script = (
        "import sys; from lmcache_core.namespace import Namespace\n"
        "print(Namespace.from_manifest(sys.stdin.buffer.read()).space(1).hex())"
    )
    for hash_seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        run = [sys.executable, "-c", script]
        out = subprocess.run(run, env=env, input=namespace().manifest(), capture_output=True, check=True).stdout
        assert out.decode().strip() == GOLDEN["spaces"][1]


CONTENT = {
    "weights": namespace(weights="b2" * 32),
    "pages of another size": namespace(page_tokens=32),
    "shards": namespace(shards=1),
    "heads": namespace(heads=(4, 8)),
    "all heads": namespace(heads=None),
    "config": namespace(config="rope-5e5"),
    "weights updated in place": namespace(weights_epoch=7),
    "a group less": namespace(groups=(Group(**FULL),)),
    "a group more": namespace(groups=(Group(**FULL), Group(**WINDOW), Group(**STATE))),
    "fp8": with_group(dtype="float8_e4m3fn"),
    "another fp8": with_group(dtype="float8_e5m2"),
    "uint8": with_group(dtype="uint8"),
    "layers": with_group(layers=(0, 4)),
    "order of layers": with_group(layers=(2, 0)),
    "bytes of a page": with_group(page_layer_bytes=8192),
    "kv heads": with_group(kv_heads=1),
    "head size": with_group(head_size=4),
    "planes": with_group(planes=1),
    "kind": with_group(kind=GroupKind.STATE),
    "window": with_group(kind=GroupKind.WINDOW, window_tokens=512),
    "window of another size": with_group(kind=GroupKind.WINDOW, window_tokens=1024),
}
ENCODING = {
    "engine": with_encoding(engine="sglang"),
    "attention backend": with_encoding(backend="FLASHINFER"),
    "block": with_encoding(block_tokens=32),
    "strides": with_encoding(strides=(512, 16, 32)),
    "signs of strides": with_encoding(strides=(512, 32, -16)),
    "instruction set": with_encoding(isa="avx512"),
    "version": with_encoding(version=2),
    "canonical": namespace(encoding=Encoding(layout="canonical")),
    "canonical of another version": namespace(encoding=Encoding(layout="canonical", version=2)),
}


@pytest.mark.parametrize("what", CONTENT)
def test_what_changes_the_meaning_of_kv_shares_no_space(what: str) -> None:
    assert CONTENT[what].content != namespace().content
    assert CONTENT[what].encoding_digest == namespace().encoding_digest


@pytest.mark.parametrize("what", ENCODING)
def test_what_changes_how_bytes_lie_shares_no_space_but_its_meaning(what: str) -> None:
    assert ENCODING[what].encoding_digest != namespace().encoding_digest
    assert ENCODING[what].content == namespace().content


def test_all_these_have_spaces_of_their_own() -> None:
    several = [namespace(), *CONTENT.values(), *ENCODING.values()]
    spaces = [one.space(index) for one in several for index in range(len(one.groups))]
    assert len(set(spaces)) == len(spaces)
    assert {len(space) for space in spaces} == {32}


def test_names_of_model_and_groups_are_not_part_of_the_identity() -> None:
    other = namespace(model_name="/models/qwen", groups=(Group(**{**FULL, "name": "0"}), Group(**WINDOW)))
    assert (other.content, other.space(0), other.space(1)) == (
        namespace().content,
        namespace().space(0),
        namespace().space(1),
    )


def test_a_groups_number_is_not_part_of_the_identity() -> None:
    swapped = namespace(groups=(Group(**WINDOW), Group(**FULL)))
    assert [swapped.space(0), swapped.space(1)] == [namespace().space(1), namespace().space(0)]


def test_an_identity_has_these_fields_and_none_that_changes_between_two_starts() -> None:
    """No number of blocks, no pointer, no offset. Who adds a field makes all KV stored so far unreachable."""
    kv = {"kind", "layers", "page_layer_bytes", "dtype", "kv_heads", "head_size", "planes", "window_tokens", "name"}
    whole = {"weights", "groups", "page_tokens", "encoding", "shards", "heads", "config", "weights_epoch", "model_name"}
    assert set(Group.__struct_fields__) == kv
    assert set(Namespace.__struct_fields__) == whole
    lie = {"layout", "version", "engine", "backend", "block_tokens", "strides", "isa"}
    assert set(Encoding.__struct_fields__) == lie


def test_a_group_that_does_not_exist_has_no_space() -> None:
    for index in (-1, 2):
        with pytest.raises(LayoutError, match="groups 0 to 1"):
            namespace().space(index)


def test_a_page_holds_all_layers_of_its_group() -> None:
    assert Group(**FULL).page_bytes == 8192
    assert Group(**STATE).page_bytes == 4096


def test_an_epoch_keeps_stores_on_this_host_and_shares_no_space() -> None:
    start = namespace()
    later = start.with_epoch(new_epoch())
    assert not start.local_only
    assert later.local_only
    assert later.space(0) != start.space(0)
    assert later.with_epoch(0) == start
    assert later.with_epoch(0).space(0) == start.space(0)


def test_epochs_are_random_and_never_zero() -> None:
    epochs = [new_epoch() for _ in range(1000)]
    assert len(set(epochs)) == 1000
    assert 0 < min(epochs) < max(epochs) < 2**63
    assert max(epochs) > 2**60


@pytest.mark.parametrize("one", [namespace(), *CONTENT.values(), *ENCODING.values()])
def test_a_manifest_leads_back_to_its_namespace(one: Namespace) -> None:
    back = Namespace.from_manifest(one.manifest())
    assert back == one
    assert (back.content, back.encoding_digest, back.space(0)) == (one.content, one.encoding_digest, one.space(0))


def test_a_manifest_is_json_that_people_can_read() -> None:
    read = json.loads(namespace().manifest())
    assert b"\n  " in namespace().manifest()
    assert read["content"] == GOLDEN["content"]
    assert read["spaces"] == GOLDEN["spaces"]
    assert read["namespace"]["model_name"] == "Qwen/Qwen3"
    assert read["namespace"]["groups"][1]["kind"] == "window"


def edited(path: list[Any], value: Any) -> bytes:
    read = json.loads(namespace().manifest())
    place = read
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(read).encode()


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"", "not a manifest"),
        (b"[]", "not a manifest"),
        (b"\xff", "not a manifest"),
        (b"[" * 100_000, "not a manifest"),
        (b" " * (1 << 20) + b"{}", "at most"),
        (namespace().manifest()[:-2], "not a manifest"),
        (edited(["format"], "lmcache-core namespace 2"), "not a manifest"),
        (edited(["namespace", "page_tokens"], 0), "page_tokens must be an int of at least 1"),
        (edited(["namespace", "page_tokens"], True), "not a manifest"),
        (edited(["namespace", "blocks"], 1000), "unknown field `blocks`"),
        (edited(["namespace", "groups", 0, "dtype"], "float16"), "digests of this manifest"),
        (edited(["spaces"], []), "digests of this manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(manifest: bytes, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Namespace.from_manifest(manifest)


@given(st.binary(max_size=64))
def test_random_bytes_are_no_manifest(manifest: bytes) -> None:
    with pytest.raises(LayoutError):
        Namespace.from_manifest(manifest)


@pytest.mark.parametrize(
    ("base", "kind", "changes", "message"),
    [
        (Group, FULL, {"kind": "full"}, "kind must be a GroupKind"),
        (Group, FULL, {"layers": ()}, "one or more different indices"),
        (Group, FULL, {"layers": (1, 1)}, "one or more different indices"),
        (Group, FULL, {"layers": (-1,)}, "one or more different indices"),
        (Group, FULL, {"layers": [0]}, "one or more different indices"),
        (Group, FULL, {"page_layer_bytes": 0}, "page_layer_bytes must be an int of at least 1"),
        (Group, FULL, {"page_layer_bytes": 64.0}, "page_layer_bytes must be an int"),
        (Group, FULL, {"kv_heads": 0}, "kv_heads must be an int of at least 1"),
        (Group, FULL, {"head_size": True}, "head_size must be an int of at least 1"),
        (Group, FULL, {"planes": 0}, "planes must be an int of at least 1"),
        (Group, FULL, {"planes": 3}, r"planes must be 1 \(a latent, a state\) or 2"),
        (Group, STATE, {"planes": 3}, "planes must be 1"),
        (Group, FULL, {"dtype": ""}, "dtype must be UTF-8 text"),
        (Group, FULL, {"name": "\ud800"}, "name must be UTF-8 text"),
        (Group, FULL, {"window_tokens": 512}, "a full group has no window_tokens"),
        (Group, WINDOW, {"window_tokens": None}, "window_tokens must be an int of at least 1"),
        (Group, WINDOW, {"window_tokens": 0}, "window_tokens must be an int of at least 1"),
        (Group, STATE, {"kv_heads": -1}, "kv_heads must be an int of at least 0"),
        (Encoding, NATIVE, {"layout": "other"}, "layout must be native or canonical"),
        (Encoding, NATIVE, {"layout": "canonical"}, "no traits of an engine"),
        (Encoding, NATIVE, {"engine": ""}, "engine must be UTF-8 text"),
        (Encoding, NATIVE, {"block_tokens": 0}, "block_tokens must be an int of at least 1"),
        (Encoding, NATIVE, {"strides": [1]}, "strides must be a tuple of ints"),
        (Encoding, NATIVE, {"strides": ()}, r"use registered\.encoding\(engine\), or give them"),
        (Encoding, NATIVE, {"version": 0}, "version must be an int of at least 1"),
        (Namespace, SPACE, {"weights": ""}, "weights must be UTF-8 text"),
        (Namespace, SPACE, {"weights": bytes(32)}, r"go in as \.hex\(\)"),
        (Namespace, SPACE, {"groups": ()}, "one or more groups"),
        (Namespace, SPACE, {"groups": [Group(**FULL)]}, "one or more groups"),
        (Namespace, SPACE, {"groups": (Group(**FULL), Group(**{**FULL, "name": "b"}))}, "would share their chunks"),
        (Namespace, SPACE, {"page_tokens": 0}, "page_tokens must be an int of at least 1"),
        (Namespace, SPACE, {"page_tokens": 24}, "page_tokens 24 is no multiple of a block, 16"),
        (Namespace, SPACE, {"shards": 0}, "shards must be an int of at least 1"),
        (Namespace, SPACE, {"heads": (2, 2)}, "one past the last"),
        (Namespace, SPACE, {"heads": (0, 1, 2)}, "one past the last"),
        (Namespace, SPACE, {"weights_epoch": -1}, "weights_epoch must be an int of at least 0"),
        (Namespace, SPACE, {"weights_epoch": 2**63}, r"below 2\*\*63"),
    ],
)
def test_what_can_not_be_is_refused(base: type[Any], kind: dict[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        base(**{**kind, **changes})


CANONICAL = Encoding(layout="canonical")


@pytest.mark.parametrize(
    ("changes", "native", "canonical"),
    [
        ({}, True, True),
        ({"page_layer_bytes": 4095}, False, False),
        ({"page_layer_bytes": 4097}, True, False),
        ({"dtype": "float32"}, False, False),
        ({"dtype": "uint8"}, True, False),
        ({"dtype": "float8_e5m2", "head_size": 16}, True, True),
        ({"planes": 1, "head_size": 16}, True, True),
        ({"dtype": "mxfp4", "head_size": 1000}, True, True),  # of unknown size
        ({"kind": GroupKind.STATE, "head_size": 1000}, True, True),
        ({"kind": GroupKind.WINDOW, "window_tokens": 64, "kv_heads": 3}, False, False),
    ],
)
def test_a_page_holds_the_numbers_that_its_group_says(changes: dict[str, Any], native: bool, canonical: bool) -> None:
    groups = (Group(**{**FULL, **changes}),)
    for encoding, fits in ((Encoding(**NATIVE), native), (CANONICAL, canonical)):
        if fits:
            assert namespace(groups=groups, encoding=encoding).groups == groups
        else:
            with pytest.raises(LayoutError, match=r"page_layer_bytes 409\d of layers \(0, 2\): .* are \d+ bytes"):
                namespace(groups=groups, encoding=encoding)


def test_namespaces_do_not_change() -> None:
    with pytest.raises(AttributeError):
        cast(Any, namespace()).page_tokens = 32
    assert hash(namespace()) == hash(namespace())
    assert msgspec.structs.asdict(namespace())["page_tokens"] == 64


@pytest.mark.parametrize(
    ("blocks", "wanted", "page"),
    [([16], 64, 64), ([128], 64, 128), ([48], 64, 96), ([16, 24], 64, 96), ([784], 64, 784), ([], 64, 64), ([1], 1, 1)],
)
def test_a_page_is_the_least_multiple_of_all_blocks_that_is_long_enough(
    blocks: list[int], wanted: int, page: int
) -> None:
    assert page_tokens_for(blocks, wanted) == page


@pytest.mark.parametrize(("page", "wanted", "chunk"), [(64, 256, 256), (96, 256, 288), (784, 256, 784), (1, 7, 7)])
def test_a_chunk_is_the_least_multiple_of_pages_that_is_long_enough(page: int, wanted: int, chunk: int) -> None:
    assert chunk_tokens_for(page, wanted) == chunk


def test_sizes_default_to_64_and_256_tokens_and_below_one_are_refused() -> None:
    assert (page_tokens_for([16]), chunk_tokens_for(64)) == (64, 256)
    for blocks, wanted in (([0], 64), ([16], 0)):
        with pytest.raises(LayoutError, match="1 token or more"):
            page_tokens_for(blocks, wanted)
    for page, wanted in ((0, 256), (64, 0)):
        with pytest.raises(LayoutError, match="1 token or more"):
            chunk_tokens_for(page, wanted)
