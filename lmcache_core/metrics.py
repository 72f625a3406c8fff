"""Metrics of a node in the Prometheus format, and its health: read when somebody asks, and served over HTTP.

Nothing here is on the path of a request: a scrape calls `Client.stats` once. Each server has a registry of its own, so
that any number of nodes can live in one process, beside an engine with metrics of its own. There are no rates and no
ratios: Prometheus computes them from the counters, over any time.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_core import __version__
from lmcache_core.checkup import Health
from lmcache_core.client import Client, OwnerStats, Stats, TierStats
from lmcache_core.counts import COUNTERS
from lmcache_core.errors import ClosedError, ConfigError
from lmcache_core.index.decisions import Refusal
from lmcache_core.index.residency import CPU

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from lmcache_core.config import Config

__all__ = ["GAUGES", "TIER_GAUGES", "MetricsServer", "NodeCollector", "serve_metrics"]

log = logging.getLogger(__name__)

PREFIX = "lmcache_core_"
PATH = "/metrics"

GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "pool_capacity_bytes": ("Size of the host pool.", lambda stats: stats.pool_capacity),
    "pool_usable_bytes": (
        "Bytes of the host pool that are faulted in; it grows to the capacity after the start.",
        lambda stats: stats.pool_usable,
    ),
    "pool_used_bytes": ("Bytes of the host pool in slots.", lambda stats: stats.pool_used),
    "pool_slots": (
        "Slots of the host pool that hold a chunk or are being filled, read or written.",
        lambda stats: stats.slots,
    ),
    "pool_chunks": ("Chunks that can be read from the host pool.", lambda stats: stats.chunks),
    "leases": ("Leases that have not ended.", lambda stats: stats.leases),
    "pinned_chunks": ("Chunks that are pinned.", lambda stats: stats.pinned),
    "kept_pins_bytes": (
        "Bytes of chunks that are pinned until somebody unpins them, on whichever tiers they are.",
        lambda stats: stats.kept.nbytes,
    ),
    "kept_pins_limit_bytes": ("Most bytes that such pins may hold.", lambda stats: stats.kept.most),
    "staged_chunks": ("Chunks that are reserved and not yet readable.", lambda stats: stats.staged),
    "event_loop_lag_seconds": (
        "How late the event loop was when it last looked at the clock.",
        lambda stats: stats.loop_lag,
    ),
}
"""Gauges of the node: help text, and how to read them."""

TIER_GAUGES: dict[str, tuple[str, Callable[[TierStats], float | None]]] = {
    "tier_up": ("1 if the tier is used, 0 while it is left alone.", lambda tier: tier.up),
    "tier_used_bytes": ("Bytes of chunks on the tier, those being written included.", lambda tier: tier.used),
    "tier_capacity_bytes": (
        "Bytes that the tier may hold; absent where only the medium bounds it.",
        lambda tier: tier.capacity,
    ),
    "tier_chunks": ("Chunks that can be read from the tier, as far as the node knows.", lambda tier: tier.chunks),
    "tier_queued_operations": ("Operations on the tier that wait or are under way.", lambda tier: tier.queued),
    "tier_quarantined_bytes": (
        "Bytes of buffers that are out of use because their I/O is past its deadline and has not ended.",
        lambda tier: tier.quarantined,
    ),
    "tier_read_latency_seconds": (
        "Seconds that a read of the tier takes whatever its size, as learned; absent while that is not known.",
        lambda tier: tier.read_latency,
    ),
    "tier_read_bandwidth_bytes": (
        "Bytes a second that a read of the tier moves besides; absent while that is not known.",
        lambda tier: tier.read_bandwidth,
    ),
}
"""Gauges of each tier, with the label `tier`; None leaves one out."""

OWNER_BYTES = "Bytes of chunks that an owner holds, those being stored, read or written included."
MOST_OWNERS = 20
"""Owners with series of their own, those that hold most. All others together are one more."""
OTHERS = "other"
"""Kind and name of these."""

BACKEND_EVENTS = "What a tier's backend counts, by the backend's own names."
BUILD_INFO = "Always 1; the label says which version this is."

# Series start at 0 and not with the first event, which `rate` and `increase` would not see.
_OF_THE_POOL = ("hit_tokens", "retrieved_tokens", "evicted_chunks", "superseded_chunks")
_KNOWN = {
    "lookups": ("lookup", "retrieve"),
    "lookup_tokens": ("lookup", "retrieve"),
    "stored_tokens": ("store",),
    "present_tokens": ("store",),
    "copied_bytes": ("to_engine", "from_engine"),
    "copy_seconds": ("to_engine", "from_engine"),
    "dropped_chunks": tuple(reason.value for reason in Refusal),
    "expired_leases": ("lease",),
}
Check: TypeAlias = "Callable[[], Health]"
NO_CHECKS: Mapping[str, Check] = MappingProxyType({})
_NOTHING = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, (), {})


class NodeCollector(Collector):
    """Reads a node's state and counters when it is asked to."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Names and help texts of all metrics; asks the node nothing."""
        return _families(_NOTHING)

    def collect(self) -> Iterator[Metric]:
        """All metrics.

        Raises:
            ClosedError: The node has been closed.
        """
        return _families(self._stats())


