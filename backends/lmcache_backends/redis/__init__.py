"""Chunks in Redis or Valkey: one value a chunk, read straight into the node's memory and written straight from it."""

from __future__ import annotations

import msgspec

from lmcache_backends.redis.backend import RedisBackend
from lmcache_backends.redis.options import RedisOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["RedisBackend", "RedisOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return RedisOptions


@hookimpl
def lmcache_create_backend(options: RedisOptions) -> StorageBackend:
    return RedisBackend(options)
