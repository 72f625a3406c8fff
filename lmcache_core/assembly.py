"""Builds a node out of a configuration: loads the plugins it names and makes their backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmcache_core.config import Config, InvalidSetting, LoadedConfig, load_config
from lmcache_core.config.rules import check
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.node import Node
from lmcache_core.plugins import load_backend


def build_node(source: str | Path | dict[str, Any] | Config | LoadedConfig | None) -> Node:
    """Start a node.

    Args:
        source: Path of a YAML file, YAML text, a dict, settings that were loaded before, or None for what the
            environment names.

    Raises:
        ConfigError: The configuration can't be used.
        PluginError: A backend isn't installed or can't be loaded.
        PoolError: The host pool can't be had.
    """
    if isinstance(source, LoadedConfig):
        config = source.config
    elif isinstance(source, Config):
        config = source
        try:
            check(config)
        except InvalidSetting as invalid:
            raise ConfigError(str(invalid)) from invalid
    else:
        config = load_config(source).config
    node = Node(config, [load_backend(tier.backend).create(tier.options) for tier in config.tiers])
    if config.metrics.enabled:
        from lmcache_core.metrics import serve_metrics  # imports Prometheus, for those who want it

        try:
            node.metrics = serve_metrics(DirectClient(node), config)
        except BaseException:  # a port in use, say: the node must not stay behind
            node.close()
            raise
    return node
