"""Which node an engine's ranks use: one in the process of the first rank, which the others join by a socket, or one
that runs by itself."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence

import msgspec

from lmcache_core.assembly import Source, build_node, settings
from lmcache_core.client import Client
from lmcache_core.config import Config, LoadedConfig, load_config
from lmcache_core.config.environment import FILE_VARIABLE, PREFIX
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.namespace import chunk_tokens_for
from lmcache_core.protocols import Scannable
from lmcache_core.service.address import remove_stale_sockets, runtime_socket, socket_path
from lmcache_core.service.remote import RemoteClient
from lmcache_core.units import format_size

__all__ = ["engine_name", "engine_settings", "engine_socket", "open_client"]

log = logging.getLogger(__name__)

SOCKETS = "sglang-"
"""What the sockets of engines' nodes begin with."""
PAGE_VARIABLE = f"{PREFIX}PAGE_TOKENS"


def engine_name(replica: int = 0) -> str:
    """What an engine is known by in all its processes on a host, and no other engine on any: the process that has
    started them, of which container and start of which machine, and which of the engines that it has started."""
    parent = os.getppid()
    began = _read(f"/proc/{parent}/stat").rpartition(")")[2].split()[19:20]
    machine = _read("/proc/sys/kernel/random/boot_id").strip()
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:  # a kernel that does not tell
        container = ""
    return f"{machine} {container} {parent} {' '.join(began)} {replica}"


def _read(path: str) -> str:
    """A file of the kernel's; empty if it does not tell, or tells somebody else."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def engine_settings(source: Source) -> Config:
    """The settings in the cache's configuration. `chunk_tokens` may be any: pages are those of the engine, and chunks
    are whole pages of them.

    Raises:
        ConfigError: They can't be used.
    """
    if isinstance(source, Config | LoadedConfig):
        return settings(source)
    try:
        return load_config(source).config
    except ConfigError as error:
        if isinstance(source, str) and f"{source!r} cannot be read" in str(error) and not os.path.isabs(source):
            raise ConfigError(
                f"{error}; it was looked for in {os.getcwd()}, where SGLang was started: write the path from / on"
            ) from error
        try:
            loaded = load_config(source, {**os.environ, PAGE_VARIABLE: "1"})
        except ConfigError:
            raise error from None
    return loaded.config


def engine_socket(engine: str, source: Source) -> str:
    """Where the node of an engine listens for the engine's own processes."""
    name = hashlib.sha256(f"{engine} {source!r}".encode()).hexdigest()[:16]
    return socket_path(runtime_socket(f"{SOCKETS}{name}"))


def open_client(
    source: Source,
    engine: str,
    page_tokens: int,
    *,
    rank: int,
    ranks: int,
    lease: float,
    lacks: Sequence[str] = (),
) -> Client:
    """A rank's way to its node.

    Args:
        source: The cache's configuration.
        engine: Name of the engine.
        page_tokens: Tokens of a page of it.
        rank: Of those on this host; the first has the node.
        ranks: How many there are.
        lease: Seconds for which what was found must be kept at least.
        lacks: What the extra configuration lacks for telling where in a prompt a run of pages begins.

    Raises:
        ConfigError: The configuration can't be used, or not with what the engine tells.
        PluginError: A backend isn't installed.
        PoolError: The host pool can't be had.
    """
    config = engine_settings(source)
    said = source if isinstance(source, str) else "the extra configuration" if source else _by_default()
    if config.connect:
        path = socket_path(config.connect)
        if not rank:
            log.info(
                "KV of this engine is kept by the node at %s, in pages of %d tokens (configured by %s)",
                path,
                page_tokens,
                said,
            )
            if lacks:
                log.warning("%s; do so if the node has such tiers", _unplaced(lacks))
        return RemoteClient(path, config, f"sglang rank {rank}")
    if rank:
        path = socket_path(config.socket) if config.socket else engine_socket(engine, source)
        return RemoteClient(path, config, f"sglang rank {rank}")
    config = fitted(config, page_tokens, lease)
    if ranks > 1 and not config.socket:
        remove_stale_sockets(SOCKETS)  # SGLang kills what it does not need any more
        config = msgspec.structs.replace(config, socket=engine_socket(engine, source))
    client = DirectClient(build_node(config), owns=True)
    asked = [tier.config.name for tier in client.node.runners if not isinstance(tier.backend, Scannable)]
    if asked and lacks:
        client.close()
        raise ConfigError(f"{_unplaced(lacks)}, and {', '.join(asked)} cannot")
    log.info(
        "KV of this engine is kept in %s of host memory in all, in pages of %d tokens and chunks of %d; tiers: %s "
        "(configured by %s)",
        format_size(config.cpu.capacity),
        config.page_tokens,
        config.chunk_tokens,
        ", ".join(tier.name for tier in config.tiers) or "none",
        said,
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


def _unplaced(lacks: Sequence[str]) -> str:
    """A chunk has the name of its last page, whatever the others are. A tier that lists what it holds tells them, any
    other is asked by names that follow from the prompt's start."""
    return (
        f"hicache-storage-backend-extra-config: write {' and '.join(lacks)}: without, it is not known where in a "
        "prompt a run of pages begins, and tiers that cannot list what they hold are asked for the wrong chunks"
    )


def _by_default() -> str:
    return os.environ.get(FILE_VARIABLE) or "defaults, as there is no file"
