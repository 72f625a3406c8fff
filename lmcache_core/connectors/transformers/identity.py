"""Which KV a model makes: what of it can be cached, and the namespace under which it is.

Nothing is assumed of the model's class. One token is run through it, and what its cache then holds is what it makes.
Refused are models whose KV of a prefix isn't a function of the prefix, or isn't all that a later token needs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as ModelCache
from transformers.cache_utils import DynamicCache, DynamicLayer

from lmcache_core.connectors.modelsettings import settings_that_count
from lmcache_core.connectors.transformers.arena import Shape
from lmcache_core.errors import LayoutError
from lmcache_core.keys import digest_fields
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace

__all__ = ["cache_argument", "describe_model", "has_adapter", "shape_of"]

MOVING_ROPES = ("dynamic", "longrope")
"""Kinds of RoPE that turn a token by an angle that depends on how long the whole prompt is."""

WORDS = 1 << 17
"""Words of 8 bytes that are summed up as one."""


def describe_model(
    model: PreTrainedModel,
    *,
    page_tokens: int = 64,
    layout: Literal["native", "canonical"] = "native",
    weights: str | None = None,
    shape: Shape | None = None,
) -> Namespace:
    """The namespace of a model's KV.

    Args:
        model: A causal language model with full attention.
        page_tokens: Tokens of a page, as in the cache's configuration.
        layout: How KV is stored, as in the cache's configuration.
        weights: Text that stands for these weights and no others. By default it is a digest, for which all of them are
            read once, at the speed of memory.
        shape: What `shape_of(model)` gave, if that is known already.

    Raises:
        LayoutError: This kind of model, or of weights, cannot be cached; the message says why.
    """
    shape = shape or shape_of(model)
    item = shape.dtype.itemsize
    row = shape.head_size * item
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(shape.layers)),
        page_layer_bytes=2 * shape.kv_heads * page_tokens * row,
        dtype=str(shape.dtype).removeprefix("torch."),
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        name="full attention",
    )
    native = Encoding(
        layout="native",
        engine="transformers",
        backend="contiguous",
        block_tokens=page_tokens,
        strides=(page_tokens * row, row, item),
    )
    return Namespace(
        weights=weights or weights_digest(model),
        groups=(group,),
        page_tokens=page_tokens,
        encoding=native if layout == "native" else Encoding(layout="canonical"),
        config=config_digest(model),
        model_name=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
    )


def shape_of(model: PreTrainedModel) -> Shape:
    """The KV of one token of this model.

    Raises:
        LayoutError: This kind of model cannot be cached; the message says why.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise LayoutError(
            "the model must be a causal language model of transformers, "
            f"not a {type(model).__name__}: AutoModelForCausalLM.from_pretrained(...) makes one"
        )
    if reason := next(_reasons(model), None):
        raise LayoutError(f"{type(model).__name__} cannot be cached: {reason}")
    layers = _run_one_token(model).layers
    found = {_shape_of_layer(layer, len(layers), model) for layer in layers}
    if len(found) != 1:
        raise LayoutError(
            f"{type(model).__name__} cannot be cached: KV of its layers is not of one shape, type and device, but of "
            f"{len(found)}"
        )
    return found.pop()


def cache_argument(function: Callable[..., Any]) -> str:
    """What a function of transformers calls its KV cache: `cache` lately, `past_key_values` before."""
    names = inspect.signature(function).parameters
    return "cache" if "cache" in names else "past_key_values"


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether adapters (peft) sit in the model, active or not."""
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or hasattr(model, "peft_config")


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = _text_config(model)
    if has_adapter(model):
        yield "it has adapters, whose KV differs; merge them into the weights (peft: merge_and_unload)"
    if model.config.is_encoder_decoder:
        yield "it is an encoder-decoder, whose KV depends on another input as well"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "its attention is not causal, so that KV of a prefix depends on what follows"
    if ropes := sorted(set(MOVING_ROPES) & set(_rope_types(config))):
        yield f"its RoPE is {ropes[0]!r}: KV of a prefix depends on the length of the whole prompt"
    planned = DynamicCache(config=config)
    for layer in planned.layers:
        if type(layer) is not DynamicLayer:
            yield f"it has layers of the kind {type(layer).__name__}; only full attention can be cached yet"
    if not planned.layers and getattr(planned, "layer_class_to_replicate", DynamicLayer) is not DynamicLayer:
        yield "its cache is not a DynamicCache of full attention"


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _rope_types(config: Any) -> Iterator[str]:
    """Every RoPE type a config names, for all layers or by kind of layer, in old spellings and new."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        for part in [rope, *(rope.values() if isinstance(rope, Mapping) else ())]:
            if isinstance(part, Mapping):
                yield str(part.get("rope_type", part.get("type", "default")))


