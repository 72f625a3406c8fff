"""The backend: objects of a bucket, and what the service says of them."""

from __future__ import annotations

from lmcache_backends.gcs.options import GcsOptions
from lmcache_backends.objects.backend import ObjectBackend
from lmcache_backends.objects.faults import NO_CREDENTIALS, Dialect
from lmcache_backends.objects.service import ObstoreService

__all__ = ["DIALECT", "GcsBackend"]

_UNKNOWN = "the server does not accept who we are; correct credentials or token, or see to the account of this host"

DIALECT = Dialect(
    door="gcs",
    server="Google Cloud Storage",
    absent="NoSuchKey",
    gone="NoSuchBucket",
    never={
        "NoSuchBucket": "there is no such bucket; create it, or correct bucket",
        "InvalidBucketName": "the server takes no bucket of this name; correct bucket",
        "AccessDenied": "access is denied; give who signs in the role roles/storage.objectUser on the bucket",
        "AuthenticationRequired": _UNKNOWN,
        "InvalidAuthentication": _UNKNOWN,
        "InvalidSecurity": _UNKNOWN,
        "AccountProblem": "the account of the bucket cannot be used; see to its billing",
        "UserProjectAccountProblem": "the project's account cannot be used; see to its billing",
        "UserProjectMissing": "the bucket lets who asks pay, which is not supported; use another bucket",
    },
    now={
        NO_CREDENTIALS: "no credentials can be had now; write credentials, or see to the account of this host",
        "SlowDown": "the server asks for fewer requests; lower connections, or wait until it has spread the bucket",
        "BadDigest": "what arrived at the server is not what was sent; look at the network in between",
    },
)


class GcsBackend(ObjectBackend):
    """Chunks as objects of a bucket."""

    def __init__(self, options: GcsOptions) -> None:
        super().__init__(options, lambda: ObstoreService(options, options.url(), DIALECT))
