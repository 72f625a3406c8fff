"""`lmcache-core status`: what a node holds, who uses it, and how well it does."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lmcache_core.cli.ending import end_in_order
from lmcache_core.cli.output import Column, Page, add_json_option, is_terminal, print_json
from lmcache_core.cli.running import DIGITS, Known, add_node_options, connected, namespaces_of, not_there, own_name
from lmcache_core.client import OwnerStats, Stats
from lmcache_core.config import Config
from lmcache_core.errors import LMCacheError
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.wire import ClientStats
from lmcache_core.units import format_size

INTERVAL = 1.0
SHARE = 10
"""Part of the time, as a divisor, that the node may be kept busy by being watched: telling of a million chunks takes
seconds."""
MOST_ROWS = 12
"""Clients and namespaces that people are shown of each."""


class Seen(NamedTuple):
    """A node at one moment."""

    at: float
    pid: int
    stats: Stats
    clients: Sequence[ClientStats]
    namespaces: Sequence[Known]


class Hits(NamedTuple):
    """Tokens that were looked up and promised."""

    looked_up: int
    by_tier: Mapping[str, int]

    @property
    def ratio(self) -> float | None:
        """Of all that were looked up, those that were found."""
        return sum(self.by_tier.values()) / self.looked_up if self.looked_up else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument("--watch", action="store_true", help="show it anew every second until Ctrl-C")
    add_node_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a node. The exit code is 1 if it is not there or one of its tiers is down."""
    with connected(arguments, must=not arguments.watch) as (client, config):
        if arguments.watch:
            _watch(client, config, as_json=arguments.json)
        seen = look(client)
    if arguments.json:
        print_json(plain(client.path, seen, None))
    else:
        page(client.path, seen, None).print()
    return 0 if all(tier.up for tier in seen.stats.tiers) else 1


def look(client: RemoteClient) -> Seen:
    """The node now, without this client.

    Raises:
        LMCacheError: It is not there.
    """
    me = own_name("status")
    stats, clients = client.stats(), [each for each in client.clients() if each.name != me]
    return Seen(time.monotonic(), client.node_pid, stats, clients, namespaces_of(client.spaces()))


def hits(now: Seen, before: Seen | None = None) -> Hits:
    """Over the node's life, or since `before` if that was in the same life."""
    counts = now.stats.counts
    whole = Hits(
        int(sum(counts.get("lookup_tokens", {}).values())),
        {tier: int(tokens) for tier, tokens in counts.get("hit_tokens", {}).items() if tokens},
    )
    if before is None:
        return whole
    earlier = hits(before)
    if before.pid != now.pid or earlier.looked_up > whole.looked_up:
        return whole
    gained = {tier: tokens - earlier.by_tier.get(tier, 0) for tier, tokens in whole.by_tier.items()}
    return Hits(whole.looked_up - earlier.looked_up, {tier: tokens for tier, tokens in gained.items() if tokens > 0})


# Watching


def _watch(client: RemoteClient, config: Config, *, as_json: bool) -> None:
    """Ends by Ctrl-C or SIGTERM only."""
    if as_json or not is_terminal(sys.stdout):
        show = _print_line if as_json else _print_page
        _follow(client, config, show)
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    signal.signal(signal.SIGTERM, end_in_order)  # so that the terminal gets its own screen back
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(path: str, seen: Seen | None, before: Seen | None, why: str) -> None:
            shown = _absence(path, why) if seen is None else page(path, seen, before)
            live.update(shown.fitted(console), refresh=True)

        _follow(client, config, draw)


def _follow(client: RemoteClient, config: Config, show: Callable[[str, Seen | None, Seen | None, str], None]) -> None:
    before: Seen | None = None
    pause = threading.Event()
    while True:
        started = time.monotonic()
        wait = INTERVAL
        try:
            seen, why = look(client), ""
            wait = max(INTERVAL, SHARE * (time.monotonic() - started))
        except LMCacheError as error:
            seen, why = None, str(not_there(client, config, str(error)))
        show(client.path, seen, before, why)
        before = seen or before
        pause.wait(wait)


def _print_line(path: str, seen: Seen | None, before: Seen | None, why: str) -> None:
    value = {"socket": path, "up": False, "why": why} if seen is None else plain(path, seen, before)
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def _print_page(path: str, seen: Seen | None, before: Seen | None, why: str) -> None:
    (_absence(path, why) if seen is None else page(path, seen, before)).print()
    print(flush=True)


