"""What KV a model's cache is of: the same for the same numbers, another for others, and refused where it can't be."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

from lmcache_core import Cache, GroupKind, LayoutError, UsageError
from lmcache_core.connectors.transformers import CachedModel, describe_model
from lmcache_core.connectors.transformers.identity import cache_argument, on_device, on_host, weights_digest
from tests.connectors.tiny import CONFIG, PAGE, SIZES, VOCABULARY, cached, random_prompt, ready, tiny_gpt2, tiny_llama


def test_a_namespace_says_what_the_model_makes() -> None:
    namespace = describe_model(tiny_llama(dtype=torch.bfloat16), page_tokens=64)
    (group,) = namespace.groups
    assert (group.kind, group.layers, group.kv_heads, group.head_size) == (GroupKind.FULL, (0, 1), 2, 8)
    assert group.dtype == "bfloat16"
    assert group.page_layer_bytes == 2 * 2 * 64 * 8 * 2
    assert namespace.encoding.strides == (64 * 8 * 2, 8 * 2, 2)
    assert describe_model(tiny_gpt2()).groups[0].kv_heads == 4


def test_the_same_checkpoint_is_the_same_anywhere(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    expected = describe_model(model)
    for name in ["here", "there"]:
        model.save_pretrained(tmp_path / name)
        for attention in ["eager", "sdpa"]:
            loaded = AutoModelForCausalLM.from_pretrained(
                tmp_path / name, dtype=torch.float32, attn_implementation=attention
            )
            assert describe_model(loaded).content == expected.content
            assert describe_model(loaded).encoding_digest == expected.encoding_digest
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        "from lmcache_core.connectors.transformers import describe_model\n"
        "print(describe_model(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)).content.hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "here")], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [expected.content.hex()]


def test_weights_have_a_digest_that_never_changes() -> None:
    model = tiny_llama(dtype=torch.float32)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.arange(weight.numel()).view(weight.shape) % 97 - number)
    assert weights_digest(model) == "82ac62d124c0318340cd363c10827bf44e8ae24777af39c48653bf8cb6ab3bd1"


def test_sums_are_the_same_on_any_device() -> None:
    torch.manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (64,)) * 2 + 1
    for count in [0, 1, 63, 64, 65, 1000]:
        runs = torch.split(torch.randint(-(2**63), 2**63 - 1, (count,)), 64)
        assert on_host(runs, factors).tolist() == on_device(runs, factors).tolist()


@pytest.mark.parametrize("place", [0, 7, 1000, 101 * 32 - 1])
def test_one_changed_weight_makes_another_checkpoint(place: int) -> None:
    model = tiny_llama()
    before = weights_digest(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.numel() > place:
                flat = weight.view(-1)
                kept = flat[place].clone()
                flat[place] = torch.nextafter(kept, torch.tensor(9.0, dtype=kept.dtype))
                assert weights_digest(model) != before
                flat[place] = kept
    assert weights_digest(model) == before


def test_swapped_layers_make_another_checkpoint() -> None:
    model = tiny_llama()
    before = weights_digest(model)
    layers: Any = model.get_submodule("model.layers")
    layers[0], layers[1] = layers[1], layers[0]
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "relu"},
        {"num_attention_heads": 8, "head_dim": 8},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_change_numbers_make_another_namespace(changes: dict[str, Any]) -> None:
    assert (
        describe_model(tiny_llama(**changes), weights="w").content != describe_model(tiny_llama(), weights="w").content
    )


def test_what_changes_no_number_makes_no_other_namespace() -> None:
    other = tiny_llama(use_cache=False, bos_token_id=3, _name_or_path="/home/somebody/model")
    assert describe_model(other).content == describe_model(tiny_llama()).content


def llama(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: tiny_llama(**changes)


def mistral() -> PreTrainedModel:
    return ready(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), torch.float32)


def gemma3() -> PreTrainedModel:
    return ready(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16)), torch.float32)


def mamba() -> PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return ready(MambaForCausalLM(MambaConfig(**sizes)), torch.float32)


def t5() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    return ready(T5ForConditionalGeneration(T5Config(**sizes)), torch.float32)


def phi3() -> PreTrainedModel:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    return ready(Phi3ForCausalLM(Phi3Config(**SIZES, rope_parameters=rope)), torch.float32)


def deepseek() -> PreTrainedModel:
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        q_lora_rank=8,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return ready(DeepseekV3ForCausalLM(config), torch.float32)


def bidirectional() -> PreTrainedModel:
    return ready(GemmaForCausalLM(GemmaConfig(**{**SIZES, "head_dim": 8, "is_causal": False})), torch.float32)


def with_adapter() -> PreTrainedModel:
    model = tiny_llama()
    model._hf_peft_config_loaded = True
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mistral, "DynamicSlidingWindowLayer"),
        (gemma3, "DynamicSlidingWindowLayer"),
        (mamba, "only full attention|not two tensors"),
        (t5, "encoder-decoder"),
        (phi3, "'longrope': KV of a prefix depends on the length"),
        (llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (deepseek, "not two tensors"),
        (bidirectional, "not causal"),
        (with_adapter, "merge"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_kinds_of_model_are_refused_by_name(make: Callable[[], PreTrainedModel], reason: str) -> None:
    model = make()
    with pytest.raises(LayoutError, match=f"{type(model).__name__} cannot be cached: .*{reason}"):
        describe_model(model)
    with pytest.raises(LayoutError, match=reason):
        CachedModel.open(model, CONFIG)


def test_weights_that_are_nowhere_are_refused() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(LayoutError, match="not in memory"):
        weights_digest(model)


def test_a_cache_of_another_model_is_refused() -> None:
    with Cache.open(CONFIG, describe_model(tiny_llama(seed=1), page_tokens=PAGE)) as cache:
        with pytest.raises(LayoutError, match="opened for another model"):
            CachedModel(tiny_llama(seed=2), cache)
        CachedModel(tiny_llama(seed=1), cache)
    with Cache.open(CONFIG, describe_model(tiny_llama(), page_tokens=PAGE, weights="mine")) as cache:
        with pytest.raises(LayoutError, match="opened for another model"):
            CachedModel(tiny_llama(), cache)
        CachedModel(tiny_llama(), cache, weights="mine")


def test_changed_weights_are_noticed() -> None:
    model = tiny_llama()
    with cached(model) as made:
        made.generate(random_prompt(9), max_new_tokens=2)
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.5)
        with pytest.raises(UsageError, match="make another CachedModel"):
            made.generate(random_prompt(9), max_new_tokens=2)
    with cached(model) as made:
        model._hf_peft_config_loaded = True
        with pytest.raises(UsageError, match="adapters"):
            made.generate(random_prompt(9), max_new_tokens=2)


def test_a_model_in_training_is_refused() -> None:
    model = tiny_llama()
    with cached(model) as made:
        model.train()
        with pytest.raises(UsageError, match=r"model\.eval\(\)"):
            made.generate(random_prompt(9), max_new_tokens=2)


def test_autocast_is_refused() -> None:
    with (
        cached(tiny_llama(dtype=torch.float32)) as made,
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UsageError, match="autocast"),
    ):
        made.generate(random_prompt(9), max_new_tokens=2)


def test_both_names_of_the_cache_argument_are_known() -> None:
    def new(input_ids: object, cache: object = None) -> None: ...
    def old(input_ids: object, past_key_values: object = None) -> None: ...

    assert (cache_argument(new), cache_argument(old)) == ("cache", "past_key_values")
