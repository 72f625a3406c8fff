"""The backend: objects of a bucket."""

from __future__ import annotations

from lmcache_backends.objects.backend import ObjectBackend
from lmcache_backends.s3.options import S3Options
from lmcache_backends.s3.service import S3Service

__all__ = ["S3Backend"]


class S3Backend(ObjectBackend):
    """Chunks as objects of a bucket of S3, or of a server that speaks its protocol."""

    def __init__(self, options: S3Options) -> None:
        super().__init__(options, lambda: S3Service(options))