def _absence(path: str, why: str) -> Page:
    return Page([f"node     {path}", "state    not there; it is shown once it is", f"why      {why}"])


# For people


def page(path: str, seen: Seen, before: Seen | None) -> Page:
    """A node on about 80 columns."""
    stats = seen.stats
    state = "frozen: it serves what it has and stores nothing new" if stats.frozen else "serving"
    lines = [
        f"node     {path}" + (f" (process {seen.pid})" if seen.pid else ""),
        f"state    {state}",
        f"pool     {_sizes(stats.pool_used, stats.pool_capacity)}, {_usable(stats)}",
        f"chunks   {stats.chunks:,} in the pool, {stats.staged:,} being stored, {stats.pinned:,} pinned",
        f"leases   {stats.leases:,}",
        f"hits     {_told(hits(seen))}",
    ]
    if stats.kept.chunks:
        held, most = format_size(stats.kept.nbytes), format_size(stats.kept.most)
        lines.insert(4, f"kept     {stats.kept.chunks:,} chunks by `lmcache-core pin`, {held} of at most {most}")
    lines[2:2] = [f"down     {tier.name}: {tier.why or 'no reason is known'}" for tier in stats.tiers if not tier.up]
    lines += [f"coded    {tier.name}: {ratio}" for tier in stats.tiers if (ratio := _coded(stats, tier.name))]
    if before is not None:
        lines.append(f"just now {_told(hits(seen, before))}, in {seen.at - before.at:.1f} s")
    tables = [_tiers(stats)]
    if seen.clients:
        tables.append(_clients(seen.clients))
    if any(owner.kind == "tenant" for owner in stats.owners):  # else they are the models, which come next
        tables.append(_owners(stats.owners))
    if seen.namespaces:
        tables.append(_namespaces(seen.namespaces))
    return Page(lines, tables)


def _sizes(used: int, capacity: int) -> str:
    return f"{format_size(used)} of {format_size(capacity)} used"


def _coded(stats: Stats, tier: str) -> str:
    """What compression has saved on a tier since the start."""
    plain = stats.counts.get("coding_plain_bytes", {}).get(tier, 0)
    stored = stats.counts.get("coding_stored_bytes", {}).get(tier, 0)
    return f"{format_size(int(plain))} stored in {format_size(int(stored))} ({stored / plain:.0%})" if plain else ""


def _usable(stats: Stats) -> str:
    return "all usable" if stats.pool_usable >= stats.pool_capacity else f"{format_size(stats.pool_usable)} usable yet"


def _told(found: Hits) -> str:
    if not found.looked_up:
        return "nothing looked up"
    parts = ", ".join(f"{tier} {tokens / found.looked_up:.1%}" for tier, tokens in found.by_tier.items())
    return f"{found.ratio:.1%} of {found.looked_up:,} tokens looked up" + (f" ({parts})" if parts else "")


_Table = tuple[Sequence[Column], Sequence[Sequence[str]]]


def _number(header: str) -> Column:
    return Column(header, right=True)


TIERS = [
    Column("tier"),
    Column("state"),
    *map(_number, ("used", "capacity", "chunks", "queued", "quarantined")),
]
CLIENTS = [Column("client"), *map(_number, ("pid", "shard", "leases", "stores", "age"))]
OWNERS = [Column("owner"), Column("kind"), Column("use"), Column("stored")]
NAMESPACES = [Column("namespace"), Column("model"), _number("chunks"), Column("stored")]


def _tiers(stats: Stats) -> _Table:
    rows = [
        ("cpu", "up", format_size(stats.pool_used), format_size(stats.pool_capacity), f"{stats.chunks:,}", "-", "-"),
        *(
            (
                tier.name,
                "up" if tier.up else "down",
                format_size(tier.used),
                "-" if tier.capacity is None else format_size(tier.capacity),
                f"{tier.chunks:,}",
                f"{tier.queued:,}",
                format_size(tier.quarantined),
            )
            for tier in stats.tiers
        ),
    ]
    return TIERS, rows


