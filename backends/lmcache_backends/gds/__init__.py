"""Chunks as files that KvikIO moves, to and from a device's memory too: by GPUDirect Storage where there is such."""

from __future__ import annotations

import msgspec

from lmcache_backends.gds.backend import GdsBackend
from lmcache_backends.gds.options import GdsOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["GdsBackend", "GdsOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return GdsOptions


@hookimpl
def lmcache_create_backend(options: GdsOptions) -> StorageBackend:
    return GdsBackend(options)
