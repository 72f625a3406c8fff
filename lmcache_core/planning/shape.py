"""The shape of a model, read from the config.json that Hugging Face models come with.

What decides the size of KV is read of any decoder with full, windowed or latent (MLA) attention, and what has other
layers is refused by name. How many weights a token is multiplied with is known for the kinds of models below; for
others the caller has to say it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_core.errors import ConfigError
from lmcache_core.planning.forms import Layers, Shape

__all__ = ["DTYPES", "read_config", "shape_of"]

DTYPES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of a number."""

_DENSE = {"gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}
_MIXTURES = {"deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}
_ALL_WINDOWED = {"mistral", "mixtral", "phi3"}
"""Kinds of models whose `sliding_window` is that of all layers, where there are no `layer_types`."""
_NOT_PLANNED = {
    "compress_ratios": "compressed attention",
    "full_attn_idxs": "recurrent layers",
    "index_topk": "sparse attention",
    "layers_block_type": "recurrent layers",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "recurrent layers",
    "ssm_state_size": "recurrent layers",
    "state_size": "recurrent layers",
    "attention_chunk_size": "attention by chunks",
}
_LARGEST_FILE = 16 << 20
_LARGEST = 10**9


def read_config(path: Path) -> dict[str, Any]:
    """A model's settings, from its config.json or the folder with it.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there; name a model's config.json, or the folder with it") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    if len(text) > _LARGEST_FILE:
        raise ConfigError(f"{file} is larger than a config.json can be; name a model's config.json")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}; name a model's config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} is no JSON object; name a model's config.json")
    return settings


def shape_of(settings: Mapping[str, Any], parameters: float | None = None, dtype: str | None = None) -> Shape:
    """The shape of a model.

    Args:
        parameters: That each token is multiplied with, instead of what follows from the settings.
        dtype: Of the KV; by default that of the weights.

    Raises:
        ConfigError: The settings are not those of a decoder that can be planned for, or are not enough.
    """
    read = _Reader(_of_text(settings))
    read.refuse_others()
    layers = _layers(read, read.dtype_bytes(settings, dtype))
    return Shape(layers, _parameters(read) if parameters is None else parameters)


def _of_text(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the language model inside one that sees images too."""
    if "num_hidden_layers" not in settings and isinstance(inner := settings.get("text_config"), dict):
        return inner
    return settings


class _Reader:
    """Settings whose every number has been looked at."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        kind = settings.get("model_type")
        self.kind = kind if isinstance(kind, str) else ""

    def refuse_others(self) -> None:
        if self.settings.get("is_encoder_decoder"):
            raise ConfigError("the model has an encoder; plans are made for decoders alone")
        for name, what in _NOT_PLANNED.items():
            if self.settings.get(name):
                raise ConfigError(f"the model has {what} ({name}), for which there is no plan")
        if self.number("num_kv_shared_layers", 0):
            raise ConfigError("the model has layers that share KV (num_kv_shared_layers), for which there is no plan")

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number, of at least 1 unless the default is 0. What is not there, or null, is the default."""
        value = self.settings.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"the model's settings lack {name}; is it the config.json of a decoder?")
            return default
        least = 0 if default == 0 else 1
        if type(value) is not int or not least <= value <= _LARGEST:
            raise ConfigError(f"{name} of the model is {str(value)[:40]!r}; it must be a number from {least} on")
        return value

    def first(self, *names: str) -> int:
        """The first number of several names that is there."""
        return self.number(next((name for name in names if self.settings.get(name) is not None), names[0]))

    @property
    def head_size(self) -> int:
        return self.number("head_dim", 0) or self.number("hidden_size") // self.number("num_attention_heads")

    @property
    def latent(self) -> bool:
        """Whether its attention is MLA."""
        return bool(self.number("kv_lora_rank", 0))

    def dtype_bytes(self, whole: Mapping[str, Any], asked: str | None) -> int:
        """Of a number of KV."""
        places = (self.settings, whole)
        found = [place[name] for place in places for name in ("dtype", "torch_dtype") if place.get(name) is not None]
        dtype = asked or (found[0] if found else None)
        if dtype is None:
            raise ConfigError("the model's settings do not say the dtype; say that of its KV, such as bfloat16")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ConfigError(f"a dtype {str(dtype)[:40]!r} of KV is not known; there are {', '.join(DTYPES)}")
        return DTYPES[dtype]

    def windows(self) -> list[int | None]:
        """Of each layer."""
        count = self.number("num_hidden_layers")
        if count > 10_000:
            raise ConfigError(f"the model has {count} layers; no model has")
        window = self.number("sliding_window", 0)
        if self.settings.get("use_sliding_window") is False:
            window = 0
        types = self.settings.get("layer_types")
        if types is not None:
            if not isinstance(types, list) or len(types) != count:
                raise ConfigError("layer_types of the model must have a name for each of num_hidden_layers")
            return [self._window_of(each, window) for each in types]
        if not window:
            return [None] * count
        if pattern := self.number("sliding_window_pattern", 0) or 2 * (self.kind == "gemma2"):
            return [None if (layer + 1) % pattern == 0 else window for layer in range(count)]
        if self.kind in _ALL_WINDOWED:
            return [window] * count
        raise ConfigError("the model has a sliding_window, but no layer_types that say in which layers")

    def _window_of(self, kind: object, window: int) -> int | None:
        if kind == "full_attention":
            return None
        if kind != "sliding_attention":
            raise ConfigError(f"the model has layers of the kind {str(kind)[:40]!r}, for which there is no plan")
        if not window:
            raise ConfigError("the model has layers with a window, but sliding_window does not say of how many tokens")
        return window


def _layers(read: _Reader, dtype_bytes: int) -> tuple[Layers, ...]:
    heads = read.number("num_attention_heads")
    if read.latent:
        rope = read.number("qk_rope_head_dim")
        kv_bytes = (read.number("kv_lora_rank") + rope) * dtype_bytes
        width = heads * (read.number("qk_nope_head_dim") + rope + read.number("v_head_dim"))
    else:
        kv_bytes = 2 * read.number("num_key_value_heads", heads) * read.head_size * dtype_bytes
        width = 2 * heads * read.head_size
    windows = read.windows()
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    return tuple(Layers(windows.count(window), kv_bytes, width, window) for window in kinds)


def _parameters(read: _Reader) -> float:
    """Weights that each token is multiplied with."""
    if read.kind not in _DENSE | _MIXTURES:
        raise ConfigError(
            f"how many weights a token of a model of the kind {read.kind[:40]!r} is multiplied with is not known; "
            "say it, as in --parameters 8.03B (of a mixture of experts, the active ones)"
        )
    count = read.number("num_hidden_layers")
    attention = _latent_weights(read) if read.latent else _attention_weights(read)
    mixtures = _mixture_layers(read, count) if read.kind in _MIXTURES else 0
    weights = count * attention + mixtures * (_mixture_weights(read) if mixtures else 0)
    if dense := count - mixtures:
        weights += dense * _gated(read, read.number("intermediate_size"))
    return float(weights)


def _gated(read: _Reader, size: int) -> int:
    """Of an MLP with a gate: up, gate and down."""
    return 3 * read.number("hidden_size") * size


def _attention_weights(read: _Reader) -> int:
    heads = read.number("num_attention_heads")
    with_kv = 2 * heads + 2 * read.number("num_key_value_heads", heads)
    return read.number("hidden_size") * with_kv * read.head_size


def _latent_weights(read: _Reader) -> int:
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    latent, rope = read.number("kv_lora_rank"), read.number("qk_rope_head_dim")
    nope, value = read.number("qk_nope_head_dim"), read.number("v_head_dim")
    lora = read.number("q_lora_rank", 0)
    queries = heads * (nope + rope)
    asked = lora * (hidden + queries) if lora else hidden * queries
    return asked + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _mixture_layers(read: _Reader, count: int) -> int:
    """How many layers have experts."""
    if read.kind.startswith("deepseek"):
        every, first = read.number("moe_layer_freq", 1), read.number("first_k_dense_replace", 0)
        return sum(layer >= first and layer % every == 0 for layer in range(count))
    if read.kind.startswith("qwen"):
        every, plain = read.number("decoder_sparse_step", 1), read.settings.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            raise ConfigError("mlp_only_layers of the model must be a list of layers")
        return sum(layer not in plain and (layer + 1) % every == 0 for layer in range(count))
    return count


def _mixture_weights(read: _Reader) -> int:
    """Of one layer with experts: the router, those a token goes to, and those that all tokens go to."""
    hidden = read.number("hidden_size")
    experts = read.first("num_experts", "n_routed_experts", "num_local_experts")
    chosen = read.first("num_experts_per_tok", "experts_per_token")
    size = read.first("moe_intermediate_size", "intermediate_size")
    weights = hidden * experts + chosen * _gated(read, size)
    if read.kind.startswith("deepseek"):
        weights += _gated(read, size * read.number("n_shared_experts", 0))
    if shared := read.number("shared_expert_intermediate_size", 0):
        weights += _gated(read, shared) + hidden
    return weights
