"""Host pages in the layout that engines share, of every layout of a host pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_core.connectors.canonical import canonical_namespace
from lmcache_core.connectors.sglang.sharing import SharedPages, by_layer, check_settings, describe_shared, not_shared
from lmcache_core.errors import LayoutError

LAYERS, PAGES, TOKENS, HEADS, SIZE = 3, 5, 4, 2, 8
SHAPES = {
    "layer_first": (2, LAYERS, PAGES * TOKENS, HEADS, SIZE),
    "page_first": (2, PAGES * TOKENS, LAYERS, HEADS, SIZE),
    "page_first_direct": (2, PAGES, LAYERS, TOKENS, HEADS, SIZE),
    "page_head": (2, PAGES, HEADS, TOKENS, LAYERS, SIZE),
}


class MHATokenToKVPoolHost(SimpleNamespace):
    """As SGLang's is, as far as it is looked at."""


def pool(layout: str, **changes: Any) -> Any:
    made = MHATokenToKVPoolHost(
        layout=layout,
        layer_num=LAYERS,
        page_size=TOKENS,
        head_num=HEADS,
        head_dim=SIZE,
        v_head_dim=SIZE,
        dtype=torch.float32,
        start_layer=0,
    )
    made.kv_buffer = torch.zeros(SHAPES.get(layout, (1,)))
    made.__dict__.update(changes)
    return made


def number(plane: int, layer: int, page: int, token: int) -> float:
    """Another one for each vector; heads and elements are added by `filled`."""
    return float((((plane * LAYERS + layer) * PAGES + page) * TOKENS + token) * 100)


INSIDE = torch.arange(HEADS * SIZE, dtype=torch.float32).view(HEADS, SIZE)


def filled(layout: str) -> Any:
    """A pool whose every number says what it is of, written as SGLang itself lays pages out."""
    made = pool(layout)
    for plane in (0, 1):
        for layer in range(LAYERS):
            for page in range(PAGES):
                for token in range(TOKENS):
                    vector = INSIDE + number(plane, layer, page, token)
                    place = {
                        "layer_first": (plane, layer, page * TOKENS + token),
                        "page_first": (plane, page * TOKENS + token, layer),
                        "page_first_direct": (plane, page, layer, token),
                        "page_head": (plane, page, slice(None), token, layer),
                    }[layout]
                    made.kv_buffer[place] = vector
    return made


@pytest.mark.parametrize("layout", SHAPES)
def test_pages_are_the_same_whatever_the_pool(layout: str) -> None:
    """`[page][layer][K, V][token][head][dim]`."""
    pages = SharedPages(filled(layout))
    assert (pages.pages, pages.page_bytes) == (PAGES, LAYERS * 2 * TOKENS * HEADS * SIZE * 4)
    numbers = [3, 0, 4]
    taken = bytearray(len(numbers) * pages.page_bytes)
    pages.view(numbers).gather(0, 0, len(numbers), memoryview(taken))
    found = torch.frombuffer(taken, dtype=torch.float32).view(len(numbers), LAYERS, 2, TOKENS, HEADS, SIZE)
    for place, page in enumerate(numbers):
        for layer in range(LAYERS):
            for plane in (0, 1):
                for token in range(TOKENS):
                    assert torch.equal(found[place, layer, plane, token], INSIDE + number(plane, layer, page, token))


@pytest.mark.parametrize("source", SHAPES)
@pytest.mark.parametrize("target", SHAPES)
def test_what_one_pool_gives_another_one_takes(source: str, target: str) -> None:
    """Pages that are not asked for stay as they are."""
    whole, empty = filled(source), pool(target)
    one, other = SharedPages(whole), SharedPages(empty)
    moved = bytearray(2 * one.page_bytes)
    one.view([1, 4]).gather(0, 0, 2, memoryview(moved))
    other.view([2, 0]).scatter(0, 0, 2, memoryview(moved).toreadonly())
    for layer in range(LAYERS):
        for plane in (0, 1):
            here, there = by_layer(whole)[layer][plane], by_layer(empty)[layer][plane]
            assert torch.equal(there[2], here[1])
            assert torch.equal(there[0], here[4])
            assert not there[[1, 3, 4]].any()


def test_a_pool_of_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="a host pool of the layout page_unified"):
        by_layer(pool("page_unified"))


