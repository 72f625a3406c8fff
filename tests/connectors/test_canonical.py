"""What engines of different kinds must agree on before they share KV."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core.connectors.canonical import canonical_namespace, canonical_refusals

FINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "quantization": None,
    "overridden": False,
    "ranks": 1,
    "attention": True,
    "multimodal": False,
    "drafts": False,
    "adapters": False,
    "model": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
}
SIZES: dict[str, Any] = {
    "weights": "digest",
    "layers": range(32),
    "kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
    "page_tokens": 64,
}


def test_what_is_plain_is_shared() -> None:
    assert list(canonical_refusals(**FINE)) == []
    for dtype in ("float16", "float32"):
        assert list(canonical_refusals(**FINE | {"dtype": dtype, "kv_dtype": dtype})) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kv_dtype": "float8_e4m3fn"}, "KV of type float8_e4m3fn, of a model that computes in bfloat16"),
        ({"kv_dtype": "float16"}, "KV of type float16, of a model that computes in bfloat16"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "must be one of float16, bfloat16, float32"),
        ({"quantization": "awq"}, "weights quantized by awq"),
        ({"overridden": True}, "write it into config.json"),
        ({"ranks": 2}, "2 ranks of tensor parallelism"),
        ({"attention": False}, "only whole attention is shared"),
        ({"multimodal": True}, "a model of more than text"),
        ({"model": {"rope_scaling": {"rope_type": "dynamic"}}}, "each engine's own setting"),
        ({"model": {"rope_parameters": {"type": "longrope"}}}, "each engine's own setting"),
        ({"adapters": True}, "LoRA adapters that the engine is started with"),
        ({"drafts": True}, "speculative decoding"),
    ],
)
def test_all_else_is_refused(changed: dict[str, Any], why: str) -> None:
    (reason,) = canonical_refusals(**FINE | changed)
    assert why in reason


def test_one_model_is_one_namespace_whatever_it_is_called() -> None:
    one = canonical_namespace(**SIZES, model_name="a")
    assert one.space(0) == canonical_namespace(**SIZES, model_name="b").space(0)
    assert one.groups[0].page_layer_bytes == 2 * 64 * 8 * 128 * 2
    assert one.encoding.layout == "canonical"


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "other"},
        {"layers": range(31)},
        {"kv_heads": 4},
        {"head_size": 64},
        {"dtype": "float16"},
        {"page_tokens": 128},
    ],
)
def test_what_differs_is_another(changed: dict[str, Any]) -> None:
    assert canonical_namespace(**SIZES).space(0) != canonical_namespace(**SIZES | changed).space(0)
