"""Chunks on a local disk: slabs that values are written to directly, and a log that says what lies where."""

from __future__ import annotations

import msgspec

from lmcache_backends.disk.backend import DiskBackend
from lmcache_backends.disk.options import DiskOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["DiskBackend", "DiskOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return DiskOptions


@hookimpl
def lmcache_create_backend(options: DiskOptions) -> StorageBackend:
    return DiskBackend(options)
