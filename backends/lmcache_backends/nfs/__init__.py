"""Chunks on a file system that hosts share: a file each, there as a whole or not at all, swept by whoever is there."""

from __future__ import annotations

import msgspec

from lmcache_backends.nfs.backend import NfsBackend
from lmcache_backends.nfs.options import NfsOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["NfsBackend", "NfsOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return NfsOptions


@hookimpl
def lmcache_create_backend(options: NfsOptions) -> StorageBackend:
    return NfsBackend(options)
