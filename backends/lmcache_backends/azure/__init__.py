"""Chunks as blobs of a container of Azure Blob Storage."""

from __future__ import annotations

import msgspec

from lmcache_backends.azure.backend import AzureBackend
from lmcache_backends.azure.options import AzureOptions
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["AzureBackend", "AzureOptions", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return AzureOptions


@hookimpl
def lmcache_create_backend(options: AzureOptions) -> StorageBackend:
    return AzureBackend(options)
