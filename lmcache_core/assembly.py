"""Builds what a configuration asks for: a node of plugins' backends with its servers, or a client of another node."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from lmcache_core.client import Client
from lmcache_core.config import Config, InvalidSetting, LoadedConfig, load_config
from lmcache_core.config.rules import check
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.node import Node
from lmcache_core.plugins import check_capacity, load_backend

Source: TypeAlias = "str | Path | dict[str, Any] | Config | LoadedConfig | None"
"""Path of a YAML file, YAML text, a dict, settings that were loaded before, or None for what the environment names."""


def settings(source: Source) -> Config:
    """The settings that a source holds, checked.

    Raises:
        ConfigError: They can't be used.
    """
    if isinstance(source, LoadedConfig):
        return source.config
    if not isinstance(source, Config):
        return load_config(source).config
    try:
        check(source)
    except InvalidSetting as invalid:
        raise ConfigError(str(invalid)) from invalid
    return source


def build_client(source: Source) -> tuple[Client, str]:
    """A client of the node that the settings name, or of one of its own in this process. Returns the salt besides.

    Raises:
        ConfigError: The configuration can't be used.
        PluginError: A backend isn't installed or can't be loaded.
        PoolError: The host pool can't be had.
    """
    config = settings(source)
    if config.connect:
        from lmcache_core.service.address import socket_path  # for those who use it
        from lmcache_core.service.remote import RemoteClient

        return RemoteClient(socket_path(config.connect), config), config.salt
    return DirectClient(build_node(config), owns=True), config.salt


def build_node(source: Source) -> Node:
    """Start a node, with the servers that its settings ask for.

    Raises:
        ConfigError: The configuration can't be used, or what shall be served can't be.
        PluginError: A backend isn't installed or can't be loaded.
        PoolError: The host pool can't be had.
    """
    config = settings(source)
    backends = [load_backend(tier.backend).create(tier.options) for tier in config.tiers]
    for number, (tier, backend) in enumerate(zip(config.tiers, backends, strict=True)):
        check_capacity(f"tiers[{number}]", tier, backend)
    node = Node(config, backends)
    try:
        if config.metrics.enabled:
            from lmcache_core.checkup import Checkup
            from lmcache_core.metrics import serve_metrics  # imports Prometheus, for those who want it

            checkup = Checkup(node)
            checks = {"/healthz": checkup.alive, "/readyz": checkup.ready}
            metrics = serve_metrics(DirectClient(node), config, checks)
            if metrics is not None:
                node.servers.append(metrics)
        if config.socket:
            from lmcache_core.service.address import socket_path
            from lmcache_core.service.server import NodeServer

            node.servers.append(NodeServer(node, socket_path(config.socket)))
    except BaseException:  # a port in use, say: the node must not stay behind
        node.close()
        raise
    return node
