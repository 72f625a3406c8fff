"""The settings, one struct a section. A field's docstring is its documentation everywhere.

Build them directly in code, or read them from YAML with `load_config`. Values are checked by `load_config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lmcache_core.config.masking import mask_url
from lmcache_core.units import ByteSize, Duration, Secret

Count = Annotated[int, msgspec.Meta(ge=1)]
NumaNode = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Policy = Literal["lru", "s3fifo"]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section whose repr is safe to log."""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={self._safe(name)}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({values})"

    def _safe(self, name: str) -> str:
        return mask_url(repr(getattr(self, name)))


class CpuConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """The host pool: the memory that all chunks pass through and where the most useful of them stay."""

    capacity: ByteSize = 4 * 2**30
    """Memory taken from this host, once per node and not once per rank."""
    hugepages: bool = False
    """Back the pool with 2 MiB pages. The kernel must have them reserved."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """NUMA nodes that the pool's memory lies on, by turns: those of the GPUs that copy from and to it. By default it
    lies where the process that takes it runs."""
    policy: Policy = "lru"
    """Which chunks leave first when the pool is full: the least recently used (`lru`), or those used only once
    (`s3fifo`)."""


class BreakerConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """When a failing tier is left alone, and for how long."""

    failures: Count = 3
    """Failures in a row after which the tier is left alone and its chunks count as misses."""
    cooldown: Duration = 1.0
    """Time until one operation probes whether the tier is back. Doubles with each probe that fails."""
    max_cooldown: Duration = 30.0
    """Longest time between two probes."""


class CipherConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """Keys that a tier's chunks are encrypted with."""

    key: Secret
    """Key of all chunks but those of tenants that have their own: 32 random bytes in base64."""
    older: tuple[Secret, ...] = ()
    """Keys that were `key` before, or a tenant's: nothing is encrypted with them any more, and what was is still
    read."""
    tenants: dict[str, Secret] = {}
    """Keys of tenants, by name: what they store is encrypted with theirs."""

    def _safe(self, name: str) -> str:
        return "'***'"


class TierConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """One storage tier below the host pool. The backend's own options stand beside these keys."""

    backend: str
    """Which backend plugin keeps the chunks: `disk`, or the name of any installed plugin."""
    name: str = ""
    """Name in logs and metrics. Must be unique; by default the backend's name."""
    capacity: ByteSize | None = None
    """Bytes this tier may hold. Some backends need it; without it a tier is bounded by its medium only."""
    write: Literal["through", "evict", "never"] = "through"
    """When chunks are written: at once (`through`), when they leave the host pool (`evict`), or `never`, which makes
    the tier read only."""
    admit: Literal["always", "second-touch"] = "always"
    """Which chunks are written: `always` all, or only those that were asked for a second time (`second-touch`), which
    spares flash memory."""
    min_prompt: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens that a prompt must have at least for its chunks to be written as they are stored: where each chunk is a
    request that costs money or a round trip, short prompts may not be worth it."""
    promote: bool = True
    """Also write chunks here that were read from a tier further down. With `admit: second-touch` a second use does
    that."""
    policy: Policy = "lru"
    """Which chunks leave first when the tier is full: `lru` or `s3fifo`, as in the host pool."""
    read_timeout: Duration = 2.0
    """Deadline of one load. Afterwards the chunk is a miss and is computed."""
    write_timeout: Duration = 30.0
    """Deadline of one store. Afterwards the chunk counts as not stored."""
    concurrency: Count = 8
    """Operations under way at once."""
    hedge: bool = False
    """Have another tier that holds the chunk read it too, when this one takes longer than it is known to, and use what
    comes first. Of all reads a tenth is made twice at most."""
    breaker: BreakerConfig = BreakerConfig()
    """When the tier is left alone after failures."""
    quarantine: ByteSize = 2**30
    """Bytes in buffers whose I/O is past its deadline before the tier counts as down."""
    codec: Literal["none", "lz4", "zstd"] = "none"
    """How chunks are compressed here: not at all (`none`), where they are empty (`lz4`), or by what their number type
    allows (`zstd`). What would not shrink by a tenth is stored as it is. The backend must be able to read values of any
    size."""
    cipher: CipherConfig | None = None
    """Keys that chunks are encrypted with here; without it they are not."""
    options: Any = None
    """The backend's own options, an instance of the struct its plugin declares. Not a key of the file."""

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.backend)

    def _safe(self, name: str) -> str:
        # A plugin's struct may print its passwords.
        return "..." if name == "options" and self.options is not None else super()._safe(name)


class ShareConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """What one owner of chunks is due of the node's room, other than the part and the freedom that all have."""

    tenant: str = ""
    """The owner, a tenant as its clients name it; or write `model`."""
    model: str = ""
    """The owner, a model by its name: of its chunks those that no tenant has stored."""
    weight: Weight = 1.0
    """How large its part is beside the parts of others, where all want more than there is."""
    cpu: ByteSize | None = None
    """Most bytes it may hold in the host pool, those in use and pinned ones too."""
    tiers: dict[str, ByteSize] = {}
    """Most bytes it may hold on a tier, by the tier's name."""


class MetricsConfig(_Section, frozen=True, forbid_unknown_fields=True):
    """The Prometheus endpoint of this node."""

    enabled: bool = False
    """Serve `/metrics` over HTTP."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all."""
    port: Port = 9464
    """Port to listen on; 0 takes a free one."""


class Config(_Section, frozen=True, forbid_unknown_fields=True):
    """Everything a node can be told."""

    chunk_tokens: Tokens = 256
    """Tokens stored and moved as one chunk. A multiple of `page_tokens`. The same on all hosts that share a tier."""
    page_tokens: Tokens = 64
    """Tokens of the smallest unit that can be found again. Raised to the engine's block size where that is larger.
    Connectors make the namespace with it; with `Cache.open` and a namespace of your own, the namespace decides."""
    cpu: CpuConfig = CpuConfig()
    """The host pool."""
    tiers: tuple[TierConfig, ...] = ()
    """Storage tiers below the host pool, fastest first."""
    salt: Secret = ""
    """Tenant secret that goes into every key: nodes with another salt share nothing. Empty shares with all."""
    tenant: str = ""
    """Whose the chunks are that are stored with these settings, as a label without secrecy: it shares the node's room
    with other tenants fairly. Without one they are the model's."""
    shares: tuple[ShareConfig, ...] = ()
    """Weights and quotas of tenants and models."""
    share_timeout: Duration = 3600.0
    """How long a tenant or model that uses nothing keeps its part. Afterwards its chunks are the first to go."""
    socket: str = ""
    """Unix socket at which other processes of this host can use this node: a path, or `auto` for one below the runtime
    directory. Empty for none."""
    connect: str = ""
    """Unix socket of a node to use instead of one of its own: a path, or `auto`. What else is set here of tiers and
    memory is the other node's to decide."""
    call_timeout: Duration = 1.0
    """Time in which a node that is used by its socket must answer. Afterwards it counts as gone until it can be reached
    again, and what it would have given is computed."""
    metrics: MetricsConfig = MetricsConfig()
    """The Prometheus endpoint."""
    lease_timeout: Duration = 30.0
    """How long a lookup keeps what it promised before the chunks may be evicted unread."""
    retention_tokens: Count = 4096
    """Distance in tokens between the points of a long prompt at which sliding-window and recurrent state is kept."""
    layout: Literal["native", "canonical"] = "native"
    """How KV is stored: the engine's own bytes (`native`, fastest), or in one layout that engines can share
    (`canonical`). Connectors make the namespace with it; with `Cache.open` and a namespace of your own, the namespace
    decides."""
    log_interval: Duration = 10.0
    """At most one log line per kind of fault in this time."""

    def _safe(self, name: str) -> str:
        return "'***'" if name == "salt" and self.salt else super()._safe(name)
