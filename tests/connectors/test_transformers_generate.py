"""`CachedModel.generate` gives what the model gives, and computes only what the cache doesn't have."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lmcache_core.config import load_config
from lmcache_core.connectors.transformers import CachedModel, calls
from lmcache_core.connectors.transformers import model as model_module
from tests.connectors.tiny import (
    CONFIG,
    PAGE,
    VOCABULARY,
    cached,
    plain,
    prompt_of,
    random_prompt,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
)


def counts(model: CachedModel) -> tuple[int, int, int]:
    """Of the last call: tokens of the prompt, those from the cache, those new in the cache."""
    assert model.last_call is not None
    return model.last_call.prompt_tokens, model.last_call.cached_tokens, model.last_call.stored_tokens


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gpt2])
def test_a_prompt_is_computed_once(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    prompt = random_prompt(30)
    expected = plain(model, prompt, max_new_tokens=9)
    with cached(model) as made:
        assert torch.equal(made.generate(prompt, max_new_tokens=9), expected)
        # 30 + 9 tokens, the last of which was never run through the model: 38, of which 36 are whole pages.
        assert counts(made) == (30, 0, 36)
        assert torch.equal(made.generate(prompt, max_new_tokens=9), expected)
        assert counts(made) == (30, 28, 0)
        assert made.last_call is not None
        assert made.last_call.tiers == {"cpu": 28}
        assert made.last_call.computed_tokens == 2
        assert made.last_call.generated_tokens == 9
        assert made.failures == {}


@pytest.mark.parametrize(
    ("length", "from_cache"), [(1, 0), (PAGE, 0), (PAGE + 1, PAGE), (4 * PAGE, 3 * PAGE), (4 * PAGE + 1, 4 * PAGE)]
)
def test_at_least_one_token_is_computed(length: int, from_cache: int) -> None:
    model = tiny_llama()
    prompt = random_prompt(length)
    expected = plain(model, prompt, max_new_tokens=3)
    with cached(model) as made:
        made.generate(random_prompt(length), max_new_tokens=20)
        assert torch.equal(made.generate(prompt, max_new_tokens=3), expected)
        assert counts(made)[1] == from_cache


def test_the_next_turn_finds_what_the_last_one_generated() -> None:
    model = tiny_llama()
    with cached(model) as made:
        first = made.generate(random_prompt(18), max_new_tokens=11)
        turn = torch.cat([first, random_prompt(5, seed=1)], dim=1)
        assert torch.equal(made.generate(turn, max_new_tokens=7), plain(model, turn, max_new_tokens=7))
        assert counts(made) == (
            34,
            28,
            24,
        )  # 28 had KV, 12 of them in a chunk of 16 that is stored anew with the new ones
        longer = made.generate(turn, max_new_tokens=12)
        third = torch.cat([longer, random_prompt(3, seed=2)], dim=1)
        assert torch.equal(made.generate(third, max_new_tokens=4), plain(model, third, max_new_tokens=4))
        assert counts(made)[:2] == (49, 44)


def test_generated_tokens_can_be_left_out() -> None:
    with cached(tiny_llama(), save_decode=False) as made:
        made.generate(random_prompt(18), max_new_tokens=11)
        assert counts(made) == (18, 0, 16)


def test_prompts_that_fork_share_what_is_in_front() -> None:
    model = tiny_llama()
    trunk = random_prompt(22)
    with cached(model) as made:
        for seed in range(4):
            prompt = torch.cat([trunk, random_prompt(9, seed=10 + seed)], dim=1)
            assert torch.equal(made.generate(prompt, max_new_tokens=5), plain(model, prompt, max_new_tokens=5))
            assert counts(made)[:2] == (31, 20 if seed else 0)


def test_salted_calls_share_with_their_like_only() -> None:
    prompt = random_prompt(20)
    with cached(tiny_llama()) as made:
        hits = []
        for salt in [None, "a", b"a", "b", None]:
            made.generate(prompt, max_new_tokens=2, salt=salt)
            hits.append(counts(made)[1])
    assert hits == [0, 0, 16, 0, 16]


parts = st.lists(st.integers(2, VOCABULARY - 1), max_size=14)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    calls=st.lists(st.tuples(st.integers(0, 40), parts, st.integers(1, 9)), min_size=2, max_size=6),
    start=st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=30),
)
def test_any_history_of_prompts_changes_no_token(calls: list[tuple[int, list[int], int]], start: list[int]) -> None:
    """Each prompt takes up an earlier conversation at any place and goes on differently."""
    model = tiny_llama()
    said = start
    with cached(model) as made:
        for keep, more, new in calls:
            prompt = prompt_of(*(said[:keep] or start[:1]), *more)
            answer = made.generate(prompt, max_new_tokens=new)
            assert torch.equal(answer, plain(model, prompt, max_new_tokens=new))
            said = answer[0].tolist()
        assert made.failures == {}


def test_scores_of_the_first_new_token_are_those_of_a_cold_run() -> None:
    model = tiny_llama(dtype=torch.float32)
    prompt = random_prompt(103)
    ask: dict[str, Any] = {
        "max_new_tokens": 4,
        "output_logits": True,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    cold = plain(model, prompt, **ask)
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=1)
        warm = made.generate(prompt, **ask)
        assert counts(made)[1] == 100
    assert torch.equal(warm.sequences, cold.sequences)
    assert len(warm.logits) == len(warm.scores) == 4
    for mine, its in zip([*warm.logits, *warm.scores], [*cold.logits, *cold.scores], strict=True):
        assert (mine - its).abs().max() < 1e-4
    assert type(warm) is type(cold)
    assert set(warm) == set(cold)


@pytest.mark.parametrize("layout", ["native", "canonical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_bytes_are_the_stored_ones(layout: str, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    prompt = random_prompt(45)
    ask: dict[str, Any] = {"max_new_tokens": 2, "return_dict_in_generate": True}
    with cached(model, {"page_tokens": 4, "chunk_tokens": 12, "layout": layout, "cpu": {"capacity": "8MiB"}}) as made:
        cold = made.generate(prompt, **ask)
        warm = made.generate(prompt, **ask)
        assert counts(made)[1] == 44
    for mine, its in zip(kv_of(warm), kv_of(cold), strict=True):
        assert mine.shape == its.shape == (1, 2, 46, 8)
        assert bits(mine[:, :, :44]) == bits(its[:, :, :44])


def kv_of(output: object) -> list[torch.Tensor]:
    cache = getattr(output, "cache", None) or output.past_key_values  # type: ignore[attr-defined]
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def test_a_result_with_states_of_the_whole_prompt_is_computed_whole() -> None:
    model = tiny_llama()
    prompt = random_prompt(21)
    ask: dict[str, Any] = {"max_new_tokens": 3, "output_hidden_states": True, "return_dict_in_generate": True}
    cold = plain(model, prompt, **ask)
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=3)
        warm = made.generate(prompt, **ask)
        assert counts(made) == (21, 0, 0)
    assert warm.hidden_states[0][0].shape == cold.hidden_states[0][0].shape == (1, 21, 32)


def test_sampling_draws_the_same_tokens() -> None:
    model = tiny_llama()
    prompt = random_prompt(33)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 12}
    torch.manual_seed(5)
    expected = plain(model, prompt, **options)
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=1)
        torch.manual_seed(5)
        assert torch.equal(made.generate(prompt, **options), expected)
        assert counts(made)[1] == 32


class Forbid(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), float("-inf"))


class Words(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_processors_streamers_and_configs_do_what_they_do_without_cache() -> None:
    model = tiny_llama()
    prompt = random_prompt(26)
    favourite = int(plain(model, prompt, max_new_tokens=1)[0, -1])
    config = GenerationConfig(max_new_tokens=6, repetition_penalty=1.4)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "generation_config": config,
        "logits_processor": LogitsProcessorList([Forbid(favourite)]),
    }
    expected = plain(model, prompt, **options)
    assert favourite not in expected[0, 26:].tolist()
    streamer = Words()
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=1)
        assert torch.equal(made.generate(input_ids=prompt, streamer=streamer, **options), expected)
        assert counts(made)[1] == 24
    assert streamer.tokens == [*expected[0].tolist(), -1]


def test_generation_ends_where_it_would() -> None:
    model = tiny_llama()
    prompt = random_prompt(26)
    free = plain(model, prompt, max_new_tokens=12)[0].tolist()
    end = free[30]
    expected = plain(model, prompt, max_new_tokens=12, eos_token_id=end)
    assert expected.shape[1] == free.index(end, 26) + 1
    with cached(model) as made:
        for _ in range(2):
            assert torch.equal(made.generate(prompt, max_new_tokens=12, eos_token_id=end), expected)


def test_a_prompt_to_be_computed_in_parts_is_computed_whole() -> None:
    model = tiny_llama()
    prompt = random_prompt(47)
    expected = plain(model, prompt, max_new_tokens=5)
    with cached(model) as made:
        made.generate(prompt[:, :23], max_new_tokens=1)
        assert torch.equal(made.generate(prompt, max_new_tokens=5, prefill_chunk_size=6), expected)
        assert counts(made)[:2] == (47, 0)
        assert torch.equal(made.generate(prompt, max_new_tokens=5), expected)
        assert counts(made)[:2] == (47, 44)


def test_the_old_name_of_the_cache_argument_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "cache_argument", lambda function: "past_key_values")
    model = tiny_llama()
    prompt = random_prompt(22)
    expected = plain(model, prompt, max_new_tokens=5)
    with cached(model) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for _ in range(2):
            assert torch.equal(made.generate(prompt, max_new_tokens=5), expected)
        assert counts(made)[:2] == (22, 20)


def test_settings_may_be_loaded_before() -> None:
    loaded = load_config(CONFIG)
    with CachedModel.open(tiny_llama(), loaded) as one, CachedModel.open(tiny_llama(), loaded.config) as two:
        assert one.cache.page_tokens == two.cache.page_tokens == PAGE


def test_more_tokens_than_there_was_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ROOM", 8)
    model = tiny_llama()
    prompt = random_prompt(10)
    expected = plain(model, prompt, max_new_tokens=70)
    with cached(model) as made:
        assert torch.equal(made.generate(prompt, max_new_tokens=70), expected)
        assert counts(made) == (10, 0, 76)
        assert torch.equal(made.generate(expected, max_new_tokens=2)[:, :80], expected)
        assert counts(made)[1] == 76


def test_a_small_pool_keeps_what_it_can() -> None:
    """A pool with room for two of three prompts: what found none is computed again, and nothing is wrong."""
    model = tiny_llama()
    prompts = [random_prompt(900, seed=seed) for seed in range(3)]
    with cached(model, {"page_tokens": 4, "chunk_tokens": 16, "cpu": {"capacity": "1MiB"}}) as made:
        for prompt in prompts * 2:
            assert torch.equal(made.generate(prompt, max_new_tokens=3), plain(model, prompt, max_new_tokens=3))
        assert made.failures == {}


@pytest.mark.parametrize("left", [5, 3, 1, 0])
def test_what_was_evicted_is_computed_again_and_no_token_changes(left: int) -> None:
    """Chunks of 16 tokens; those behind the first `left` are gone."""
    model = tiny_llama()
    prompt = random_prompt(85)
    expected = plain(model, prompt, max_new_tokens=9)
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=1)
        assert made.cache.lookup(prompt[0].tolist()).tokens == 84
        guard = made.cache.client.node.guard  # type: ignore[attr-defined]
        keys = made.cache.prompt(prompt[0].tolist()).keys[4 * left :]
        with guard.turn, guard.mutex:
            index = guard.use()
            chunks = index.spaces[made.cache.namespace.space(0)].chunks
            index.evict([chunks[key] for key in keys if key in chunks], -1)
        assert torch.equal(made.generate(prompt, max_new_tokens=9), expected)
        assert counts(made)[:2] == (85, 16 * left)
        assert torch.equal(made.generate(prompt, max_new_tokens=9), expected)
        assert counts(made)[:2] == (85, 84)
        assert made.failures == {}


def test_time_to_the_first_token_is_a_part_of_the_call() -> None:
    with cached(tiny_llama()) as made:
        assert made.last_call is None
        made.generate(random_prompt(12), max_new_tokens=2)
        call = made.last_call
    assert call is not None
    assert 0 < call.retrieve_s < call.ttft_s
    assert call.store_s > 0