def _clients(clients: Sequence[ClientStats]) -> _Table:
    oldest = sorted(clients, key=lambda each: -each.seconds)
    rows: list[tuple[str, ...]] = [
        (each.name, str(each.pid), str(each.shard), str(each.leases), str(each.stores), _age(each.seconds))
        for each in oldest
    ]
    if not any(each.tenant for each in oldest):
        return CLIENTS, _first(rows)
    rows = [(*row, each.tenant or "-") for row, each in zip(rows, oldest, strict=True)]
    return [*CLIENTS, Column("tenant")], _first(rows)


def _age(seconds: float) -> str:
    for unit, size, below in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def _owners(owners: Sequence[OwnerStats]) -> _Table:
    most = sorted(owners, key=lambda owner: -sum(owner.nbytes.values()))
    rows = [(each.name, each.kind, "idle" if each.idle else "in use", _stored(each.nbytes)) for each in most]
    return OWNERS, _first(rows)


def _stored(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{place} {format_size(held)}" for place, held in nbytes.items() if held) or "nothing"


def _namespaces(namespaces: Sequence[Known]) -> _Table:
    rows = [
        (
            each.id[:DIGITS],
            each.model or ("unknown" if each.namespace is None else "no name"),
            f"{each.chunks:,}",
            _stored(each.nbytes),
        )
        for each in namespaces
    ]
    return NAMESPACES, _first(rows)


def _first(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    if len(rows) <= MOST_ROWS:
        return rows
    rest = len(rows) - MOST_ROWS + 1
    return [*rows[: MOST_ROWS - 1], (f"and {rest} more", *[""] * (len(rows[0]) - 1))]


# For programs


def plain(path: str, seen: Seen, before: Seen | None) -> dict[str, object]:
    """A node as JSON."""
    stats = seen.stats
    interval = None if before is None else {"seconds": seen.at - before.at, **_plain_hits(hits(seen, before))}
    return {
        "socket": path,
        "up": True,
        "pid": seen.pid or None,
        "frozen": stats.frozen,
        "pool": {
            "capacity": stats.pool_capacity,
            "usable": stats.pool_usable,
            "used": stats.pool_used,
            "slots": stats.slots,
            "chunks": stats.chunks,
            "staged": stats.staged,
        },
        "leases": stats.leases,
        "pinned": stats.pinned,
        "kept": {"chunks": stats.kept.chunks, "nbytes": stats.kept.nbytes, "most": stats.kept.most},
        "event_loop_lag": stats.loop_lag,
        "hits": _plain_hits(hits(seen)),
        "interval": interval,
        "tiers": [
            {
                "name": "cpu",
                "backend": None,
                "up": True,
                "why": None,
                "used": stats.pool_used,
                "capacity": stats.pool_capacity,
                "chunks": stats.chunks,
                "queued": 0,
                "quarantined": 0,
                "read_latency": None,
                "read_bandwidth": None,
            },
            *(
                {
                    "name": tier.name,
                    "backend": tier.backend,
                    "up": tier.up,
                    "why": tier.why or None,
                    "used": tier.used,
                    "capacity": tier.capacity,
                    "chunks": tier.chunks,
                    "queued": tier.queued,
                    "quarantined": tier.quarantined,
                    "read_latency": tier.read_latency,
                    "read_bandwidth": tier.read_bandwidth,
                }
                for tier in stats.tiers
            ),
        ],
        "clients": [
            {
                "name": each.name,
                "pid": each.pid,
                "uid": each.uid,
                "tenant": each.tenant or None,
                "shard": each.shard,
                "leases": each.leases,
                "stores": each.stores,
                "seconds": each.seconds,
            }
            for each in seen.clients
        ],
        "owners": [
            {"kind": each.kind, "name": each.name, "idle": each.idle, "nbytes": dict(each.nbytes)}
            for each in stats.owners
        ],
        "namespaces": [
            {
                "id": each.id,
                "model": each.model or None,
                "spaces": [digest.hex() for digest in each.digests],
                "chunks": each.chunks,
                "pages": each.pages,
                "pinned": each.pinned,
                "leased": each.leased,
                "nbytes": each.nbytes,
            }
            for each in seen.namespaces
        ],
    }


def _plain_hits(found: Hits) -> dict[str, object]:
    return {"lookup_tokens": found.looked_up, "hit_tokens": dict(found.by_tier), "ratio": found.ratio}
