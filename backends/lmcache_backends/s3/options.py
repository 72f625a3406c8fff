"""What a user may write beside `backend: s3`."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.units import ByteSize, Duration, Secret, format_size

__all__ = ["EXPRESS_SUFFIX", "S3Options"]

EXPRESS_SUFFIX = "--x-s3"
"""How the name of every directory bucket ends, and of no other."""

_SMALLEST_PART = 64 * 2**10
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", re.ASCII)
_LONGEST_PREFIX = 512
_SECRETS = frozenset({"secret_key", "session_token"})


class S3Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a bucket.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    bucket: str
    """Name of the bucket, or `s3://bucket/prefix`. It must exist."""
    prefix: str = ""
    """What the names of all objects begin with, to share a bucket with others."""
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
    verify: bool = True
    """Check the server's certificate. Without it anybody on the way can read and change everything."""
    ca_file: str = ""
    """File with the certificates (PEM) of an authority of your own, trusted beside the usual ones."""
    express: Literal["auto", "always", "never"] = "auto"
    """Use the sessions of S3 Express (directory buckets). `auto` does where the bucket's name ends in `--x-s3`."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Requests under way at once, and connections that are kept for them."""
    part: ByteSize = 8 * 2**20
    """Larger chunks are read in several requests at once, each of this size. Each is billed."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    """How often a request is repeated that failed in a way that may pass: after a random time, at most 50ms before the
    first and twice as much before each further one."""
    retry_budget: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 100
    """Repetitions of all requests together before failures are not repeated any more; ten requests that succeed give
    one back. Keeps a server that is overloaded from being asked even more."""
    connect_timeout: Duration = 2.0
    """Time to connect in."""
    stall_timeout: Duration = 10.0
    """Time without a byte after which a request has failed."""
    request_timeout: Duration = 30.0
    """Time for a whole request. The tier's `read_timeout` and `write_timeout` hold for all requests of a call."""
    conditional: bool = True
    """Write only what is absent (`If-None-Match: *`), and replace what turns out to be something else. Servers that
    refuse the header are written to without."""
    checksum: Literal["crc", "sha256", "none"] = "crc"
    """Checksum that the server compares a written object with: CRC64NVME (CRC32 on S3 Express), SHA-256, or none."""
    storage_class: str = ""
    """Storage class of new objects, such as `INTELLIGENT_TIERING`. Without one the bucket's."""
    encryption: Literal["bucket", "AES256", "aws:kms"] = "bucket"
    """How the server encrypts new objects: as the bucket says, or by a header in each request."""
    kms_key: str = ""
    """Key for `encryption: aws:kms`. Without one the account's own for S3."""

    def __post_init__(self) -> None:
        self.bucket_name()
        self.key_prefix()
        self._check_link()
        self._check_credentials()
        if self.part < _SMALLEST_PART:
            size, least = format_size(self.part), format_size(_SMALLEST_PART)
            raise InvalidSetting(("part",), f"s3: part {size} is too small; write {least} or more, as in 8MiB")
        if self.kms_key and self.encryption != "aws:kms":
            raise InvalidSetting(("kms_key",), "s3: kms_key is for `encryption: aws:kms`; write that too, or delete it")
        if self.is_express() and self.checksum == "sha256":
            raise InvalidSetting(("checksum",), "s3: sha256 is not computed for S3 Express; write crc or none")

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={'***' if name in _SECRETS and value else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    def bucket_name(self) -> str:
        """The bucket, without what stands around it in a URL."""
        name, _, _ = self.bucket.removeprefix("s3://").partition("/")
        if not _BUCKET.fullmatch(name):
            problem = f"s3: bucket {self.bucket!r} is no name of a bucket; write its name, or s3://name/prefix"
            raise InvalidSetting(("bucket",), problem)
        return name

    def key_prefix(self) -> str:
        """What the names of all objects begin with: empty, or ending in a slash."""
        _, _, behind = self.bucket.removeprefix("s3://").partition("/")
        field, written = ("bucket", behind) if behind.strip("/") else ("prefix", self.prefix)
        if behind.strip("/") and self.prefix.strip("/"):
            raise InvalidSetting(("prefix",), "s3: bucket has a prefix already; write one of the two")
        prefix = written.strip("/")
        if not prefix:
            return ""
        parts = prefix.split("/")
        if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(parts) or len(prefix) > _LONGEST_PREFIX:
            raise InvalidSetting(
                (field,),
                f"s3: prefix {prefix[:80]!r} is not possible; write names of letters, digits, '.', '_' and '-' with "
                f"single slashes between them, at most {_LONGEST_PREFIX} characters",
            )
        return f"{prefix}/"

    def is_express(self) -> bool:
        """Whether the bucket is a directory bucket of S3 Express."""
        return self.express == "always" or (self.express == "auto" and self.bucket_name().endswith(EXPRESS_SUFFIX))

    def _check_link(self) -> None:
        if self.endpoint:
            problem = f"s3: endpoint {self.endpoint!r} is no URL of a server; write it as in https://minio.local:9000"
            try:
                url = urlsplit(self.endpoint)
                known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
            except ValueError:
                known = False
            if not known or url.username or url.query or url.fragment:
                raise InvalidSetting(("endpoint",), problem)
            if url.path.strip("/"):
                problem = (
                    f"s3: endpoint has a path, {url.path!r}; write only scheme, host and port, and the bucket apart"
                )
                raise InvalidSetting(("endpoint",), problem)
        if self.ca_file and not self.verify:
            raise InvalidSetting(("ca_file",), "s3: `verify: false` checks no certificate; delete it or ca_file")
        for name in ("connect_timeout", "stall_timeout", "request_timeout"):
            if getattr(self, name) <= 0:
                raise InvalidSetting((name,), f"s3: {name} must be longer than 0; write for example 2s")

    def _check_credentials(self) -> None:
        for present, absent in (("access_key", "secret_key"), ("secret_key", "access_key")):
            if getattr(self, present) and not getattr(self, absent):
                raise InvalidSetting((present,), f"s3: {present} needs {absent} beside it; write both or neither")
        if self.session_token and not self.access_key:
            raise InvalidSetting(("session_token",), "s3: session_token belongs to an access_key; write that too")
        if self.profile and self.access_key:
            raise InvalidSetting(("profile",), "s3: profile and access_key both say who we are; write one of the two")
