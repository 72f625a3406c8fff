"""Chunks as objects of a bucket, of Amazon S3 or of any server that speaks its protocol."""

from __future__ import annotations

import msgspec

from lmcache_backends.s3.backend import S3Backend
from lmcache_backends.s3.options import S3Options
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import StorageBackend

__all__ = ["S3Backend", "S3Options", "lmcache_backend_options", "lmcache_create_backend"]


@hookimpl
def lmcache_backend_options() -> type[msgspec.Struct]:
    return S3Options


@hookimpl
def lmcache_create_backend(options: S3Options) -> StorageBackend:
    return S3Backend(options)
