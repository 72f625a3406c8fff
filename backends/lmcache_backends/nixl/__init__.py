"""Chunks as files that NIXL reads and writes by one of its plugins."""

from __future__ import annotations

import msgspec

from lmcache_backends.nixl.backend import NixlBackend
from lmcache_backends.nixl.options import NixlOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["NixlBackend", "NixlOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return NixlOptions


@hookimpl
def lmcache_create_backend(options: NixlOptions) -> StorageBackend:
    return NixlBackend(options)
