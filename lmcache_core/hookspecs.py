"""Every hook a plugin may implement.

A plugin is a module (or object) named in one of two entry-point groups, `lmcache_core.backends` and
`lmcache_core.transfers`. The entry point's name is the name in the YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import msgspec

    from lmcache_core.protocols import StorageBackend, Transfer

PROJECT = "lmcache_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def lmcache_backend_options() -> type[msgspec.Struct]:
    """The options of this backend: a `msgspec.Struct` type with `forbid_unknown_fields=True`. Its fields are the keys
    a user may write beside `backend:` in the YAML; field docstrings or `msgspec.Meta(description=...)` document them.
    `ByteSize` and `Duration` of `lmcache_core.units` accept values with units.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def lmcache_create_backend(options: Any) -> StorageBackend:
    """Return a backend that is not opened yet. `options` is an instance of the type that `lmcache_backend_options`
    returned, validated. Must not do I/O.

    Raises:
        ConfigError: The options contradict each other; the message says what to change.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def lmcache_create_transfer(options: Mapping[str, Any]) -> Transfer:
    """Return a transfer: what describes and copies an engine's KV on one kind of device.

    Raises:
        ConfigError: The options contradict each other; the message says what to change.
    """
    raise AssertionError("a specification is never called")
