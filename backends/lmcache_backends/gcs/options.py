"""What a user may write beside `backend: gcs`."""

from __future__ import annotations

import re
from typing import ClassVar

from lmcache_backends.objects.options import ObjectOptions, shown
from lmcache_core.units import Secret

__all__ = ["GcsOptions"]

_SECRETS = frozenset({"token"})


class GcsOptions(ObjectOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a bucket.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    door: ClassVar[str] = "gcs"
    scheme: ClassVar[str] = "gs"
    holder: ClassVar[str] = "bucket"
    allowed: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
    example: ClassVar[str] = "https://storage.googleapis.com"

    bucket: str
    """Name of the bucket, or `gs://bucket/prefix`. It must exist."""
    endpoint: str = ""
    """URL of the server, such as one of Google's for a region or a private network. Without one
    `https://storage.googleapis.com`."""
    credentials: str = ""
    """File that says who we are: the key of a service account, or what `gcloud auth application-default login` has
    written. Without one what `GOOGLE_APPLICATION_CREDENTIALS` names, that login, or the service account of this
    machine or pod; what expires is renewed."""
    token: Secret = ""
    """Bearer token in place of credentials, such as a server of your own asks for; it is not renewed. Best as
    `${env:NAME}`."""

    def __post_init__(self) -> None:
        self.check()
        self.check_url(self.endpoint)
        if self.token and self.credentials:
            raise self.refused("token", "credentials and token both say who we are; write one of the two")

    def __repr__(self) -> str:
        return shown(self, _SECRETS)

    def url(self) -> str:
        """Of the server."""
        return self.endpoint.rstrip("/") or "https://storage.googleapis.com"
