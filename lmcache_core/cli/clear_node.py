"""What `lmcache-core clear` asks of a node at work: it deletes from its own tiers, also while engines use it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lmcache_core.cli.disk_cache import can_be_inspected
from lmcache_core.cli.running import Known, connected, listens, namespaces_of, not_there, registered, the_namespace
from lmcache_core.config import Config, load_config
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from lmcache_core.service.remote import RemoteClient

__all__ = ["Share", "clear_node", "holdings", "node_of_process", "node_that_is_named", "tier_of_path"]

FLUSH_TIMEOUT = 30.0


class Share(NamedTuple):
    """What a node holds on one tier."""

    tier: str
    chunks: int | None
    """None where the node does not tell."""
    nbytes: int


@contextmanager
def node_of_process(arguments: argparse.Namespace, pids: set[str]) -> Iterator[RemoteClient | None]:
    """The node whose socket the configuration names, if one of these processes is it and no other has a share."""
    with ExitStack() as stack:
        node = None
        with suppress(ConfigError):  # of what the environment names; the command does not need it
            if pids:
                client, _ = stack.enter_context(connected(arguments, must=False))
                node = client if _is_owner(client, pids) else None
        yield node


@contextmanager
def node_that_is_named(arguments: argparse.Namespace, pids: set[str], *, must: bool) -> Iterator[RemoteClient | None]:
    """The node whose socket the configuration names, unless a process has a share of its tiers that is not it. None if
    no process listens there: what it had in memory has gone with it.

    Raises:
        LMCacheError: It is not there, but it `must` be; or it is there, and does not answer or refuses.
    """
    with connected(arguments, must=False) as (client, config):
        if client.wait_until_up(0):
            yield client if not pids or _is_owner(client, pids) else None
        elif listens(client.path, config.call_timeout):
            raise not_there(client, config)
        elif must:
            raise BackendError(
                f"there is no node at {client.path}, so nothing was cleared: its memory has gone with it, and what it "
                "left on disks is cleared with the node's own configuration, or with: lmcache-core clear PATH"
            )
        else:
            yield None


def _is_owner(client: RemoteClient, pids: set[str]) -> bool:
    return bool(client.node_pid) and pids == {str(client.node_pid)}


def tier_of_path(client: RemoteClient, path: Path, config: str | None) -> str:
    """The name that a node has for the disk tier at `path`.

    Raises:
        LMCacheError: Nobody can tell.
    """
    loaded = load_config(None if config is None else Path(config)).config
    for tier in loaded.tiers:
        if can_be_inspected(tier.backend) and any(Path(each).absolute() == path for each in tier.options.paths()):
            return tier.name
    disks = [tier.name for tier in client.stats().tiers if can_be_inspected(tier.backend)]
    if len(disks) != 1:
        raise LMCacheError(
            f"{path} is in use by the node at {client.path}, which has the tiers {', '.join(disks) or 'none'}; say "
            f"which one: lmcache-core clear --socket {client.path} --tier TIER"
        )
    return disks[0]


def holdings(
    client: RemoteClient, name: str | None, tiers: Sequence[str] | None, config: Config
) -> tuple[Known | None, list[Share]]:
    """What a clear would delete: the namespace, if one is named, and what is held by tier.

    Raises:
        LMCacheError: There is no such namespace, or no such tier.
    """
    stats = client.stats()
    known = None if name is None else the_namespace(client, name, config)
    if known is not None:
        registered(known)
    chunks = {"cpu": stats.chunks} | {tier.name: tier.chunks for tier in stats.tiers}
    if unknown := [tier for tier in tiers or () if tier not in chunks]:
        raise ConfigError(f"there is no tier {unknown[0]!r}; this node has {', '.join(chunks)}")
    held = namespaces_of(client.spaces()) if known is None else [known]
    return known, [
        Share(tier, number if known is None else None, sum(each.nbytes.get(tier, 0) for each in held))
        for tier, number in chunks.items()
        if tiers is None or tier in tiers
    ]


def clear_node(client: RemoteClient, known: Known | None, shares: Sequence[Share]) -> list[Share]:
    """Delete them, pinned and leased ones too. Returns how much was there, by tier.

    Raises:
        LMCacheError: The node has gone, or is not done in time.
    """
    model = None if known is None else client.register(registered(known))
    # Tiers first: a chunk that is in memory alone is not written to them in between.
    cleared = [Share(each.tier, client.clear(model, [each.tier]), each.nbytes) for each in reversed(shares)]
    if not client.flush(FLUSH_TIMEOUT):
        raise BackendError(
            f"nobody finds the chunks any more, but not all are deleted on tiers after {FLUSH_TIMEOUT:g} s; the node "
            f"at {client.path} goes on; clear again to be sure"
        )
    return cleared[::-1]
