"""Host pages in the layout that engines of different kinds share: converted as they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from lmcache_core.assembly import Source
from lmcache_core.config import Config, LoadedConfig, load_config
from lmcache_core.connectors.canonical import canonical_namespace, canonical_refusals
from lmcache_core.connectors.sglang.arguments import FILES, NUMBERS, changed
from lmcache_core.connectors.weights import checkpoint_config
from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Namespace
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, RegisteredKV, Transfer

__all__ = ["SharedPages", "by_layer", "check_settings", "describe_shared", "not_shared"]

APART = tuple(
    sorted(
        {*NUMBERS, *FILES}
        - {"context_length", "dtype", "enable_lora", "json_model_override_args", "kt_method", "kv_cache_dtype"}
        - {"load_format", "model_config_parser", "model_impl", "quantization", "enable_tf32_matmul"}
    )
)
"""Arguments by which KV is another one than that of other engines, and that nothing else here looks at."""
FORMATS = ("auto", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors", "instanttensor")
"""Ways to load a checkpoint's weights as they are."""


def by_layer(pool: Any) -> list[tuple[Any, Any]]:
    """K and V of each layer of a host pool of heads, as `[page, token, head, dim]`, whatever its layout.

    Raises:
        LayoutError: It is one of another layout.
    """
    kv, layers, tokens = pool.kv_buffer, int(pool.layer_num), int(pool.page_size)
    heads, size = int(pool.head_num), int(pool.head_dim)
    if pool.layout == "layer_first":
        paged = kv.view(2, layers, -1, tokens, heads, size)
        return [(paged[0, layer], paged[1, layer]) for layer in range(layers)]
    if pool.layout == "page_first":
        paged = kv.view(2, -1, tokens, layers, heads, size)
        return [(paged[0, :, :, layer], paged[1, :, :, layer]) for layer in range(layers)]
    if pool.layout == "page_first_direct":
        return [(kv[0, :, layer], kv[1, :, layer]) for layer in range(layers)]
    if pool.layout == "page_head":
        return [
            (kv[0, :, :, :, layer].transpose(1, 2), kv[1, :, :, :, layer].transpose(1, 2)) for layer in range(layers)
        ]
    raise LayoutError(f"layout: canonical cannot be had of a host pool of the layout {pool.layout}")


class SharedPages:
    """All pages of a host pool, to be copied by their numbers. As `HostPages`, in the layout that engines share.

    Args:
        pool: SGLang's.

    Raises:
        LayoutError: They lie in a way that cannot be copied.
        PluginError: There is no transfer for host memory.
    """

    def __init__(self, pool: Any) -> None:
        layers = by_layer(pool)
        transfer: Transfer = load_transfer("cpu").create({})
        tokens = int(pool.page_size)
        self._kv: RegisteredKV = transfer.register(
            layers, dims="bthd", page_tokens=tokens, block_tokens=tokens, layout="canonical"
        )
        self.pages = int(layers[0][0].shape[0])
        self.page_bytes = self._kv.page_layer_bytes * len(layers)

    def view(self, numbers: Sequence[int] | NDArray[Any]) -> KVView:
        """Pages by their numbers, as the pages of a prompt.

        Raises:
            LayoutError: There is no such page.
        """
        return self._kv.view(numbers)


def not_shared(storage: Any, pool: Any, arguments: Any, *, sidecars: bool) -> Iterator[str]:
    """Why KV of this engine cannot be had in the layout that engines of other kinds share.

    Args:
        storage: SGLang's `HiCacheStorageConfig`.
        pool: Its host pool of KV.
        arguments: SGLang's server arguments.
        sidecars: Whether there are other pools besides.

    Raises:
        LayoutError: The model's configuration cannot be read.
    """
    for option in changed(arguments, APART):
        yield f"{option}, by which this engine computes something else than others"
    if str(getattr(arguments, "load_format", "auto")) not in FORMATS:
        yield f"--load-format {arguments.load_format}, which may change weights; use one of {', '.join(FORMATS)}"
    model = checkpoint_config(
        str(arguments.model_path), getattr(arguments, "revision", None), getattr(arguments, "download_dir", None)
    )
    heads = type(pool).__name__ == "MHATokenToKVPoolHost" and pool.v_head_dim == pool.head_dim
    dtype = str(pool.dtype).removeprefix("torch.")
    asked = str(getattr(arguments, "dtype", "auto"))
    aliases = {"half": "float16", "float": "float32"}
    yield from canonical_refusals(
        dtype=dtype if asked == "auto" else aliases.get(asked, asked),
        kv_dtype=dtype,
        quantization=getattr(arguments, "quantization", None) or _quantized(model),
        overridden=str(getattr(arguments, "json_model_override_args", None) or "{}").strip() != "{}",
        ranks=int(storage.tp_size),
        attention=heads and not sidecars,
        multimodal=bool(getattr(arguments, "enable_multimodal", False)),
        drafts=bool(getattr(arguments, "speculative_algorithm", None)),
        adapters=bool(getattr(arguments, "lora_paths", None)),
        model=model,
    )


def _quantized(model: Mapping[str, Any]) -> str:
    """By what a checkpoint's weights are quantized."""
    said = model.get("quantization_config") or model.get("compression_config")
    return str(said.get("quant_method", "its checkpoint")) if isinstance(said, Mapping) else ""


def check_settings(source: Source, page_tokens: int, lacking: Sequence[str]) -> None:
    """Refuse settings by which nothing would be shared, though nothing fails.

    Args:
        source: The cache's configuration.
        page_tokens: Tokens of a page of SGLang.
        lacking: What SGLang's extra configuration lacks for telling where a run of pages begins.

    Raises:
        LayoutError: That is not told, or pages are not those that all engines are to have.
        ConfigError: The configuration can't be used.
    """
    if lacking:
        raise LayoutError(
            f"layout: canonical needs {' and '.join(lacking)} in the extra configuration; without it nothing would be "
            "found that another engine has stored"
        )
    if isinstance(source, Config | LoadedConfig):
        return
    loaded = load_config(source)
    pages = loaded.config.page_tokens
    if not loaded.config.connect and pages != page_tokens and loaded.provenance.source(("page_tokens",)) != "default":
        raise LayoutError(
            f"layout: canonical is of pages of one size in all engines: page_tokens is {pages}, and SGLang has pages "
            f"of {page_tokens} tokens; write page_tokens: {page_tokens} everywhere, or use --page-size {pages}"
        )


def describe_shared(pool: Any, *, weights: str, model_name: str) -> Namespace:
    """The namespace of a host pool's KV, as every engine describes it.

    Raises:
        LayoutError: Its sizes are none.
    """
    first = int(getattr(pool, "start_layer", 0) or 0)
    return canonical_namespace(
        weights=weights,
        layers=range(first, first + int(pool.layer_num)),
        kv_heads=int(pool.head_num),
        head_size=int(pool.head_dim),
        dtype=str(pool.dtype).removeprefix("torch."),
        page_tokens=int(pool.page_size),
        model_name=model_name,
    )
