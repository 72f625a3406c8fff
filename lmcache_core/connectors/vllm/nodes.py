"""Which node an engine's processes use: one in the scheduler's process, found by the engine's id, or another one."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
from typing import Any

import msgspec

from lmcache_core.assembly import build_node, settings
from lmcache_core.client import AHEAD, Client
from lmcache_core.config import Config
from lmcache_core.config.environment import FILE_VARIABLE
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.namespace import chunk_tokens_for, page_tokens_for
from lmcache_core.service.address import remove_stale_sockets, runtime_socket, socket_path
from lmcache_core.service.remote import RemoteClient
from lmcache_core.units import format_size

__all__ = ["Door", "WorkerDoor", "check_pages", "engine_socket", "open_door"]

log = logging.getLogger(__name__)

SOCKETS = "vllm-"
"""What the sockets of engines' nodes begin with."""

_here: dict[str, DirectClient] = {}
"""Clients of the nodes that live in this process, by engine."""
_lock = threading.Lock()


@dataclasses.dataclass
class Door:
    """A client, and the settings by which it was opened."""

    client: Client
    config: Config

    def close(self) -> None:
        """Let go of the node; one that is the engine's own is closed."""
        with _lock:
            for engine, client in list(_here.items()):
                if client is self.client:
                    del _here[engine]
        self.client.close()


def engine_socket(name: str) -> str:
    """Where the node of an engine listens for the engine's own processes."""
    return socket_path(runtime_socket(f"{SOCKETS}{hashlib.sha256(name.encode()).hexdigest()[:16]}"))


def _name(engine: str, source: Any) -> str:
    """What a node is known by: an engine may have several, each with settings of its own."""
    return f"{engine} {source!r}"


def open_door(source: Any, engine: str, blocks: int, *, processes: bool, past_host: bool = False) -> Door:
    """The scheduler's way to its node: one of its own, unless the settings name another.

    Args:
        source: The cache's configuration.
        engine: Id of the engine.
        blocks: Tokens that a page must be a multiple of.
        processes: Whether workers are in other processes, and need a socket.
        past_host: Workers read to their devices, if they can: then nothing is to come to the pool before they ask.

    Raises:
        ConfigError: The configuration can't be used.
        PluginError: A backend isn't installed.
        PoolError: The host pool can't be had.
    """
    config = settings(source)
    if config.connect:
        ahead = 0 if past_host else AHEAD
        client = RemoteClient(socket_path(config.connect), config, f"vllm {engine[:8]}", ahead=ahead)
        try:
            if client.wait_until_up(0):
                check_pages(client.page_tokens, client.chunk_tokens, blocks, config.connect)
        except ConfigError:
            client.close()
            raise
        return Door(client, config)
    page = page_tokens_for([blocks], config.page_tokens)
    chunk = chunk_tokens_for(page, config.chunk_tokens)
    if (page, chunk) != (config.page_tokens, config.chunk_tokens):
        log.info("page_tokens %d and chunk_tokens %d, as vLLM has blocks of %d tokens", page, chunk, blocks)
        config = msgspec.structs.replace(config, page_tokens=page, chunk_tokens=chunk)
    if processes and not config.socket:
        remove_stale_sockets(SOCKETS)  # vLLM kills what it does not need any more
        config = msgspec.structs.replace(config, socket=engine_socket(_name(engine, source)))
    node = build_node(config)
    own = DirectClient(node, owns=True)
    with _lock:
        _here[_name(engine, source)] = own
    log.info(
        "KV of engine %s is kept in %s of host memory in all, in pages of %d tokens and chunks of %d; tiers: %s "
        "(configured by %s)",
        engine,
        format_size(config.cpu.capacity),
        page,
        chunk,
        ", ".join(tier.name for tier in config.tiers) or "none",
        source if isinstance(source, str) else "kv_connector_extra_config" if source else _by_default(),
    )
    return Door(own, config)


def _by_default() -> str:
    return os.environ.get(FILE_VARIABLE) or "defaults, as there is no file"


def check_pages(page: int, chunk: int, blocks: int, where: str) -> None:
    """A node that others use too must have pages that fit.

    Raises:
        ConfigError: It hasn't.
    """
    if page % blocks:
        raise ConfigError(
            f"the node at {where} has pages of {page} tokens, and this engine blocks of {blocks}: start the node with "
            f"page_tokens: {page_tokens_for([blocks], page)} and chunk_tokens: "
            f"{chunk_tokens_for(page_tokens_for([blocks], page), chunk)}"
        )


class WorkerDoor:
    """A worker's way to the node: that of its own process once it is there, else by a socket.

    Args:
        source: The cache's configuration.
        engine: Id of the engine.
        shard: What this rank holds of a chunk.
        same_process: Whether the scheduler is in this process.
        past_host: Read to devices of this process, where that can be done.
    """

    def __init__(self, source: Any, engine: str, shard: int, *, same_process: bool, past_host: bool = False) -> None:
        self._config = settings(source)
        self._engine = engine
        self._name = _name(engine, source)
        self._shard = shard
        self._same_process = same_process
        self._past_host = past_host
        self._client: Client | None = None

    @property
    def layout(self) -> str:
        """How chunks shall lie."""
        return self._config.layout

    def client(self) -> Client | None:
        """The client; None while the node is not there."""
        if self._client is None:
            self._client = self._find()
        return self._client

    def _find(self) -> Client | None:
        config = self._config
        if config.connect:
            return self._remote(socket_path(config.connect), f"vllm {self._engine[:8]} rank {self._shard}")
        if self._same_process:
            with _lock:
                own = _here.get(self._name)
            return None if own is None else DirectClient(own.node, shard=self._shard)
        path = socket_path(config.socket) if config.socket else engine_socket(self._name)
        return self._remote(path, f"vllm rank {self._shard}")

    def _remote(self, path: str, name: str) -> RemoteClient:
        return RemoteClient(path, self._config, name, shard=self._shard, past_host=self._past_host)

    def close(self) -> None:
        """Let go of it."""
        if self._client is not None:
            self._client.close()
            self._client = None
