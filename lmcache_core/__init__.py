"""A KV-cache layer for LLM inference engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.cache import AsyncCache, Cache, Lookup, Prompt, Retrieved, StoreResult
    from lmcache_core.errors import (
        BackendError,
        ClosedError,
        ConfigError,
        FrameError,
        LayoutError,
        LMCacheError,
        PluginError,
        PoolError,
        UsageError,
    )
    from lmcache_core.keys import make_seed, page_extras, page_keys
    from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace
    from lmcache_core.protocols import KVView, StorageBackend

__version__ = "0.1.0"

__all__ = [
    "AsyncCache",
    "BackendError",
    "Cache",
    "ClosedError",
    "ConfigError",
    "Encoding",
    "FrameError",
    "Group",
    "GroupKind",
    "KVView",
    "LMCacheError",
    "LayoutError",
    "Lookup",
    "Namespace",
    "PluginError",
    "PoolError",
    "Prompt",
    "Retrieved",
    "StorageBackend",
    "StoreResult",
    "UsageError",
    "__version__",
    "make_seed",
    "page_extras",
    "page_keys",
]

_HOMES = {
    "cache": ("AsyncCache", "Cache", "Lookup", "Prompt", "Retrieved", "StoreResult"),
    "errors": (
        "BackendError",
        "ClosedError",
        "ConfigError",
        "FrameError",
        "LMCacheError",
        "LayoutError",
        "PluginError",
        "PoolError",
        "UsageError",
    ),
    "keys": ("make_seed", "page_extras", "page_keys"),
    "namespace": ("Encoding", "Group", "GroupKind", "Namespace"),
    "protocols": ("KVView", "StorageBackend"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: an engine that imports us pays for what it uses."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