def _families(stats: Stats) -> Iterator[Metric]:
    yield from _counters(stats)
    for name, (text, read) in GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=read(stats))
    for name, (text, read_tier) in TIER_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["tier"])
        for tier in stats.tiers:
            value = read_tier(tier)
            if value is not None:
                gauge.add_metric([tier.name], value)
        yield gauge
    yield _owners(stats.owners)
    events = CounterMetricFamily(f"{PREFIX}backend_events", BACKEND_EVENTS, labels=["tier", "event"])
    for tier in stats.tiers:
        for event, number in tier.counters.items():
            events.add_metric([tier.name, event], number)
    yield events
    info = GaugeMetricFamily(f"{PREFIX}build_info", BUILD_INFO, labels=["version"])
    info.add_metric([__version__], 1)
    yield info


def _owners(owners: Sequence[OwnerStats]) -> Metric:
    """What each of the largest holds, and all others together, so that the sum is right and series are few."""
    gauge = GaugeMetricFamily(f"{PREFIX}owner_bytes", OWNER_BYTES, labels=["kind", "owner", "tier"])
    largest = sorted(owners, key=lambda owner: (-sum(owner.nbytes.values()), owner.kind, owner.name))
    for owner in largest[:MOST_OWNERS]:
        for tier, nbytes in owner.nbytes.items():
            gauge.add_metric([owner.kind, owner.name, tier], nbytes)
    others: dict[str, int] = {}
    for owner in largest[MOST_OWNERS:]:
        for tier, nbytes in owner.nbytes.items():
            others[tier] = others.get(tier, 0) + nbytes
    for tier, nbytes in others.items():
        gauge.add_metric([OTHERS, OTHERS, tier], nbytes)
    return gauge


def _counters(stats: Stats) -> Iterator[Metric]:
    tiers = [tier.name for tier in stats.tiers]
    for name, counter in COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, counter.help, labels=[counter.label])
        known = list(_KNOWN.get(name, ()))
        if counter.label == "tier":
            known = [CPU, *tiers] if name in _OF_THE_POOL else tiers
        for label, value in (dict.fromkeys(known, 0.0) | dict(stats.counts.get(name, {}))).items():
            family.add_metric([label], value)
        yield family


class MetricsServer:
    """Serves `/metrics` of a node over HTTP, on daemon threads. Use as a context manager, or call `close`.

    Args:
        client: Of the node.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        checks: What health probes can ask, by path.

    Raises:
        ConfigError: It cannot listen there; the message names the setting.
    """

    def __init__(
        self, client: Client, host: str = "127.0.0.1", port: int = 0, checks: Mapping[str, Check] = NO_CHECKS
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(NodeCollector(client.stats))
        self._server = _listen(host, port)
        self._server.set_app(_application(self.registry, checks))
        self.host = host
        self.port = self._server.server_port
        """The port it listens on."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="lmcache-metrics", daemon=True)
        self._thread.start()
        log.info("metrics are served at %s", self.url)

    @property
    def url(self) -> str:
        """Where to scrape."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{PATH}"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which waits without a time-out
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()


def serve_metrics(client: Client, config: Config, checks: Mapping[str, Check] = NO_CHECKS) -> MetricsServer | None:
    """The server that a configuration asks for, if it does.

    Raises:
        ConfigError: It cannot listen there.
    """
    if not config.metrics.enabled:
        return None
    return MetricsServer(client, config.metrics.host, config.metrics.port, checks)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Threads of its own for slow readers, none of which holds up an exit."""

    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Without the inherited look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Wait a little when no connection can be had, for want of files say, instead of trying at full speed."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.01)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is worth no traceback."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = 10.0
    """Seconds that a reader may be silent."""

    def address_string(self) -> str:
        """The address as it is."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


def _listen(host: str, port: int) -> _Server:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"metrics.host: {host!r} is no address of this host: {error.strerror}") from error
    kind = type("_Server", (_Server,), {"address_family": family})
    try:
        server: _Server = kind(address, _Handler)
    except PermissionError as error:
        raise ConfigError(f"metrics.port: {port} needs privileges; write a port above 1023, or 0 for any") from error
    except OSError as error:
        raise ConfigError(
            f"metrics.port: cannot listen on {host}, port {port}: {error.strerror}; write another port, or 0 for a "
            "free one"
        ) from error
    return server


def _application(
    registry: CollectorRegistry, checks: Mapping[str, Check]
) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in (PATH, "/", *checks):
            return _answer(start, "404 Not Found", f"there are {', '.join([PATH, *checks])}")
        if environ["REQUEST_METHOD"] != "GET":
            return _answer(start, "405 Method Not Allowed", "use GET")
        if path in checks:
            health = checks[path]()
            return _answer(start, "200 OK" if health.well else "503 Service Unavailable", health.text)
        try:
            answer: Iterable[bytes] = metrics(environ, start)
        except ClosedError as error:
            return _answer(start, "503 Service Unavailable", str(error))
        return answer

    return application


def _answer(start: StartResponse, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]
