"""One call of `generate`: what of its arguments matters to the cache, and what came of it."""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from lmcache_core.errors import LayoutError, UsageError

__all__ = ["Call", "CallStats", "FirstToken"]

HARMLESS = frozenset(
    {
        "attention_mask",
        "input_ids",
        "logits_processor",
        "logits_to_keep",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
    }
)
"""Arguments besides those of a `GenerationConfig` that leave the KV of the prompt what it is."""

FOREIGN = frozenset({"cache", "inputs_embeds", "past_key_values", "position_ids", "token_type_ids"})
"""Arguments that some models and versions of transformers know and others don't, and none of which can be cached."""

ROOM = 1024
"""Room for new tokens that is taken in advance at most."""


@dataclass(frozen=True)
class CallStats:
    """What one call of `generate` took from the cache and gave to it, in tokens."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt, taken from the cache."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """`cached_tokens` by the tier they came from."""
    generated_tokens: int = 0
    stored_tokens: int = 0
    """Copied to the cache: whole pages that are new, and at most one chunk's pages that were there before: those of a
    tail, a chunk that wasn't full, which is stored again with what follows it. Added up over calls it may so be more
    than what the cache holds."""
    ttft_s: float = 0.0
    """Seconds from the call to the scores of the first new token: hashing, lookup and loading included."""
    retrieve_s: float = 0.0
    """Seconds of these that went to hashing, lookup and loading."""
    store_s: float = 0.0
    """Seconds after the last token until the KV was in the cache's memory."""

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, run through the model."""
        return self.prompt_tokens - self.cached_tokens


class FirstToken(LogitsProcessor):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Changes nothing; notes when it was asked first, which is when the scores of the first new token were there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            if scores.is_cuda:
                torch.cuda.synchronize(scores.device)
            self.at = time.perf_counter()
        return scores


class Call:
    """The arguments of one call of `generate`.

    Raises:
        LayoutError: With these arguments KV can't be cached, or would be of something else than the prompt's tokens.
        UsageError: `generate` has no such option.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: torch.Tensor | None,
        config: GenerationConfig | None,
        options: Mapping[str, Any],
    ) -> None:
        self._configs = [each for each in (config, model.generation_config) if each is not None]
        self._options = options
        if inputs is not None and options.get("input_ids") is not None:
            raise LayoutError("give the prompt as `inputs` or as `input_ids`, not both")
        self.ids = _one_prompt(inputs if inputs is not None else options.get("input_ids"))
        self._refuse_foreign_arguments(model)
        self._refuse_modes()
        self._refuse_padding()
        self.tokens: list[int] = self.ids[0].tolist()

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt must be computed: because the result holds something of each of its tokens, or
        because it is to be computed in parts, with which not every transformers takes up behind a cached prefix."""
        return any(map(self._setting, ("output_attentions", "output_hidden_states", "prefill_chunk_size")))

    @property
    def room(self) -> int:
        """Tokens to make room for, unless there will be many new ones."""
        new: int | None = self._setting("max_new_tokens")
        if new is None:
            new = (self._setting("max_length") or 0) - len(self.tokens)
        return len(self.tokens) + min(max(new, 32), ROOM)

    def _setting(self, name: str) -> Any:
        """What `generate` will take: its own argument, else the generation config given, else the model's."""
        if self._options.get(name) is not None:
            return self._options[name]
        return next((value for each in self._configs if (value := getattr(each, name, None)) is not None), None)

    def _refuse_foreign_arguments(self, model: PreTrainedModel) -> None:
        known = HARMLESS | vars(GenerationConfig()).keys()  # type: ignore[no-untyped-call]
        for name, value in self._options.items():
            if value is not None and name not in known:
                if name not in FOREIGN | _parameters(model):
                    raise _unknown(name, known)
                raise LayoutError(
                    f"generate({name}=...) cannot be cached: it may change what the KV of the prompt's tokens is; "
                    "call generate of the model itself"
                )

    def _refuse_modes(self) -> None:
        for name, plain in MODES.items():
            value = self._setting(name)
            if value is not None and value not in plain:
                raise LayoutError(
                    f"generate({name}={value!r}) cannot be cached, only greedy search and sampling of one sequence "
                    "with a dynamic cache; call generate of the model itself"
                )

    def _refuse_padding(self) -> None:
        mask = self._options.get("attention_mask")
        if mask is None:
            pad, end = self._setting("pad_token_id"), self._setting("eos_token_id")
            ends = end.tolist() if isinstance(end, torch.Tensor) else end if isinstance(end, list) else [end]
            if pad is None or pad in ends:
                return
            mask = self.ids != pad  # as transformers takes it
        if tuple(mask.shape) != tuple(self.ids.shape) or not bool((mask == 1).all()):
            raise LayoutError(
                "a padded prompt cannot be cached: leave the padding out, or give an attention_mask of ones if what "
                "looks like padding belongs to the prompt"
            )


MODES: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "is_assistant": (False,),
    "use_mtp": (False,),
    "token_healing": (False,),
    "constraints": (),
    "force_words_ids": (),
    "use_cache": (True,),
    "cache_implementation": ("dynamic",),
}
"""Settings that select another mode of generation or another cache, with the values that don't."""


def _parameters(model: PreTrainedModel) -> set[str]:
    """What the model's own `generate` takes by name, for itself or to hand it on."""
    functions = (getattr(model, name, None) for name in ("generate", "forward", "prepare_inputs_for_generation"))
    return {name for each in functions if each is not None for name in inspect.signature(each).parameters}


def _unknown(name: str, known: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(name, sorted(each for each in known if not each.startswith("_")), 1)
    return UsageError(f"unknown option: generate({name}=...)" + "".join(f"; did you mean {each}?" for each in near))


def _one_prompt(ids: Any) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise LayoutError(f"the prompt must be a tensor of token ids [1, tokens], not {shape}")
    if ids.shape[0] != 1 or ids.shape[1] == 0:
        raise LayoutError(
            f"one prompt of at least one token at a time, not {tuple(ids.shape)}: call generate once for each row, "
            "without padding"
        )
    return ids
