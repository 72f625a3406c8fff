"""Where a bucket is, asked of the server. Blocks."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from lmcache_backends.objects.reach import trusting

__all__ = ["region_of"]


def region_of(url: str, bucket: str, timeout: float, ca: str | None, *, verify: bool) -> str:
    """The region that a server says a bucket is in, to whoever asks; empty if it does not say."""
    parts = urlsplit(url)
    connection = (
        HTTPSConnection(parts.netloc, timeout=timeout, context=trusting(ca, verify=verify))
        if parts.scheme == "https"
        else HTTPConnection(parts.netloc, timeout=timeout)
    )
    try:
        connection.request("HEAD", "/" if (parts.hostname or "").startswith(f"{bucket}.") else f"/{bucket}")
        return connection.getresponse().headers.get("x-amz-bucket-region", "")
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
