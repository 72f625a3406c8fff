"""What a user may write in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.units import Duration

__all__ = ["Options", "read_options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector. A field's docstring is its documentation everywhere."""

    config: Any = None
    """The cache's configuration: path of a YAML file, or the settings themselves as a mapping. By default the file that
    the environment variable `LMCACHE_CORE_CONFIG` names."""
    weights_id: str = ""
    """Text that stands for these weights and no others, instead of a digest of the checkpoint's files."""
    save_decode: bool = True
    """Store KV of generated tokens too, in whole chunks."""
    sync_load: Duration = 0.025
    """A hit in host memory that is copied in less time than this is loaded within the step that needs it; others while
    the engine goes on with other requests. 0 for never within a step."""
    load_slice: Duration = 0.005
    """Time that loads may take of one step in which the engine computes for other requests."""
    load_timeout: Duration = 10.0
    """Time after which a load is given up and the rest computed."""
    lookup_timeout: Duration = 2.0
    """Time that a request waits at most for tiers that cannot tell at once what they hold."""


def read_options(written: Mapping[str, Any]) -> Options:
    """The options in `kv_connector_extra_config`.

    Raises:
        ConfigError: One is unknown or not what it must be; the message says which and what to write.
    """
    try:
        return convert(dict(written), Options)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