def test_it_is_described_as_every_engine_describes_it() -> None:
    described = describe_shared(pool("page_first"), weights="digest", model_name="here")
    assert described.space(0) == canonical_namespace(
        weights="digest", layers=range(3), kv_heads=2, head_size=8, dtype="float32", page_tokens=4
    ).space(0)


STORAGE = SimpleNamespace(tp_size=1)
ARGUMENTS = SimpleNamespace(
    dtype="auto", quantization=None, json_model_override_args="{}", enable_multimodal=None, speculative_algorithm=None
)


@pytest.fixture(autouse=True)
def model_path(tmp_path: Path) -> None:
    """A checkpoint's folder, as far as it is looked at."""
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    ARGUMENTS.model_path = str(tmp_path)


def test_what_is_plain_is_shared() -> None:
    assert list(not_shared(STORAGE, pool("page_first"), ARGUMENTS, sidecars=False)) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "bfloat16"}, "KV of type float32, of a model that computes in bfloat16"),
        ({"quantization": "fp8"}, "weights quantized by fp8"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, "overridden by the engine's arguments"),
        ({"enable_multimodal": True}, "more than text"),
        ({"lora_paths": ["a=/adapters/a"]}, "LoRA adapters"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"modelopt_quant": "fp8"}, "--modelopt-quant fp8, by which this engine computes something else"),
        ({"quantize_and_serve": True}, "--quantize-and-serve True"),
        ({"decrypted_config_file": "/c.json"}, "--decrypted-config-file /c.json"),
        ({"load_format": "bitsandbytes"}, "--load-format bitsandbytes, which may change weights; use one of auto, "),
    ],
)
def test_arguments_that_keep_it_apart(changed: dict[str, Any], why: str) -> None:
    arguments = SimpleNamespace(**vars(ARGUMENTS) | changed)
    (reason,) = not_shared(STORAGE, pool("page_first"), arguments, sidecars=False)
    assert why in reason


def test_a_checkpoint_that_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq", "bits": 4}}')
    (reason,) = not_shared(STORAGE, pool("page_first"), ARGUMENTS, sidecars=False)
    assert "weights quantized by awq" in reason


def test_a_model_that_is_not_here_is_needed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming its weights does not help, so nobody is told to."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = SimpleNamespace(**vars(ARGUMENTS) | {"model_path": str(tmp_path / "gone")})
    with pytest.raises(LayoutError, match=r"its config\.json is needed here, even where weights_id names the weights"):
        list(not_shared(STORAGE, pool("page_first"), arguments, sidecars=False))


def test_without_the_places_of_runs_it_is_refused() -> None:
    with pytest.raises(LayoutError, match='layout: canonical needs "interface_v1": 1 in the extra configuration'):
        check_settings({"layout": "canonical"}, 128, ['"interface_v1": 1'])
    check_settings({"layout": "canonical"}, 128, [])


def test_pages_of_another_size_are_refused_where_somebody_has_asked_for_them() -> None:
    shared = {"layout": "canonical"}
    with pytest.raises(LayoutError, match=r"page_tokens is 64, and SGLang has pages of 16 tokens.*--page-size 64"):
        check_settings(shared | {"page_tokens": 64}, 16, [])
    check_settings(shared | {"page_tokens": 64}, 64, [])
    check_settings(shared | {"page_tokens": 64, "connect": "auto"}, 16, [])  # the node's own are asked for later


def test_a_model_whose_positions_move(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_scaling": {"type": "dynamic"}}')
    (reason,) = not_shared(STORAGE, pool("page_first"), ARGUMENTS, sidecars=False)
    assert "each engine's own setting" in reason
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LayoutError, match="is no mapping"):
        list(not_shared(STORAGE, pool("page_first"), ARGUMENTS, sidecars=False))


def test_pools_that_keep_it_apart() -> None:
    (reason,) = not_shared(STORAGE, pool("page_first"), ARGUMENTS, sidecars=True)
    assert "only whole attention is shared" in reason
    (reason,) = not_shared(STORAGE, pool("page_first", v_head_dim=4), ARGUMENTS, sidecars=False)
    assert "only whole attention is shared" in reason
    (reason,) = not_shared(SimpleNamespace(tp_size=2), pool("page_first"), ARGUMENTS, sidecars=False)
    assert "2 ranks" in reason
