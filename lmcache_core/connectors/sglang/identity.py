"""Which KV an SGLang engine makes: the namespace under which a rank's is cached, and what cannot be cached.

All that SGLang says is read by attribute, so that this can be tested without it; classes of host pools go by their
names. SGLang's hashes stand for tokens, LoRA adapter and salt; all else that tells KV from other KV is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmcache_core.connectors.sglang.arguments import counted, weights_elsewhere
from lmcache_core.connectors.weights import adapter_digest, checkpoint_digest, nobody_elses
from lmcache_core.errors import LayoutError
from lmcache_core.keys import Field, digest_fields
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace

__all__ = [
    "LAYOUTS",
    "adapters_of",
    "config_digest",
    "describe_pool",
    "describe_sidecar",
    "flat_order",
    "refusals",
    "weights_of",
]

log = logging.getLogger(__name__)

HEADS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
LATENT = ("MLATokenToKVPoolHost",)
SIDECARS = {"swa": "MHATokenToKVPoolHost", "mamba": "MambaPoolHost"}
"""Pools besides the KV that are supported, and their classes."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def refusals(storage: Any, pool: Any) -> Iterator[str]:
    """Why an engine with this storage configuration and this host pool cannot use the cache."""
    kind = type(pool).__name__
    if kind not in (*HEADS, *LATENT):
        yield f"its host pool is a {kind}, which is not supported yet"
        return
    if pool.layout not in LAYOUTS:
        yield f"--hicache-mem-layout {pool.layout} is not supported; use one of {', '.join(LAYOUTS)}"
    if getattr(storage, "pp_size", 1) > 1:
        yield "pipeline parallelism is not supported yet; use --pp-size 1"
    if getattr(storage, "attn_cp_size", 1) > 1:
        yield "context parallelism of attention is not supported yet; use --attn-cp-size 1"
    if getattr(storage, "dcp_size", 1) > 1:
        yield "decode context parallelism is not supported yet"
    if getattr(storage, "should_split_heads", False):
        yield "pages split by heads are not supported; leave tp_lcm_size out"
    if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
        yield "layers of a draft model in the same pool are not supported yet"
    if getattr(pool, "storage_format_tag", None) is not None:
        yield f"the page format {pool.storage_format_tag!r} is not supported yet"


def describe_pool(
    storage: Any, pool: Any, *, page_bytes: int, buffers: int, weights: str, config: str, model_name: str
) -> Namespace:
    """The namespace of what one rank keeps in its host pool.

    Args:
        storage: SGLang's `HiCacheStorageConfig`.
        pool: Its host pool.
        page_bytes: Of a page, in all its buffers.
        buffers: How many those are.
        weights: What stands for the weights.
        config: Digest of the settings that change numbers.
        model_name: For people.

    Raises:
        LayoutError: It cannot be cached; the message says why.
    """
    for reason in refusals(storage, pool):
        raise LayoutError(f"lmcache-core cannot be used with this engine: {reason}")
    layers = int(pool.layer_num)
    if page_bytes % layers:
        raise LayoutError(f"lmcache-core cannot be used with this engine: {page_bytes} bytes a page of {layers} layers")
    latent = type(pool).__name__ in LATENT
    heads, size, planes = 1, 0, 1
    if latent:
        size = int(pool.kv_cache_dim)
    else:
        heads, size, planes = int(pool.head_num), int(pool.head_dim), 2
        if pool.v_head_dim != pool.head_dim:
            size, planes = size + int(pool.v_head_dim), 1
    first = int(getattr(pool, "start_layer", 0) or 0)
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(first, first + layers)),
        page_layer_bytes=page_bytes // layers,
        dtype=str(pool.dtype).removeprefix("torch."),
        kv_heads=heads,
        head_size=size,
        planes=planes,
        name="latents" if latent else "attention",
    )
    # Of a latent all ranks hold the same. Else each rank's heads are in a namespace of their own.
    rank = "all ranks" if latent else f"rank {storage.tp_rank} of {storage.tp_size}"
    return Namespace(
        weights=weights,
        groups=(group,),
        page_tokens=int(pool.page_size),
        encoding=Encoding(
            layout="native",
            engine="sglang",
            backend=f"{pool.layout} {buffers}",
            block_tokens=int(pool.page_size),
            strides=(1,),
        ),
        config=digest_fields("lmcache-core sglang rank 1", {"config": config, "rank": rank}).hex(),
        model_name=model_name,
    )


