"""What a user may write beside `backend: redis`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.units import Duration, Secret

__all__ = ["Address", "RedisOptions", "Url"]

PORT = 6379
SENTINEL_PORT = 26379

_SCHEMES = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
    "redis+unix": "unix",
    "valkey+unix": "unix",
}
_PREFIX = re.compile(r"[A-Za-z0-9._/-]{1,100}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a host and port, or the path of a Unix socket."""

    host: str
    port: int = 0

    @property
    def path(self) -> str:
        """Path of the Unix socket; empty for TCP."""
        return "" if self.port else self.host

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """What the URL says."""

    address: Address
    tls: bool
    username: str
    password: str
    database: int


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a Redis or Valkey server.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    url: str
    """Where the server is: `redis://host:6379/0`, with TLS `rediss://host:6379/0`, or `unix:///path/of/socket`; the
    schemes `valkey`, `valkeys` and `valkey+unix` mean the same. User and password may stand in it, as in
    `rediss://user:password@host`, but are better given by the environment: `${env:NAME}`. Of a cluster, any node; with
    `service`, any sentinel."""
    username: str = ""
    """User of the server's access control list. Overrides the URL's."""
    password: Secret = ""
    """Password, best from the environment (`${env:NAME}`) or a file (`${file:/path}`). Overrides the URL's."""
    mode: Literal["auto", "single", "cluster", "sentinel"] = "auto"
    """What the server is a part of. `auto` asks it."""
    service: str = ""
    """Name under which sentinels know the primary, as in `mymaster`. The URL and `sentinels` are sentinels then."""
    sentinels: tuple[str, ...] = ()
    """More sentinels beside the URL's, each as `host:port`, in case that one is down."""
    sentinel_username: str = ""
    """User that the sentinels ask for. Theirs and the server's need not be the same."""
    sentinel_password: Secret = ""
    """Password that the sentinels ask for."""
    tls_ca: str = ""
    """File with the certificates that the server's must be signed by, where the system does not know them."""
    tls_cert: str = ""
    """File with the client's certificate, for servers that ask for one."""
    tls_key: str = ""
    """File with the key of `tls_cert`, if it is not in there."""
    tls_verify: bool = True
    """Check the server's certificate and name. Without, anybody between can read and change what is stored."""
    prefix: str = "lmcache"
    """In front of all keys, so that others can use the same database: letters, digits, `.`, `_`, `/` and `-`."""
    ttl: Duration | None = None
    """Time after which the server forgets a chunk, counted from when it was written. Without it chunks stay until the
    server's `maxmemory-policy` evicts them."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Connections for chunks to each server; each moves one batch at a time. Two more carry questions."""
    connect_timeout: Duration = 2.0
    """Deadline of connecting, which TLS and logging in are a part of."""

    def __repr__(self) -> str:
        return f"RedisOptions(url={str(self.parsed().address)!r}, prefix={self.prefix!r})"

    def __post_init__(self) -> None:
        url = self.parsed()
        if not _PREFIX.fullmatch(self.prefix):
            problem = f"redis: prefix {self.prefix!r} is not possible; write letters, digits and . _ / -, at most 100"
            raise InvalidSetting(("prefix",), problem)
        if self.ttl is not None and self.ttl < 0.001:
            raise InvalidSetting(("ttl",), "redis: with this ttl nothing would be kept; leave it out, or write 7d")
        if self.connect_timeout < 0.001:
            raise InvalidSetting(("connect_timeout",), "redis: connect_timeout must be more than 1ms; write 2s")
        if self.mode == "sentinel" and not self.service:
            problem = "redis: mode sentinel needs the name of the primary; write service: mymaster"
            raise InvalidSetting(("service",), problem)
        if self.service and self.mode not in ("auto", "sentinel"):
            problem = f"redis: service is for sentinels, and mode is {self.mode}; delete one of them"
            raise InvalidSetting(("service",), problem)
        for name in ("sentinels", "sentinel_username", "sentinel_password"):
            if getattr(self, name) and not self.service:
                raise InvalidSetting((name,), f"redis: {name} needs the name of the primary; write service: mymaster")
        self.sentinel_addresses()
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if getattr(self, name) and not url.tls:
                raise InvalidSetting((name,), f"redis: {name} is of no use without TLS; write url: rediss://...")
        if self.tls_key and not self.tls_cert:
            raise InvalidSetting(("tls_key",), "redis: tls_key is the key of a certificate; write tls_cert too")

    def parsed(self) -> Url:
        """What `url`, `username` and `password` say.

        Raises:
            InvalidSetting: The URL is none.
        """
        text = self.url
        scheme, separator, rest = text.partition("://")
        kind = _SCHEMES.get(scheme.lower())
        if not separator or kind is None:
            close = difflib.get_close_matches(scheme.lower(), _SCHEMES, 1, 0.5) if separator else []
            meant = f"did you mean {close[0]}://?" if close else "write redis://host:6379/0, or rediss:// for TLS"
            written = f"scheme {scheme}://" if separator else "url"
            raise InvalidSetting(("url",), f"redis: {written} is not one of Redis or Valkey; {meant}")
        try:
            parts = urlsplit(f"redis://{rest}")
            port = parts.port
        except ValueError as error:
            raise InvalidSetting(("url",), f"redis: url cannot be read ({error}); write redis://host:6379/0") from None
        if parts.query or parts.fragment:
            problem = "redis: url ends in ?... or #..., which is not used; what it means is a key of its own here"
            raise InvalidSetting(("url",), problem)
        username, password = self.username or unquote(parts.username or ""), self.password
        password = str(password) or unquote(parts.password or "")
        if kind == "unix":
            path = unquote(parts.path)
            if parts.hostname or not path.startswith("/") or path == "/":
                raise InvalidSetting(("url",), "redis: url needs the path of the socket; write unix:///run/redis.sock")
            return Url(Address(path), False, username, password, 0)
        database = parts.path.strip("/")
        if not parts.hostname or (database and not database.isdecimal()):
            raise InvalidSetting(("url",), "redis: url needs a host and may end in a number; write redis://host:6379/0")
        port = port or (SENTINEL_PORT if self.service else PORT)
        return Url(Address(parts.hostname, port), kind == "rediss", username, password, int(database or 0))

    def sentinel_addresses(self) -> list[Address]:
        """Where to ask for the primary.

        Raises:
            InvalidSetting: One is no address.
        """
        found = [self.parsed().address]
        for text in self.sentinels:
            host, _, port = text.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise InvalidSetting(("sentinels",), f"redis: sentinel {text!r} is no address; write host:26379")
            found.append(Address(host.strip("[]"), int(port)))
        return found
