"""What goes wrong with requests to S3, in words."""

from __future__ import annotations

from lmcache_backends.objects import faults
from lmcache_backends.objects.faults import Dialect, Fault
from lmcache_core.errors import BackendError, ConfigError

__all__ = ["ABSENT", "DIALECT", "lacks", "told"]

ABSENT = "NoSuchKey"
"""What the protocol says of an object that is not there."""

_MAY = "s3:GetObject, s3:PutObject and s3:DeleteObject on {objects}, and s3:ListBucket on the bucket"

DIALECT = Dialect(
    door="s3",
    server="S3 server",
    absent=ABSENT,
    gone="NoSuchBucket",
    never={
        "InvalidAccessKeyId": "the server does not know this access key; correct access_key, or the profile",
        "SignatureDoesNotMatch": "the secret does not belong to the access key; correct secret_key, or the profile",
        "InvalidToken": "the session token is not one of the access key; correct session_token",
        "NoSuchBucket": "there is no such bucket; create it, or correct bucket",
        "InvalidBucketName": "the server takes no bucket of this name; correct bucket",
        "AccessDenied": f"access is denied; allow {_MAY} (without that, what is absent looks denied)",
        "AllAccessDisabled": "access is denied to all; see who owns the bucket",
        "InvalidStorageClass": "the server has no such storage class; correct storage_class, or delete it",
        "InvalidObjectState": "objects are archived; use a storage class that can be read at once",
        "XAmzContentSHA256Mismatch": "the server wants payloads signed, which is not supported; use https",
    },
    now={
        "ExpiredToken": "the session token has expired; write a new one, or use a profile or role, whose are renewed",
        "TokenRefreshRequired": "the session token has expired; write a new one",
        "RequestTimeTooSkewed": "the clock of this host or of the server is wrong; set it",
        "BadDigest": "what arrived at the server is not what was sent; look at the network in between",
        "SlowDown": "the server asks for fewer requests; lower connections, or spread over more prefixes",
    },
)


def told(fault: Fault, place: str, objects: str, *, opening: bool = False) -> BackendError | ConfigError:
    """The error to raise for a fault at `place`; when `opening`, a `ConfigError` for what can never work."""
    kind = ConfigError if opening else BackendError
    if fault.elsewhere:
        told = f"the bucket is in region {fault.region}; write region: {fault.region}" if fault.region else (
            "the bucket is in another region; write it as region"
        )  # fmt: skip
        return kind(f"s3: {place}: {told}")
    if fault.code.startswith("KMS."):
        advice = f"the key of the encryption cannot be used ({fault.code}); correct kms_key, or allow its use"
        return kind(f"s3: {place}: {advice}")
    return faults.told(fault, DIALECT, place, objects, opening=opening)


def lacks(library: str, error: ImportError) -> ConfigError:
    """The error for a library that cannot be imported."""
    return faults.lacks("s3", library, error)