def describe_sidecar(storage: Any, pool: Any, name: str, *, sizes: Sequence[int], kv: Namespace) -> Namespace:
    """The namespace of what one rank keeps in a pool besides the KV: pages that stand for themselves.

    Args:
        storage: SGLang's `HiCacheStorageConfig`.
        pool: The host pool.
        name: What SGLang calls it.
        sizes: Bytes of a page, in each of its buffers.
        kv: The namespace of the KV that belongs to it.

    Raises:
        LayoutError: It cannot be cached; the message says why.
    """
    kind = type(pool).__name__
    if SIDECARS.get(name) != kind:
        raise LayoutError(
            f"lmcache-core cannot be used with this engine: it has a host pool {name!r} ({kind}) besides the KV, which "
            "is not supported yet"
        )
    layers = getattr(pool, "layer_num", None)
    drafts: Sequence[Any] = getattr(pool, "mtp_draft_buffer_infos", ())
    if getattr(pool, "target_layer_num", layers) != layers or drafts:
        raise LayoutError(
            f"lmcache-core cannot be used with this engine: layers of a draft model in the host pool {name!r} are not "
            "supported yet"
        )
    latent = storage.is_mla_model and name != "mamba"
    fields: dict[str, Field] = {
        "kv": kv.content + kv.encoding_digest,
        "name": name,
        "sizes": tuple(sizes),
        "rank": "all ranks" if latent else f"rank {storage.tp_rank} of {storage.tp_size}",
    }
    for trait in ("dtype", "conv_dtype", "temporal_dtype", "head_num", "head_dim", "v_head_dim", "layout"):
        fields[trait] = str(getattr(pool, trait, None))
    for trait in ("layer_num", "num_mamba_layers", "start_layer", "conv_state_shapes", "temporal_state_shape"):
        fields[trait] = str(getattr(pool, trait, None))
    group = Group(
        kind=GroupKind.STATE,
        layers=(0,),
        page_layer_bytes=sum(sizes),
        dtype=str(pool.dtype).removeprefix("torch."),
        kv_heads=0,
        head_size=0,
        planes=1,
        name=name,
    )
    return Namespace(
        weights=kv.weights,
        groups=(group,),
        page_tokens=kv.page_tokens,
        encoding=kv.encoding,
        config=digest_fields("lmcache-core sglang pool 1", fields).hex(),
        model_name=kv.model_name,
    )


def flat_order(pool: Any) -> list[int] | None:
    """In which order the buffers of a page lie in SGLang's flat copies of it: the i-th buffer is part `order[i]` of the
    copy. None where they lie as in the pool."""
    if type(pool).__name__ in HEADS and pool.layout == "layer_first":
        layers = int(pool.layer_num)  # the pool says K0 V0 K1 V1 ..., a copy has K0 K1 ... V0 V1 ...
        return [plane * layers + layer for layer in range(layers) for plane in (0, 1)]
    return None


def weights_of(arguments: Any, weights_id: str = "", own: Callable[[], str] = nobody_elses) -> str:
    """What stands for the engine's weights: what the user says, else a digest of the checkpoint's files. Weights that
    were made up, or whose files are not all to be seen here, are nobody else's.

    Args:
        arguments: SGLang's server arguments.
        weights_id: What the user says.
        own: Makes what stands for weights that only this engine has.

    Raises:
        LayoutError: The files can't be read.
    """
    if weights_id:
        return f"id {weights_id}"
    if str(getattr(arguments, "load_format", "auto")) == "dummy":
        return own()
    elsewhere = weights_elsewhere(arguments)
    if elsewhere:
        log.warning(
            "weights are not those of the checkpoint alone (%s): this engine's KV is found by no other, nor after a "
            "restart; name the weights with weights_id if they are always the same",
            elsewhere,
        )
        return own()
    folder = getattr(arguments, "download_dir", None)
    return checkpoint_digest(str(arguments.model_path), getattr(arguments, "revision", None), folder)


def config_digest(arguments: Any) -> str:
    """Digest of the settings that change numbers, besides those in the checkpoint's files. How attention is computed
    isn't one.

    Raises:
        LayoutError: A LoRA adapter, or a file that an argument names, cannot be read.
    """
    fields: dict[str, Field] = dict(counted(arguments))
    fields |= {f"adapter {name}": digest for name, digest in adapters_of(arguments).items()}
    return digest_fields("lmcache-core sglang config 2", fields).hex()


def adapters_of(arguments: Any) -> dict[str, str]:
    """Digests of the LoRA adapters that SGLang is started with, by name: in its hashes they are known by name and path
    alone. Those that are loaded later have an id that no other has.

    Raises:
        LayoutError: One cannot be read.
    """
    found = {}
    paths: Any = getattr(arguments, "lora_paths", None) or ()
    name: Any
    path: Any
    for each in paths.items() if isinstance(paths, dict) else paths:
        if isinstance(each, str):
            name, _, path = each.rpartition("=")
        elif isinstance(each, tuple):
            name, path = each
        elif isinstance(each, dict):
            name, path = each.get("lora_name"), each.get("lora_path")
        else:
            name, path = getattr(each, "lora_name", ""), getattr(each, "lora_path", None)
        found[str(name or path)] = adapter_digest(str(path))
    return found
