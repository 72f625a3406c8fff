"""What a user may write beside `backend: s3`."""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from lmcache_backends.objects.options import ObjectOptions, shown
from lmcache_core.units import Secret

__all__ = ["EXPRESS_SUFFIX", "S3Options"]

EXPRESS_SUFFIX = "--x-s3"
"""How the name of every directory bucket ends, and of no other."""

_SECRETS = frozenset({"secret_key", "session_token"})


class S3Options(ObjectOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a bucket.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    door: ClassVar[str] = "s3"
    scheme: ClassVar[str] = "s3"
    holder: ClassVar[str] = "bucket"
    allowed: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
    example: ClassVar[str] = "https://minio.local:9000"

    bucket: str
    """Name of the bucket, or `s3://bucket/prefix`. It must exist."""
    endpoint: str = ""
    """URL of the server, such as `https://minio.local:9000`. Without one the environment's `AWS_ENDPOINT_URL_S3` or
    `AWS_ENDPOINT_URL`, else Amazon's of the region."""
    region: str = ""
    """Region of the bucket. Without one that of the environment or the profile, else `us-east-1`."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where a request names the bucket: in the URL's path, or in its host (`virtual`). `auto` is `virtual` on Amazon
    and `path` on an endpoint of your own."""
    profile: str = ""
    """Profile of `~/.aws/config` and `~/.aws/credentials` that says who we are."""
    access_key: str = ""
    """Access key. Without one: environment, files, web identity, container or instance role, in the order of the AWS
    tools; what expires is renewed."""
    secret_key: Secret = ""
    """The secret that belongs to `access_key`; best as `${env:NAME}` or `${file:/path}`."""
    session_token: Secret = ""
    """The token of a temporary `access_key`."""
    express: Literal["auto", "always", "never"] = "auto"
    """Use the sessions of S3 Express (directory buckets). `auto` does where the bucket's name ends in `--x-s3`."""
    checksum: Literal["crc", "sha256", "none"] = "crc"
    """Checksum that the server compares a written object with: CRC64NVME (CRC32 on S3 Express), SHA-256, or none."""
    storage_class: str = ""
    """Storage class of new objects, such as `INTELLIGENT_TIERING`. Without one the bucket's."""
    encryption: Literal["bucket", "AES256", "aws:kms"] = "bucket"
    """How the server encrypts new objects: as the bucket says, or by a header in each request."""
    kms_key: str = ""
    """Key for `encryption: aws:kms`. Without one the account's own for S3."""

    def __post_init__(self) -> None:
        self.check()
        self.check_url(self.endpoint)
        self._check_credentials()
        if self.kms_key and self.encryption != "aws:kms":
            raise self.refused("kms_key", "kms_key is for `encryption: aws:kms`; write that too, or delete it")
        if self.addressing == "virtual" and _is_address(self.endpoint):
            problem = "virtual puts the bucket in front of a host's name, and the endpoint has an address; write path"
            raise self.refused("addressing", problem)
        if self.is_express() and self.checksum == "sha256":
            raise self.refused("checksum", "sha256 is not computed for S3 Express; write crc or none")

    def __repr__(self) -> str:
        return shown(self, _SECRETS)

    def is_express(self) -> bool:
        """Whether the bucket is a directory bucket of S3 Express."""
        return self.express == "always" or (self.express == "auto" and self.place_name().endswith(EXPRESS_SUFFIX))

    def _check_credentials(self) -> None:
        for present, absent in (("access_key", "secret_key"), ("secret_key", "access_key")):
            if getattr(self, present) and not getattr(self, absent):
                raise self.refused(present, f"{present} needs {absent} beside it; write both or neither")
        if self.session_token and not self.access_key:
            raise self.refused("session_token", "session_token belongs to an access_key; write that too")
        if self.profile and self.access_key:
            raise self.refused("profile", "profile and access_key both say who we are; write one of the two")


def _is_address(url: str) -> bool:
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True
