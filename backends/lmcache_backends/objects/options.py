"""What a user may write for any service of objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.errors import ConfigError
from lmcache_core.units import ByteSize, Duration, format_size

__all__ = ["ObjectOptions", "authority", "shown"]

_SMALLEST_PART = 64 * 2**10
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", re.ASCII)
_LONGEST_PREFIX = 512


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a place for objects. Those of a service inherit them.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    door: ClassVar[str]
    """Name of the backend."""
    scheme: ClassVar[str]
    """Of the URL of such a place."""
    holder: ClassVar[str]
    """The option that names the place: `bucket`, `container`."""
    allowed: ClassVar[re.Pattern[str]]
    """Names that such a place can have."""
    example: ClassVar[str]
    """A URL of a server."""

    prefix: str = ""
    """What the names of all objects begin with, to share a bucket with others."""
    verify: bool = True
    """Check the server's certificate. Without it anybody on the way can read and change everything."""
    ca_file: str = ""
    """File with the certificates (PEM) of an authority of your own, trusted beside the usual ones."""
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

    def check(self) -> None:
        """Refuse what cannot work of what all services have."""
        self.place_name()
        self.key_prefix()
        if self.ca_file and not self.verify:
            raise self.refused("ca_file", "`verify: false` checks no certificate; delete it or ca_file")
        for name in ("connect_timeout", "stall_timeout", "request_timeout"):
            if getattr(self, name) <= 0:
                raise self.refused(name, f"{name} must be longer than 0; write for example 2s")
        if self.part < _SMALLEST_PART:
            size, least = format_size(self.part), format_size(_SMALLEST_PART)
            raise self.refused("part", f"part {size} is too small; write {least} or more, as in 8MiB")

    def refused(self, name: str, problem: str) -> InvalidSetting:
        """The error for an option."""
        return InvalidSetting((name,), f"{self.door}: {problem}")

    def place_name(self) -> str:
        """The bucket, without what stands around it in a URL."""
        written = getattr(self, self.holder)
        name, _, _ = written.removeprefix(f"{self.scheme}://").partition("/")
        if not self.allowed.fullmatch(name):
            advice = f"write its name, or {self.scheme}://name/prefix"
            raise self.refused(self.holder, f"{self.holder} {written!r} is no name of a {self.holder}; {advice}")
        return str(name)

    def key_prefix(self) -> str:
        """What the names of all objects begin with: empty, or ending in a slash."""
        _, _, behind = getattr(self, self.holder).removeprefix(f"{self.scheme}://").partition("/")
        field, written = (self.holder, behind) if behind.strip("/") else ("prefix", self.prefix)
        if behind.strip("/") and self.prefix.strip("/"):
            raise self.refused("prefix", f"{self.holder} has a prefix already; write one of the two")
        prefix = written.strip("/")
        if not prefix:
            return ""
        parts = prefix.split("/")
        if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(parts) or len(prefix) > _LONGEST_PREFIX:
            raise self.refused(
                field,
                f"prefix {prefix[:80]!r} is not possible; write names of letters, digits, '.', '_' and '-' with "
                f"single slashes between them, at most {_LONGEST_PREFIX} characters",
            )
        return f"{prefix}/"

    def check_url(self, written: str, *, path: bool = False) -> None:
        """Refuse an `endpoint` that is no URL of a server, or has a path where it may have none."""
        if not written:
            return
        try:
            url = urlsplit(written)
            known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            known = False
        if not known or url.username or url.query or url.fragment:
            problem = f"endpoint {written!r} is no URL of a server; write it as in {self.example}"
            raise self.refused("endpoint", problem)
        if url.path.strip("/") and not path:
            problem = f"endpoint has a path, {url.path!r}; write only scheme, host and port, and the bucket apart"
            raise self.refused("endpoint", problem)


def shown(options: msgspec.Struct, secrets: frozenset[str]) -> str:
    """Options as text, without the secrets."""
    values = ((name, getattr(options, name)) for name in options.__struct_fields__)
    told = (f"{name}={'***' if name in secrets and value else repr(value)}" for name, value in values)
    return f"{type(options).__name__}({', '.join(told)})"


def authority(door: str, path: str) -> str:
    """Certificates from a file. Blocks."""
    try:
        text = Path(path).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not PEM"
        raise ConfigError(f"{door}: ca_file {path!r} cannot be read: {why}; correct the path") from None
    if "BEGIN CERTIFICATE" not in text:
        raise ConfigError(f"{door}: ca_file {path!r} has no certificate; write a file in PEM")
    return text
