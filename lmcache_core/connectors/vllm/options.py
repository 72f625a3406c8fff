"""What a user may write in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from lmcache_core.config.conversion import convert
from lmcache_core.config.environment import FILE_VARIABLE
from lmcache_core.errors import ConfigError
from lmcache_core.units import Duration

__all__ = ["PARAMETERS", "Options", "RequestOptions", "read_options", "read_request_options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector. A field's docstring is its documentation everywhere."""

    config: Any = None
    """The cache's configuration: path of a YAML file, or the settings themselves as a mapping. By default the file that
    the environment variable `LMCACHE_CORE_CONFIG` names."""
    weights_id: str = ""
    """Text that stands for these weights and no others, instead of a digest of the checkpoint's files."""
    save_decode: bool = True
    """Store KV of generated tokens too, in whole chunks."""
    lazy_offload: bool = False
    """Store KV not when it has been computed, but shortly before the engine gives its blocks to others: little is in
    two memories, and other engines find it only then."""
    lazy_losses: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.01
    """With `lazy_offload`, the most of the engine's steps that may take blocks before they are stored; the fewer, the
    more is stored ahead."""
    sync_load: Duration = 0.025
    """A hit in host memory that is copied in less time than this is loaded within the step that needs it; others while
    the engine goes on with other requests. 0 for never within a step."""
    load_slice: Duration = 0.005
    """Time that loads may take of one step in which the engine computes for other requests."""
    load_timeout: Duration = 10.0
    """Time after which a load is given up and the rest computed."""
    layerwise: bool | None = None
    """Copy KV beside the engine, layer by layer: a layer is loaded while those in front of it are computed, and stored
    while those behind it are. By default where KV is on a GPU; false for all layers together."""
    transfer: dict[str, Any] | None = None
    """Options of what copies, for KV on a GPU: `device`, `max_blocks`, `staging`, `direct`."""
    past_host: bool = False
    """Read what lies on tiers of GPUDirect Storage straight into the GPU's memory. It is not kept in host memory
    then."""
    lookup_timeout: Duration = 2.0
    """Time that a request waits at most for tiers that cannot tell at once what they hold."""


PARAMETERS = "lmcache_core"
"""Key of our options in a request's `kv_transfer_params`."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may ask for, in `kv_transfer_params: {"lmcache_core": {...}}`."""

    load: bool = True
    """Whether KV may be loaded for it."""
    store: bool = True
    """Whether its KV is stored."""
    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most tokens of its prompt to load, from the start; what is behind them is computed."""
    tiers: list[str] | None = None
    """Tiers to load from, and to store to besides host memory; `cpu` for host memory. All by default."""


def read_request_options(parameters: Any) -> RequestOptions:
    """The options in a request's `kv_transfer_params`.

    Raises:
        ConfigError: One is unknown or not what it must be; the message says which and what to write.
    """
    if not isinstance(parameters, Mapping):
        return RequestOptions()
    written = parameters.get(PARAMETERS)
    if written is None:
        meant = difflib.get_close_matches(PARAMETERS, [str(key) for key in parameters], n=1, cutoff=0.8)
        if meant:
            raise ConfigError(f"kv_transfer_params: unknown key {meant[0]!r}; did you mean {PARAMETERS!r}?")
        return RequestOptions()
    try:
        return convert(written, RequestOptions)
    except ConfigError as error:
        raise ConfigError(f"kv_transfer_params: {PARAMETERS}: {error}") from error


def read_options(written: Mapping[str, Any]) -> Options:
    """The options in `kv_connector_extra_config`.

    Raises:
        ConfigError: One is unknown or not what it must be; the message says which and what to write.
    """
    try:
        options = convert(dict(written), Options)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
    if options.config == "" or isinstance(options.config, bool | int | float | list):
        raise ConfigError(
            f"kv_connector_extra_config.config: {options.config!r} is no configuration; write the path of a YAML file "
            f"or the settings as a mapping, or leave it out for the file that {FILE_VARIABLE} names"
        )
    return options
