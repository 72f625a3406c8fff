"""Which KV a vLLM engine makes: the namespace under which it is cached, and what cannot be cached.

All that vLLM says is read by attribute, so that this can be tested without it; classes of cache specs go by their
names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.connectors.canonical import MOVING_ROPES, canonical_namespace, canonical_refusals
from lmcache_core.connectors.modelsettings import settings_that_count
from lmcache_core.connectors.vllm.plan import Facts
from lmcache_core.connectors.weights import checkpoint_digest, nobody_elses
from lmcache_core.errors import LayoutError
from lmcache_core.keys import digest_fields
from lmcache_core.namespace import Group, GroupKind, Namespace

__all__ = [
    "GroupSpec",
    "block_tokens",
    "describe_engine",
    "group_specs",
    "not_lazy",
    "not_shared",
    "refusals",
    "shards_of",
    "weights_of",
]

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec",)
WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that have no cache of their own."""


class GroupSpec:
    """One of the engine's cache groups.

    Raises:
        LayoutError: It is of a kind that cannot be cached; the message names it.
    """

    def __init__(self, number: int, group: Any) -> None:
        spec = group.kv_cache_spec
        specs = list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]
        kinds = {type(each).__name__ for each in specs}
        if len(kinds) > 1 or len({_geometry(each) for each in specs}) > 1:
            raise LayoutError(f"cache group {number} has layers of several kinds, {', '.join(sorted(kinds))}")
        self.number = number
        self.kind = kinds.pop()
        self.spec = specs[0]
        self.layer_names: list[str] = list(group.layer_names)
        self.block_tokens: int = spec.block_size
        if self.kind not in (*FULL, *WINDOW):
            raise LayoutError(f"cache group {number} is a {self.kind}, which is not supported yet")
        if getattr(self.spec, "tokens_per_state", 1) != 1:
            raise LayoutError(f"cache group {number} keeps several tokens in one state, which is not supported yet")

    @property
    def latent(self) -> bool:
        """Whether it keeps one latent vector a token in place of K and V."""
        return self.kind == "MLAAttentionSpec"

    def group(self, page_tokens: int, block_layer_bytes: int, dtype: str) -> Group:
        """What it is in a namespace."""
        spec = self.spec
        head_size, head_size_v = spec.head_size, getattr(spec, "head_size_v", None)
        planes = 2
        if self.latent:
            planes = 1
        elif head_size_v not in (None, head_size):
            planes, head_size = 1, head_size + head_size_v
        window = self.kind in WINDOW
        return Group(
            kind=GroupKind.WINDOW if window else GroupKind.FULL,
            layers=tuple(_layer_number(name, place) for place, name in enumerate(self.layer_names)),
            page_layer_bytes=block_layer_bytes * (page_tokens // self.block_tokens),
            dtype=dtype,
            kv_heads=spec.num_kv_heads,
            head_size=head_size,
            planes=planes,
            window_tokens=spec.sliding_window if window else None,
            name=f"{self.kind} {self.number}",
        )


def _geometry(spec: Any) -> tuple[object, ...]:
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window", "page_size_bytes")
    return tuple(getattr(spec, name, None) for name in names)


def _layer_number(name: str, place: int) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else place


def group_specs(kv_cache_config: Any) -> list[GroupSpec]:
    """The cache groups of an engine.

    Raises:
        LayoutError: One is of a kind that cannot be cached.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise LayoutError("the model has no KV cache")
    if any(not getattr(group, "enable_kv_transfer", True) for group in groups):
        raise LayoutError("a cache group is kept from being transferred")
    return [GroupSpec(number, group) for number, group in enumerate(groups)]


def block_tokens(specs: Sequence[GroupSpec]) -> int:
    """Tokens of which every group has whole blocks."""
    return math.lcm(*(spec.block_tokens for spec in specs))


def not_lazy(vllm_config: Any, specs: Sequence[GroupSpec]) -> str:
    """Why KV cannot be stored late, if it cannot: what is in a free block is known where all of a prompt is kept in
    blocks of one kind, and the engine finds them again."""
    if len(specs) > 1 or specs[0].kind not in FULL:
        return "the model keeps not all of a prompt in blocks of one kind"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "the engine keeps nothing in blocks that no request uses (enable_prefix_caching is off)"
    return ""


def interleaves(vllm_config: Any) -> bool:
    """Whether the engine computes a step in two halves, a layer of one beside a layer of the other, so that a layer is
    not complete when one of them has been through it."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False))


def refusals(vllm_config: Any) -> Iterator[str]:
    """Why an engine with these settings cannot use the cache."""
    parallel = vllm_config.parallel_config
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if getattr(parallel, name, 1) > 1:
            yield f"{what} is not supported yet; set {name} to 1"
    if getattr(parallel, "nnodes", 1) > 1:
        yield "an engine over several hosts is not supported yet"
    speculative = getattr(vllm_config, "speculative_config", None)
    method = None if speculative is None else str(getattr(speculative, "method", ""))
    if method is not None and method not in WITHOUT_CACHE:
        yield (
            f"speculative decoding by {method!r} keeps KV of its own, which is not supported yet; use one of "
            f"{', '.join(WITHOUT_CACHE)}, or none"
        )
    if vllm_config.model_config.is_encoder_decoder:
        yield "KV of an encoder-decoder depends on another input as well"


def shards_of(vllm_config: Any, kv_cache_config: Any, specs: Sequence[GroupSpec]) -> tuple[int, int]:
    """Shards of a chunk, and how many ranks hold each."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if all(spec.latent for spec in specs):
        replicas = ranks
    return ranks // replicas, replicas


def loads_within_a_step(vllm_config: Any, groups: int, replicas: int) -> bool:
    """Whether a step may load what it needs itself. If that is lost, what the step computes is nonsense: so no step may
    be planned behind it before that is known, blocks must tell which cache group they are of, and no rank may store
    what another one's loss has spoilt (each of those that hold different KV spoils the chunk by its own part)."""
    return groups == 1 and replicas == 1 and not vllm_config.scheduler_config.async_scheduling


def describe_engine(
    vllm_config: Any, specs: Sequence[GroupSpec], facts: Facts, *, page_tokens: int, shards: int, weights: str
) -> Namespace:
    """The namespace of an engine's KV.

    Raises:
        LayoutError: It cannot be cached.
    """
    model = vllm_config.model_config
    dtype = kv_dtype(vllm_config)
    name = str(getattr(model, "served_model_name", "") or model.model)
    if facts.encoding.layout == "canonical":
        (spec,) = specs
        return canonical_namespace(
            weights=weights,
            layers=spec.group(page_tokens, facts.block_layer_bytes[0], dtype).layers,
            kv_heads=spec.spec.num_kv_heads,
            head_size=spec.spec.head_size,
            dtype=dtype,
            page_tokens=page_tokens,
            model_name=name,
        )
    groups = tuple(
        spec.group(page_tokens, nbytes, dtype) for spec, nbytes in zip(specs, facts.block_layer_bytes, strict=True)
    )
    return Namespace(
        weights=weights,
        groups=groups,
        page_tokens=page_tokens,
        encoding=facts.encoding,
        shards=shards,
        config=_config_digest(vllm_config),
        model_name=name,
    )


def not_shared(vllm_config: Any, specs: Sequence[GroupSpec]) -> Iterator[str]:
    """Why KV of this engine cannot be had in the layout that engines of other kinds share."""
    model = vllm_config.model_config
    spec = specs[0].spec
    yield from canonical_refusals(
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=kv_dtype(vllm_config),
        quantization=model.quantization,
        overridden=bool(getattr(model, "hf_overrides", None)),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        attention=len(specs) == 1
        and specs[0].kind == "FullAttentionSpec"
        and getattr(spec, "head_size_v", None) in (None, spec.head_size)
        and not getattr(spec, "sliding_window", None),
        multimodal=bool(getattr(model, "is_multimodal_model", False)),
        drafts=False,  # those are refused whatever the layout
        adapters=False,  # their content is in the keys
        model=(getattr(model, "hf_text_config", None) or model.hf_config).to_dict(),
    )


def weights_of(vllm_config: Any, weights_id: str = "") -> str:
    """What stands for the engine's weights: what the user says, else a digest of the checkpoint's files. Weights that
    were made up are nobody else's.

    Raises:
        LayoutError: The files can't be read.
    """
    if weights_id:
        return f"id {weights_id}"
    if str(getattr(vllm_config.load_config, "load_format", "auto")) == "dummy":
        return nobody_elses()
    return checkpoint_digest(vllm_config.model_config.model, vllm_config.model_config.revision)


def kv_dtype(vllm_config: Any) -> str:
    """The logical type of the numbers in the cache."""
    written = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    if written in ("auto", "float16", "bfloat16", "float32"):
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(written, written)


def _config_digest(vllm_config: Any) -> str:
    """Digest of the settings that change numbers. How attention is computed isn't one."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", None) or model.hf_config
    fields: dict[str, Any] = {
        "model": settings_that_count(text.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache dtype": str(vllm_config.cache_config.cache_dtype),
    }
    if any(kind in fields["model"] for kind in MOVING_ROPES):
        fields["longest prompt"] = int(model.max_model_len)
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        fields["draft"] = f"{getattr(speculative, 'method', '')} {getattr(speculative, 'model', '')}"
    return digest_fields("lmcache-core vllm config 1", fields).hex()


def marks_of(request: Any, adapter: str | None) -> Mapping[str, Any]:
    """What besides its tokens tells a request's KV from that of others, as arguments of `Marks`."""
    spans = tuple(
        (feature.mm_position.offset, feature.mm_position.length, str(feature.identifier))
        for feature in getattr(request, "mm_features", None) or ()
    )
    return {"adapter": adapter, "spans": spans}
