"""`CachedModel`: a causal language model whose `generate` shares the KV of prefixes through the cache."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel

from lmcache_core.cache import Cache, Prompt
from lmcache_core.config import Config, LoadedConfig, load_config
from lmcache_core.connectors.transformers.arena import Arena, ArenaCache
from lmcache_core.connectors.transformers.calls import Call, CallStats, FirstToken
from lmcache_core.connectors.transformers.identity import cache_argument, describe_model, has_adapter, shape_of
from lmcache_core.errors import LayoutError, LMCacheError, UsageError
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, Transfer
from lmcache_core.ratelog import RateLog

__all__ = ["CachedModel"]

log = logging.getLogger(__name__)


OURS = ("input_ids", "cache", "past_key_values")
"""Arguments of `generate` that are given by us; the last two are None where a caller names them."""


class CachedModel:
    """A model and a cache of its KV. `generate` gives what the model's own would give, sooner.

    No failure of the cache fails a call: what can't be had from it is computed. Failures are counted in `failures` and
    logged, one line per kind and interval.

    Args:
        model: A causal language model with full attention, in evaluation mode.
        cache: A cache that was opened for `describe_model(model)`. It stays the caller's.
        weights: See `describe_model`; as it was given there.
        save_decode: Whether KV of generated tokens is stored too, as the next turn of a conversation can use it.
        log_interval: Seconds between two log lines of a kind.

    Raises:
        LayoutError: This kind of model can't be cached, or the cache is another model's; the message says why.
        UsageError: What was given as cache isn't one.
        PluginError: There is no transfer for the device the model is on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        *,
        weights: str | None = None,
        save_decode: bool = True,
        log_interval: float = 10.0,
    ) -> None:
        if not isinstance(cache, Cache):
            raise UsageError(
                f"the cache must be an open Cache, not a {type(cache).__name__}; to open one from a configuration: "
                "CachedModel.open(model, config)"
            )
        self.model = model
        self.cache = cache
        self.save_decode = save_decode
        self.failures: Counter[str] = Counter()
        """Failures of the cache by verb: `retrieve` and `store`."""
        self.last_call: CallStats | None = None
        """What the last call of `generate` that came to its end took from the cache and gave to it."""
        self._namespace = cache.namespace
        self._shape = shape_of(model)
        if not hasattr(model, "generate"):
            raise LayoutError(f"{type(model).__name__} cannot be cached: it has no generate")
        self._transfer: Transfer = load_transfer(self._shape.device.type).create({})
        self._argument = cache_argument(GenerationMixin.prepare_inputs_for_generation)
        self._weights = _versions(model)
        self._log = RateLog(log, log_interval)
        self._owns_cache = False
        self._check_cache(weights)

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        config: Path | str | Mapping[str, Any] | Config | LoadedConfig | None = None,
        *,
        weights: str | None = None,
        save_decode: bool = True,
    ) -> CachedModel:
        """A model with a cache of its own, which is closed with it.

        Args:
            model: A causal language model with full attention, in evaluation mode.
            config: The cache's configuration: a file, YAML text, a mapping, or settings that were loaded before. None
                for the file that the environment variable `LMCACHE_CORE_CONFIG` names, or the defaults.
            weights: See `describe_model`.
            save_decode: Whether KV of generated tokens is stored too.

        Raises:
            LayoutError: This kind of model can't be cached; the message says why.
            ConfigError: The configuration can't be used; the message says where and what to change.
            PluginError: A backend isn't installed, or there is no transfer for the device the model is on.
            PoolError: The host pool can't be had.
        """
        settings = _settings(config)
        namespace = describe_model(model, page_tokens=settings.page_tokens, layout=settings.layout, weights=weights)
        cache = Cache.open(settings, namespace)
        try:
            cached = cls(
                model,
                cache,
                weights=namespace.weights,
                save_decode=save_decode,
                log_interval=settings.log_interval,
            )
        except BaseException:  # whatever it was, the cache must not stay open
            cache.close()
            raise
        cached._owns_cache = True
        return cached

    def close(self) -> None:
        """Let go of the cache: close it if `open` opened it. Idempotent."""
        if self._owns_cache:
            self.cache.close()

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        salt: str | bytes | None = None,
        **options: Any,
    ) -> Any:
        """Like `generate` of the model, for one prompt: same arguments, same result.

        Args:
            inputs: Token ids of the prompt, `[1, tokens]`; may be given as `input_ids` too.
            generation_config: See `generate` of the model.
            salt: Sets the KV of this call apart: only calls with the same salt share it.
            options: All other arguments of `generate` that leave the KV of the prompt what it is.

        Raises:
            LayoutError: Not possible with these arguments; the message names the one and what to do.
            UsageError: There is no such option, or the model isn't what it was when this object was made.
        """
        started = time.perf_counter()
        call = Call(self.model, inputs, generation_config, options)
        self._check_model()
        arena, prompt, cached, tiers = self._retrieve(call, salt)
        state = ArenaCache(arena, cached)
        first = FirstToken()
        processors = LogitsProcessorList([*(options.pop("logits_processor", None) or ()), first])
        options = {name: value for name, value in options.items() if name not in OURS}
        retrieved = time.perf_counter()
        output = _generate(self.model)(
            call.ids, generation_config, logits_processor=processors, **options, **{self._argument: state}
        )
        ended = time.perf_counter()
        sequence: list[int] = (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()
        stored = self._store(prompt, sequence, state)
        self.last_call = CallStats(
            prompt_tokens=len(call.tokens),
            cached_tokens=cached,
            tiers=tiers,
            generated_tokens=len(sequence) - len(call.tokens),
            stored_tokens=stored,
            ttft_s=(first.at or ended) - started,
            retrieve_s=retrieved - started,
            store_s=time.perf_counter() - ended,
        )
        return output

    def _retrieve(self, call: Call, salt: str | bytes | None) -> tuple[Arena, Prompt | None, int, Mapping[str, int]]:
        """Memory for the call's KV, with what of its prompt's could be had. At least one token is left to compute."""
        page = self._namespace.page_tokens
        most = 0 if call.needs_whole_prompt else (len(call.tokens) - 1) // page * page
        arena = Arena(self._shape, call.room, page)
        prompt = None
        with self._tolerating("retrieve"):
            prompt = self.cache.prompt(call.tokens, salt=salt)
            if most:
                found = self.cache.retrieve(prompt, self._view(arena), max_tokens=most)
                return arena, prompt, found.tokens, found.tiers
            return arena, prompt, 0, {}
        # What failed half-way may have been written to; nothing of it is used.
        return Arena(self._shape, call.room, page), prompt, 0, {}

    def _store(self, prompt: Prompt | None, sequence: list[int], state: ArenaCache) -> int:
        """Give KV of whole pages to the cache; returns how many tokens were copied."""
        if prompt is None:
            return 0
        # The last token that was sampled has no KV: it never went through the model.
        known = min(state.tokens, len(sequence) if self.save_decode else prompt.tokens)
        if known < prompt.tokens or known < self._namespace.page_tokens:
            return 0
        with self._tolerating("store"):
            prompt.extend(sequence[prompt.tokens : known])
            return self.cache.store(prompt, self._view(state.arena)).stored
        return 0

    def _view(self, arena: Arena) -> KVView:
        """The arena as the cache sees it: a table of blocks as long as a page, one after another."""
        page = self._namespace.page_tokens
        registered = self._transfer.register(
            arena.layers(), dims="1htd", page_tokens=page, block_tokens=page, layout=self._namespace.encoding.layout
        )
        if registered.page_layer_bytes != self._namespace.groups[0].page_layer_bytes:
            raise LayoutError(
                f"a page and layer of this model has {registered.page_layer_bytes} bytes, "
                f"of the cache's {self._namespace.groups[0].page_layer_bytes}"
            )
        return registered.view(range(arena.capacity // page))

    def _check_cache(self, weights: str | None) -> None:
        there = self._namespace
        own = describe_model(
            self.model,
            page_tokens=there.page_tokens,
            layout=there.encoding.layout,
            weights=weights,
            shape=self._shape,
        )
        if (own.content, own.encoding_digest) != (there.content, there.encoding_digest):
            raise LayoutError("the cache was opened for another model: open it with describe_model(model)")

    def _check_model(self) -> None:
        if self.model.training:
            raise UsageError("the model is in training mode, in which KV is random: call model.eval()")
        if torch.is_autocast_enabled(self._shape.device.type):
            raise UsageError("under autocast KV is of another precision than the model's: call generate outside of it")
        if has_adapter(self.model) or _versions(self.model) != self._weights:
            raise UsageError("the model's weights or adapters have changed since: make another CachedModel of it")

    @contextmanager
    def _tolerating(self, verb: str) -> Iterator[None]:
        """Let the cache fail: count it, log it, and go on behind the block."""
        try:
            yield
        except (LMCacheError, OSError) as error:
            self.failures[verb] += 1
            self._log.warning(verb, "the cache failed to %s, so this is computed: %s", verb, error)


def _settings(config: Path | str | Mapping[str, Any] | Config | LoadedConfig | None) -> Config:
    if isinstance(config, Config):
        return config
    return (config if isinstance(config, LoadedConfig) else load_config(config)).config


def _generate(model: PreTrainedModel) -> Callable[..., Any]:
    generate: Any = model.generate  # a mixin's, which the type of the model doesn't tell
    return cast("Callable[..., Any]", generate)


def _versions(model: PreTrainedModel) -> list[tuple[int, int]]:
    """What changes when weights are changed in place, by an optimizer for one, or exchanged."""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in model.parameters()]
