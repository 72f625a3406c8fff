"""Chunks as objects of a bucket of Google Cloud Storage."""

from __future__ import annotations

import msgspec

from lmcache_backends.gcs.backend import GcsBackend
from lmcache_backends.gcs.options import GcsOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["GcsBackend", "GcsOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return GcsOptions


@hookimpl
def lmcache_create_backend(options: GcsOptions) -> StorageBackend:
    return GcsBackend(options)
