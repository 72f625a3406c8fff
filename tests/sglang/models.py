"""Small models with random weights that SGLang loads from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["make_model"]


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write a model. Returns the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=2048,
                initializer_range=0.2,
                bos_token_id=1,
                eos_token_id=2,
                dtype="float32",
            )
        )
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder
