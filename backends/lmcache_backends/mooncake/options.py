"""What a user may write beside `backend: mooncake`."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from lmcache_core.config import InvalidSetting
from lmcache_core.units import ByteSize, Duration

__all__ = ["MooncakeOptions"]

_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,64}", re.ASCII)
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|redis|etcd)://\S+", re.ASCII)


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a Mooncake Store.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    master: str
    """Host and port of the store's `mooncake_master`, such as `kv-master:50051`."""
    host: str = "127.0.0.1"
    """Name or address of this host, at which the others reach it. The default is for a store of this host alone."""
    segment: ByteSize = 0
    """Memory of this host that the store may use, for chunks of everybody. It is taken in addition to the node's own,
    and what it holds is lost when the node ends. Without it this host only uses what others give."""
    metadata: str = "P2PHANDSHAKE"
    """Where hosts find out how to reach each other: by asking each other, or a server such as
    `http://kv-master:8080/metadata`. Write the same for all hosts of a store."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes move between hosts."""
    devices: str = ""
    """Network cards for `protocol: rdma`, with commas between them. Without it Mooncake chooses."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Hosts that hold each chunk written here."""
    prefix: str = ""
    """What the names of all objects begin with, to share a store with others."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Chunks that are read or written at the same time."""
    connect_timeout: Duration = 2.0
    """Time in which the master must take a connection when the tier is opened."""

    def __post_init__(self) -> None:
        self.address()
        if not _PREFIX.fullmatch(self.prefix):
            problem = f"prefix {self.prefix[:80]!r} is not possible; write at most 64 letters, digits, '.', '_' and '-'"
            raise InvalidSetting(("prefix",), f"mooncake: {problem}")
        if not _METADATA.fullmatch(self.metadata):
            problem = f"metadata {self.metadata!r} is no server; write P2PHANDSHAKE, or a URL"
            raise InvalidSetting(("metadata",), f"mooncake: {problem}")
        if not self.host or any(letter.isspace() for letter in self.host):
            raise InvalidSetting(("host",), f"mooncake: host {self.host!r} is no name; write that of this host")
        if self.devices and self.protocol != "rdma":
            problem = "devices is for `protocol: rdma`; write that too, or delete it"
            raise InvalidSetting(("devices",), f"mooncake: {problem}")
        if self.connect_timeout <= 0:
            problem = "connect_timeout must be longer than 0; write for example 2s"
            raise InvalidSetting(("connect_timeout",), f"mooncake: {problem}")

    def address(self) -> tuple[str, int]:
        """Host and port of the master."""
        try:
            parts = urlsplit(f"//{self.master}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.netloc != self.master or parts.username:
            problem = f"master {self.master!r} is no host and port; write it as in kv-master:50051"
            raise InvalidSetting(("master",), f"mooncake: {problem}")
        return host, port
