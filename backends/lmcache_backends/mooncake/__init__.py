"""Chunks in the memory of many hosts, put together by a Mooncake Store."""

from __future__ import annotations

import msgspec

from lmcache_backends.mooncake.backend import MooncakeBackend
from lmcache_backends.mooncake.options import MooncakeOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["MooncakeBackend", "MooncakeOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return MooncakeOptions


@hookimpl
def lmcache_create_backend(options: MooncakeOptions) -> StorageBackend:
    return MooncakeBackend(options)
