"""Shapes of models: known figures of real ones, and each count against the real model's own weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import ConfigError
from lmcache_core.planning.forms import Layers
from lmcache_core.planning.shape import read_config, shape_of

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "vocab_size": 201088,
}


def test_llama_8b() -> None:
    shape = shape_of(LLAMA_8B)
    assert shape.layers == (Layers(32, 4096, 8192),)
    assert shape.kv_bytes_per_token == 131072
    # Of 8,030,261,248 weights the embedding and the head have 128256 x 4096 each, and 65 norms 4096.
    assert shape.parameters == 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096


def test_latent_attention_holds_one_vector_a_layer() -> None:
    shape = shape_of(DEEPSEEK_V3)
    assert shape.kv_bytes_per_token == 61 * (512 + 64) * 2 == 70272
    assert shape.layers[0].width == 128 * (128 + 64 + 128)
    # Said to have 37 billion active weights, with an embedding and a head of 0.93 each
    assert shape.parameters == pytest.approx(37.5e9 - 1.85e9, rel=0.02)


def test_windows_and_experts() -> None:
    shape = shape_of(GPT_OSS_120B)
    assert shape.layers == (Layers(18, 2048, 8192), Layers(18, 2048, 8192, window=128))
    assert shape.kv_bytes_per_token == 73728
    assert shape.kv_bytes(10_000) == 18 * 2048 * (10_000 + 128)
    # Said to have 5.1 billion active weights, with a head of 0.58
    assert shape.parameters == pytest.approx(5.13e9 - 0.58e9, rel=0.01)


def test_a_dtype_and_a_number_of_weights_that_are_given_count() -> None:
    assert shape_of(LLAMA_8B, dtype="fp8").kv_bytes_per_token == 65536
    assert shape_of({**LLAMA_8B, "torch_dtype": "float32"}).kv_bytes_per_token == 262144
    assert shape_of({**LLAMA_8B, "model_type": "unheard_of"}, parameters=5e9).parameters == 5e9


def test_a_model_that_sees_images_has_its_language_model_inside() -> None:
    inner = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}
    whole = {"model_type": "mllama", "torch_dtype": "bfloat16", "text_config": inner}
    assert shape_of(whole) == shape_of(LLAMA_8B)


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [(4, 4096)]),
        ({"model_type": "mistral", "sliding_window": None}, [(4, None)]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [(4, None)]),
        ({"model_type": "gemma2", "sliding_window": 4096}, [(2, None), (2, 4096)]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3}, [(1, None), (3, 512)]),
    ],
)
def test_which_layers_have_a_window(more: dict[str, Any], windows: list[tuple[int, int | None]]) -> None:
    shape = shape_of({**LLAMA_8B, "num_hidden_layers": 4, **more})
    assert [(each.count, each.window) for each in shape.layers] == windows


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_hidden_layers": None}, "settings lack num_hidden_layers; is it the config.json of a decoder"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of the model is '0'; it must be a number from 1 on"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers of the model is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers of the model is 'True'"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers of the model is"),
        ({"num_hidden_layers": 10**6}, "no model has"),
        ({"hidden_size": -4096}, "hidden_size of the model is '-4096'"),
        ({"torch_dtype": None}, "do not say the dtype"),
        ({"torch_dtype": "int4"}, "dtype 'int4' of KV is not known; there are float32"),
        ({"torch_dtype": ["x"]}, "of KV is not known"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"mamba_d_state": 16}, r"recurrent layers \(mamba_d_state\)"),
        ({"index_topk": 2048}, r"sparse attention \(index_topk\)"),
        ({"num_kv_shared_layers": 4}, "layers that share KV"),
        ({"layer_types": ["full_attention"]}, "a name for each of num_hidden_layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of the kind 'linear_attention', for which"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window does not say"),
        ({"sliding_window": 4096}, "no layer_types that say in which layers"),
        (
            {"model_type": "unheard_of"},
            r"kind 'unheard_of' is multiplied with is not known; say it, as in --parameters",
        ),
        ({"model_type": 7}, "kind '' is multiplied with is not known"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3, "num_experts": 8}, "mlp_only_layers of the model"),
        ({"model_type": "mixtral"}, "settings lack num_experts"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        shape_of({**LLAMA_8B, **more})


def test_a_config_is_found_in_its_folder_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert read_config(file) == read_config(tmp_path) == LLAMA_8B


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is no JSON: "), ("[1]", "is no JSON object"), ("[" * 100_000, "is no JSON: "), ("\x00", "is no JSON: ")],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_config(file)


def test_a_config_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not there; name a model's config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="nowhere is not there"):
        read_config(tmp_path / "nowhere")
    with (tmp_path / "config.json").open("wb") as opened:
        opened.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match=r"larger than a config\.json can be"):
        read_config(tmp_path)


# Against the models themselves, small ones

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
MIXTURE = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4}
DEEPSEEK = MIXTURE | LATENT | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": SMALL,
    "gemma2": SMALL,
    "gemma3_text": SMALL,
    "granite": SMALL,
    "llama": SMALL,
    "mistral": SMALL,
    "phi3": SMALL | {"head_dim": None},
    "qwen2": SMALL | {"head_dim": None},
    "qwen3": SMALL,
    "smollm3": SMALL,
    "mixtral": MIXTURE | {"num_local_experts": 8, "moe_intermediate_size": None},
    "qwen2_moe": MIXTURE | {"num_experts": 8, "shared_expert_intermediate_size": 40, "head_dim": None},
    "qwen3_moe": MIXTURE | {"num_experts": 8, "mlp_only_layers": [1]},
    "qwen3_moe, every third layer": MIXTURE | {"num_experts": 8, "decoder_sparse_step": 3},
    "gpt_oss": MIXTURE | {"num_local_experts": 8, "moe_intermediate_size": None},
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": 20, "first_k_dense_replace": 1},
    "deepseek_v2": DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_counted_as_the_model_has_them(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    given = {name: value for name, value in MODELS[kind].items() if value is not None}
    config = transformers.AutoConfig.for_model(kind.partition(",")[0], **given)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    total = 0.0
    for name, weight in model.named_parameters():
        if "embed" in name or "lm_head" in name or "norm" in name or "bias" in name or "sinks" in name:
            continue
        routed = ".experts." in name
        total += weight.numel() * (2 / 8 if routed else 1)
    assert shape_of(read_config(tmp_path)).parameters == total
