"""KV that engines of different kinds share (`layout: canonical`): what all of them must agree on, and its namespace.

Shared is what means the same in all engines: whole attention over heads of one size, in numbers of 16 or 32 bits as
they were computed, of weights that are told apart by their files and a configuration that nobody has overridden. All
else is refused: a wrong guess would be wrong KV. Keys are those of the page chain that starts with nothing, so requests
with a salt or an adapter are kept apart by each engine's own rules, and are shared between engines of one kind only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.keys import digest_fields
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace

__all__ = ["DTYPES", "MOVING_ROPES", "canonical_namespace", "canonical_refusals"]

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Types of numbers that are shared, and their bytes."""
MOVING_ROPES = ("longrope", "dynamic")
"""Kinds of scaling by which KV depends on how long prompts may be."""


def canonical_refusals(
    *,
    dtype: str,
    kv_dtype: str,
    quantization: object,
    overridden: bool,
    ranks: int,
    attention: bool,
    multimodal: bool,
    drafts: bool,
    adapters: bool,
    model: Mapping[str, Any],
) -> Iterator[str]:
    """Why an engine's KV cannot be shared with engines of other kinds.

    Args:
        dtype: What the model computes in.
        kv_dtype: What is kept.
        quantization: Of the weights, if any.
        overridden: Whether the checkpoint's configuration is changed by the engine's arguments.
        ranks: Of tensor parallelism.
        attention: Whether all layers attend to the whole prompt, with K and V of one size.
        multimodal: Whether prompts may hold more than text.
        drafts: Whether a second model has a part in the cache.
        adapters: Whether LoRA adapters are known to the engine by their names alone.
        model: The checkpoint's configuration.
    """
    if kv_dtype not in DTYPES or kv_dtype != dtype:
        yield f"KV of type {kv_dtype}, of a model that computes in {dtype}; both must be one of {', '.join(DTYPES)}"
    if quantization:
        yield f"weights quantized by {quantization}, which each engine computes with in its own way"
    if overridden:
        yield "the checkpoint's configuration is overridden by the engine's arguments; write it into config.json"
    if ranks != 1:
        yield f"{ranks} ranks of tensor parallelism; only one is supported yet"
    if not attention:
        yield "windows, recurrent states or latents in the cache; only whole attention is shared"
    if multimodal:
        yield "a model of more than text, whose placeholders each engine names in its own way"
    if any(kind in json.dumps(model, default=str) for kind in MOVING_ROPES):
        yield "positions that are scaled by the longest prompt, which is each engine's own setting"
    if adapters:
        yield "LoRA adapters that the engine is started with, which it tells apart by their names"
    if drafts:
        yield "speculative decoding with a cache of its own"


def canonical_namespace(
    *,
    weights: str,
    layers: Sequence[int],
    kv_heads: int,
    head_size: int,
    dtype: str,
    page_tokens: int,
    model_name: str = "",
) -> Namespace:
    """The namespace of one model's KV, whichever engine computes it.

    Args:
        weights: What stands for the weights, made as all connectors make it.
        layers: Numbers of the model's layers.
        kv_heads: Of the model.
        head_size: Of K and of V.
        dtype: One of `DTYPES`.
        page_tokens: Tokens of a page, the same in all engines.
        model_name: For people.

    Raises:
        LayoutError: These are no sizes.
    """
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(layers),
        page_layer_bytes=2 * page_tokens * kv_heads * head_size * DTYPES[dtype],
        dtype=dtype,
        kv_heads=kv_heads,
        head_size=head_size,
        planes=2,
        name="attention",
    )
    return Namespace(
        weights=weights,
        groups=(group,),
        page_tokens=page_tokens,
        encoding=Encoding(layout="canonical"),
        config=digest_fields("lmcache-core canonical config 1", {"dtype": dtype}).hex(),
        model_name=model_name,
    )
