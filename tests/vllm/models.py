"""Small models with random weights that vLLM loads from a folder, one of each kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

__all__ = ["BLOCK", "KINDS", "VOCABULARY", "WINDOW", "make_model"]

VOCABULARY = 1024
WINDOW = 512
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.05,
    "dtype": "float32",
}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    )


def _gemma() -> PreTrainedModel:
    """Every other layer looks back over a window only."""
    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def _deepseek() -> PreTrainedModel:
    """Its cache keeps a latent vector a token in place of K and V. Without experts."""
    config = DeepseekV2Config(
        **SIZES,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    return DeepseekV2ForCausalLM(config)


KINDS: Mapping[str, Callable[[], PreTrainedModel]] = {"llama": _llama, "gemma": _gemma, "deepseek": _deepseek}

BLOCK: Mapping[str, int] = {"llama": 128, "gemma": 128, "deepseek": 16}
"""Tokens of a block of the engine, which nobody has set."""


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a model, and a tokenizer by which token 7 is the word `w7`. Returns the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        KINDS[kind]().save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    return folder
