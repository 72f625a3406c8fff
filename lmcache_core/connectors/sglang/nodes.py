"""Which node an engine's ranks use: one in the process of the first rank, which the others join by a socket, or one
that runs by itself."""

from __future__ import annotations

import hashlib
import logging
import os

import msgspec

from lmcache_core.assembly import Source, build_node, settings
from lmcache_core.client import Client
from lmcache_core.config import Config
from lmcache_core.config.environment import FILE_VARIABLE
from lmcache_core.direct import DirectClient
from lmcache_core.namespace import chunk_tokens_for
from lmcache_core.service.address import remove_stale_sockets, runtime_socket, socket_path
from lmcache_core.service.remote import RemoteClient
from lmcache_core.units import format_size

__all__ = ["engine_name", "engine_socket", "open_client"]

log = logging.getLogger(__name__)

SOCKETS = "sglang-"
"""What the sockets of engines' nodes begin with."""


def engine_name(replica: int = 0) -> str:
    """What an engine is known by in all its processes: the process that has started them, and which of the engines that
    it has started."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat") as file:
            began = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # it has gone, or belongs to somebody else
        began = ""
    return f"{parent} {began} {replica}"


def engine_socket(engine: str, source: Source) -> str:
    """Where the node of an engine listens for the engine's own processes."""
    name = hashlib.sha256(f"{engine} {source!r}".encode()).hexdigest()[:16]
    return socket_path(runtime_socket(f"{SOCKETS}{name}"))


def open_client(source: Source, engine: str, page_tokens: int, *, rank: int, ranks: int, lease: float) -> Client:
    """A rank's way to its node.

    Args:
        source: The cache's configuration.
        engine: Name of the engine.
        page_tokens: Tokens of a page of it.
        rank: Of those on this host; the first has the node.
        ranks: How many there are.
        lease: Seconds for which what was found must be kept at least.

    Raises:
        ConfigError: The configuration can't be used.
        PluginError: A backend isn't installed.
        PoolError: The host pool can't be had.
    """
    config = settings(source)
    if config.connect:
        return RemoteClient(socket_path(config.connect), config, f"sglang rank {rank}")
    if rank:
        path = socket_path(config.socket) if config.socket else engine_socket(engine, source)
        return RemoteClient(path, config, f"sglang rank {rank}")
    config = fitted(config, page_tokens, lease)
    if ranks > 1 and not config.socket:
        remove_stale_sockets(SOCKETS)  # SGLang kills what it does not need any more
        config = msgspec.structs.replace(config, socket=engine_socket(engine, source))
    client = DirectClient(build_node(config), owns=True)
    log.info(
        "KV of this engine is kept in %s of host memory in all, in pages of %d tokens and chunks of %d; tiers: %s "
        "(configured by %s)",
        format_size(config.cpu.capacity),
        config.page_tokens,
        config.chunk_tokens,
        ", ".join(tier.name for tier in config.tiers) or "none",
        source if isinstance(source, str) else "the extra configuration" if source else _by_default(),
    )
    return client


def fitted(config: Config, page_tokens: int, lease: float) -> Config:
    """The settings for an engine with pages of its own."""
    return msgspec.structs.replace(
        config,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens_for(page_tokens, config.chunk_tokens),
        lease_timeout=max(config.lease_timeout, lease),
    )


def _by_default() -> str:
    return os.environ.get(FILE_VARIABLE) or "defaults, as there is no file"
