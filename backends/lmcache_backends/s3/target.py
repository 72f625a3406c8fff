"""Which bucket of which server, and how requests name it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from lmcache_backends.s3.options import EXPRESS_SUFFIX, S3Options

__all__ = ["Target"]


class Target(NamedTuple):
    """A bucket, with all that the options left open."""

    bucket: str
    region: str
    endpoint: str
    """URL of the server, without the bucket."""
    own: bool
    """Whether the endpoint was written by somebody, and is not Amazon's."""
    virtual: bool
    """Whether the host of a request names the bucket."""
    prefix: str

    @classmethod
    def of(cls, options: S3Options, region: str, endpoint: str) -> Target:
        """The target of options, with the region and endpoint of the environment where they have none."""
        bucket = options.place_name()
        written = (options.endpoint or endpoint).rstrip("/")
        virtual = options.addressing == "virtual"
        if options.addressing == "auto":
            virtual = not written and "." not in bucket  # a certificate's wildcard stands for no dots
        return cls(bucket, region, written or _amazon(bucket, region), bool(written), virtual, options.key_prefix())

    @property
    def url(self) -> str:
        """Where requests are sent."""
        if not self.virtual:
            return self.endpoint
        parts = urlsplit(self.endpoint)
        return f"{parts.scheme}://{self.bucket}.{parts.netloc}"

    @property
    def place(self) -> str:
        """For people."""
        return f"bucket {self.bucket} at {self.endpoint}"

    @property
    def objects(self) -> str:
        """The objects, as a policy names them."""
        return f"arn:aws:s3:::{self.bucket}/{self.prefix}*"


def _amazon(bucket: str, region: str) -> str:
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    if bucket.endswith(EXPRESS_SUFFIX):
        zone = bucket.removesuffix(EXPRESS_SUFFIX).rpartition("--")[2]
        return f"https://s3express-{zone}.{region}.{domain}"
    return f"https://s3.{region}.{domain}"
