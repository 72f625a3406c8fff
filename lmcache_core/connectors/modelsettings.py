"""Which settings of a model change the numbers of its KV, for the connectors of all engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["NOT_NUMBERS", "settings_that_count"]

NOT_NUMBERS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Settings that change no number of the KV, or say what the weights' digest and the group's dtype say."""


def settings_that_count(settings: Mapping[str, Any]) -> str:
    """Those of a model's settings that are not known to change nothing, as text that is the same for the same ones. How
    attention is computed isn't one."""
    kept = {name: value for name, value in settings.items() if name not in NOT_NUMBERS and not name.startswith("_")}
    return json.dumps(kept, sort_keys=True, default=str)
