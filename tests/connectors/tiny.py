"""Small random models that answer at once, and caches that fail on demand."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lmcache_core import Cache
from lmcache_core.connectors.transformers import CachedModel, describe_model

VOCABULARY = 101
PAGE = 4
CONFIG: Mapping[str, Any] = {"page_tokens": PAGE, "chunk_tokens": 4 * PAGE, "cpu": {"capacity": "64MiB"}}

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def ready(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    made: Any = model
    moved: PreTrainedModel = made.eval().to(dtype)
    return moved


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """In float64 by default: there the order of additions never decides between two tokens."""
    torch.manual_seed(seed)
    return ready(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})), dtype)


def tiny_qwen3(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return ready(Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 8})), torch.float64)


def tiny_gpt2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=1024,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=1,
    )
    return ready(GPT2LMHeadModel(config), torch.float64)


def prompt_of(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def random_prompt(length: int, seed: int = 0) -> torch.Tensor:
    made = torch.randint(2, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return made


def plain(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    """What the model's own `generate` gives."""
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@contextmanager
def cached(model: PreTrainedModel, config: Mapping[str, Any] = CONFIG, **options: Any) -> Iterator[CachedModel]:
    with CachedModel.open(model, config, **options) as made:
        yield made


class FailingCache(Cache):
    """A cache whose verbs raise what `failing` says, at the start or, `retrieve`, after it has written to the view."""

    failing: Mapping[str, Exception]

    def __enter__(self) -> "FailingCache":
        return self

    def prompt(self, *args: Any, **options: Any) -> Any:
        self.fail("prompt")
        return super().prompt(*args, **options)

    def retrieve(self, *args: Any, **options: Any) -> Any:
        self.fail("retrieve")
        found = super().retrieve(*args, **options)
        self.fail("retrieve late")
        return found

    def store(self, *args: Any, **options: Any) -> Any:
        self.fail("store")
        return super().store(*args, **options)

    def fail(self, verb: str) -> None:
        if verb in self.failing:
            raise self.failing[verb]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FailingCache":
        made = cls.open(CONFIG, describe_model(model, page_tokens=PAGE))
        assert isinstance(made, cls)
        made.failing = {}
        return made