def _run_one_token(model: PreTrainedModel) -> ModelCache:
    cache = DynamicCache(config=_text_config(model))
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_argument(model.forward): cache})
    return cache


def _shape_of_layer(layer: Any, layers: int, model: PreTrainedModel) -> Shape:
    keys, values = layer.keys, layer.values
    if not isinstance(keys, torch.Tensor) or keys.dim() != 4 or keys.shape != values.shape or keys.shape[2] != 1:
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else each for each in (keys, values)]
        raise LayoutError(
            f"{type(model).__name__} cannot be cached: K and V of a token and layer are {shapes}, "
            "not two tensors [1, heads, 1, head size]"
        )
    if keys.dtype != values.dtype or keys.device != values.device:
        raise LayoutError(f"{type(model).__name__} cannot be cached: K and V differ in data type or device")
    return Shape(layers, keys.shape[1], keys.shape[3], keys.dtype, keys.device)


class _Part(NamedTuple):
    name: str
    tensor: torch.Tensor


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of every parameter and stored buffer, by name, all bytes counted. The same wherever the weights lie and
    however they got there.

    Raises:
        LayoutError: Weights are not in memory.
    """
    digest = hashlib.sha256(b"lmcache-core weights 1")
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in _parts(model):
        device = tensor.device
        if device.type == "meta":
            raise LayoutError(f"{name} is not in memory, so its bytes can't be told from others; give `weights`")
        if device not in factors:
            factors[device] = _factors().to(device)
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(head).to_bytes(8, "little") + head + _summary(tensor, factors[device]))
    return digest.hexdigest()


def _parts(model: PreTrainedModel) -> list[_Part]:
    stored = model.state_dict(keep_vars=True)
    seen: dict[int, _Part] = {}
    for name, value in sorted(stored.items()):
        if isinstance(value, torch.Tensor):
            seen.setdefault(id(value), _Part(name, value.detach()))  # tied weights once
    return list(seen.values())


def _factors() -> torch.Tensor:
    """Odd numbers, different for each place, so that every change of one word changes the sum. Made by shifts and
    products that wrap around, which are alike on every machine."""
    place = torch.arange(1, WORDS + 1, dtype=torch.int64)
    mixed = place * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1


def _summary(tensor: torch.Tensor, factors: torch.Tensor) -> bytes:
    """A sum of all words of 8 bytes, each times its factor, for each run of words; and the bytes behind them."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    runs = torch.split(flat[:whole].view(torch.int64), WORDS)
    sums = on_host(runs, factors) if tensor.device.type == "cpu" else on_device(runs, factors)
    return sums.astype("<i8").tobytes() + bytes(flat[whole:].cpu().tolist())


def on_host(runs: Sequence[torch.Tensor], factors: torch.Tensor) -> NDArray[np.int64]:
    """Sums by numpy: at the speed of memory on one thread, where torch needs two passes."""
    array = factors.numpy()
    return np.array([np.dot(run.numpy(), array[: len(run)]) for run in runs], np.int64)


def on_device(runs: Sequence[torch.Tensor], factors: torch.Tensor) -> NDArray[np.int64]:
    """The same sums by torch."""
    sums = [(run * factors[: len(run)]).sum() for run in runs if len(run)]
    host: NDArray[np.int64] = torch.stack(sums).cpu().numpy() if sums else np.zeros(len(runs), np.int64)
    return host


def config_digest(model: PreTrainedModel) -> str:
    """Digest of the settings that change numbers: RoPE, norms, activation, and any that isn't known not to. How
    attention is computed isn't one."""
    text = settings_that_count(_text_config(model).to_dict())
    return digest_fields("lmcache-core transformers config 1", {"settings": text}).hex()
