"""No failure of the cache reaches the caller or changes a token."""

import logging
from typing import Any

import pytest
import torch

from lmcache_core import BackendError, ClosedError, LayoutError, UsageError
from lmcache_core.connectors.transformers import CachedModel, describe_model
from tests.connectors.tiny import CONFIG, FailingCache, cached, plain, random_prompt, tiny_llama

ERRORS = [BackendError("the medium is gone"), ClosedError("closed"), LayoutError("odd"), OSError(5, "I/O error")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("verb", "counted"),
    [("prompt", "retrieve"), ("retrieve", "retrieve"), ("retrieve late", "retrieve"), ("store", "store")],
)
def test_a_failing_verb_is_a_miss(verb: str, counted: str, error: Exception) -> None:
    model = tiny_llama()
    prompt = random_prompt(30)
    expected = plain(model, prompt, max_new_tokens=6)
    with FailingCache.of(model) as cache:
        made = CachedModel(model, cache)
        made.generate(prompt[:, :20], max_new_tokens=1)
        cache.failing = {verb: error}
        for _ in range(3):
            assert torch.equal(made.generate(prompt, max_new_tokens=6), expected)
        assert made.failures == {counted: 3}
        assert made.last_call is not None
        assert made.last_call.cached_tokens == (20 if verb == "store" else 0)
        cache.failing = {}
        for _ in range(2):
            assert torch.equal(made.generate(prompt, max_new_tokens=6), expected)
        assert made.last_call.cached_tokens == 28
        assert made.failures == {counted: 3}


def test_failures_of_a_kind_are_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with FailingCache.of(model) as cache, caplog.at_level(logging.WARNING):
        made = CachedModel(model, cache, log_interval=3600)
        cache.failing = {"retrieve": BackendError("gone"), "store": OSError(28, "No space left on device")}
        for _ in range(3):
            made.generate(random_prompt(9), max_new_tokens=2)
    assert caplog.messages == [
        "the cache failed to retrieve, so this is computed: gone",
        "the cache failed to store, so this is computed: [Errno 28] No space left on device",
    ]


def test_a_closed_cache_is_a_miss() -> None:
    model = tiny_llama()
    prompt = random_prompt(12)
    with cached(model) as made:
        made.generate(prompt, max_new_tokens=2)
    made.close()
    assert torch.equal(made.generate(prompt, max_new_tokens=2), plain(model, prompt, max_new_tokens=2))
    assert made.failures == {"retrieve": 1, "store": 1}


def test_a_bug_is_not_hidden() -> None:
    model = tiny_llama()
    with FailingCache.of(model) as cache:
        made = CachedModel(model, cache)
        cache.failing = {"retrieve": ZeroDivisionError()}
        with pytest.raises(ZeroDivisionError):
            made.generate(random_prompt(12), max_new_tokens=2)


def test_what_generate_raises_reaches_the_caller_and_stores_nothing() -> None:
    model = tiny_llama()
    with cached(model) as made:
        with pytest.raises(ValueError, match="max_length"):
            made.generate(random_prompt(12), max_length=3)
        assert made.last_call is None
        made.generate(random_prompt(12), max_new_tokens=2)
        assert made.last_call is not None
        assert made.last_call.cached_tokens == 0


@pytest.mark.parametrize(
    "odd", ["gpt2", None, {"config": 1}, torch.nn.Linear(2, 2)], ids=lambda odd: type(odd).__name__
)
def test_what_is_no_model_is_refused(odd: Any) -> None:
    said = f"not a {type(odd).__name__}: AutoModelForCausalLM.from_pretrained"
    with FailingCache.of(tiny_llama()) as cache:
        for refused in (describe_model, CachedModel.open, lambda odd: CachedModel(odd, cache)):
            with pytest.raises(LayoutError, match=said):
                refused(odd)


def test_a_model_that_cannot_generate_is_refused() -> None:
    with pytest.raises(LayoutError, match="LlamaModel cannot be cached: it has no generate"):
        CachedModel.open(tiny_llama().get_submodule("model"), CONFIG)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", ["cache.yaml", CONFIG, None])
def test_what_is_no_cache_is_refused(odd: Any) -> None:
    with pytest.raises(UsageError, match=r"CachedModel\.open\(model, config\)"):
        CachedModel(tiny_llama(), odd)
