"""Arguments with which KV can't be cached are refused by name, before anything is computed."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from lmcache_core import LayoutError, UsageError
from tests.connectors.tiny import cached, plain, prompt_of, random_prompt, tiny_llama


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"token_healing": True}, "token_healing=True"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),  # type: ignore[no-untyped-call]
        ({"assistant_model": object()}, r"assistant_model=\.\.\."),
        ({"custom_generate": "somebody/something"}, r"custom_generate=\.\.\."),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, r"inputs_embeds=\.\.\."),
        ({"position_ids": torch.zeros(1, 12)}, r"position_ids=\.\.\."),
        ({"cache": DynamicCache()}, r"generate\(cache=\.\.\.\)"),
        ({"past_key_values": DynamicCache()}, r"past_key_values=\.\.\."),
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 9])}, "padded"),
        ({"attention_mask": torch.ones(1, 20)}, "padded"),
        ({"pad_token_id": 5}, "padded"),
        ({"input_ids": random_prompt(3)}, "not both"),
    ],
)
def test_arguments_are_refused_by_name(options: dict[str, Any], reason: str) -> None:
    prompt = prompt_of(5, *range(20, 31))
    with cached(tiny_llama()) as made:
        with pytest.raises(LayoutError, match=reason):
            made.generate(prompt, **{"max_new_tokens": 2, **options})
        assert made.last_call is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokns": 5}, r"^unknown option: generate\(max_new_tokns=\.\.\.\); did you mean max_new_tokens\?$"),
        ({"temprature": 0.5}, "did you mean temperature"),
        ({"stoping_criteria": []}, "did you mean stopping_criteria"),
        ({"xyzzy": 1}, r"^unknown option: generate\(xyzzy=\.\.\.\)$"),
    ],
)
def test_misspelt_options_are_called_unknown(options: dict[str, Any], said: str) -> None:
    with cached(tiny_llama()) as made:
        with pytest.raises(UsageError, match=said):
            made.generate(random_prompt(12), **options)
        assert made.last_call is None


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.ones(2, 5, dtype=torch.long), r"one prompt .* not \(2, 5\): call generate once for each row"),
        (torch.ones(1, 0, dtype=torch.long), "at least one token"),
        (torch.ones(5, dtype=torch.long), r"\[1, tokens\], not \(5,\)"),
        (torch.ones(1, 5), "token ids"),
        ([[1, 2]], "not list"),
        (None, "not NoneType"),
    ],
)
def test_prompts_are_refused(inputs: Any, reason: str) -> None:
    with cached(tiny_llama()) as made, pytest.raises(LayoutError, match=reason):
        made.generate(inputs, max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.ones(1, 12, dtype=torch.long)},
        {"num_beams": 1, "num_return_sequences": 1, "use_cache": True},
        {"pad_token_id": 5, "eos_token_id": 5},
        {"pad_token_id": 5, "eos_token_id": [5, 99]},
        {"pad_token_id": 5, "attention_mask": torch.ones(1, 12, dtype=torch.long)},
        {"assistant_model": None, "past_key_values": None},
    ],
)
def test_plain_values_of_the_same_arguments_are_taken(options: dict[str, Any]) -> None:
    model = tiny_llama()
    prompt = prompt_of(5, *range(20, 31))
    named = {name: value for name, value in options.items() if name not in ("attention_mask", "past_key_values")}
    expected = plain(model, prompt, max_new_tokens=4, **named)
    with cached(model) as made:
        for _ in range(2):
            assert torch.equal(made.generate(prompt, max_new_tokens=4, **options), expected)
        assert made.last_call is not None
        assert made.last_call.cached_tokens == 8
