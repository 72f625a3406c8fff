"""Configuration: typed settings, read from YAML, the environment and files.

The structs are at hand at once. What reads and explains them is imported on first use, because it needs a YAML parser
and the plugins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lmcache_core.config.structs import (
    BreakerConfig,
    CipherConfig,
    Config,
    CpuConfig,
    MetricsConfig,
    ShareConfig,
    TierConfig,
)

if TYPE_CHECKING:
    from lmcache_core.config.conversion import InvalidSetting, convert
    from lmcache_core.config.fields import Field, fields_of
    from lmcache_core.config.json_schema import schema
    from lmcache_core.config.loading import InvalidConfig, LoadedConfig, load_config
    from lmcache_core.config.masking import MaskedText, mask_url
    from lmcache_core.config.migration import Migration, Note, migrate
    from lmcache_core.config.provenance import Provenance, Setting, show
    from lmcache_core.config.rules import check

__all__ = [
    "BreakerConfig",
    "CipherConfig",
    "Config",
    "CpuConfig",
    "Field",
    "InvalidConfig",
    "InvalidSetting",
    "LoadedConfig",
    "MaskedText",
    "MetricsConfig",
    "Migration",
    "Note",
    "Provenance",
    "Setting",
    "ShareConfig",
    "TierConfig",
    "check",
    "convert",
    "fields_of",
    "load_config",
    "mask_url",
    "migrate",
    "schema",
    "show",
]

_HOMES = {
    "Field": "fields",
    "InvalidConfig": "loading",
    "InvalidSetting": "conversion",
    "LoadedConfig": "loading",
    "MaskedText": "masking",
    "Migration": "migration",
    "Note": "migration",
    "Provenance": "provenance",
    "Setting": "provenance",
    "check": "rules",
    "convert": "conversion",
    "fields_of": "fields",
    "load_config": "loading",
    "mask_url": "masking",
    "migrate": "migration",
    "schema": "json_schema",
    "show": "provenance",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
