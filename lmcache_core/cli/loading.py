"""A configuration as commands read it: whatever `config check` refuses, each of them refuses."""

from __future__ import annotations

from pathlib import Path

from lmcache_core.config import InvalidConfig, InvalidSetting, LoadedConfig, load_config
from lmcache_core.config.conversion import dotted
from lmcache_core.config.loading import MOST_PROBLEMS
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.plugins import check_capacity, load_backend

__all__ = ["load_usable"]


def load_usable(file: str | None) -> LoadedConfig:
    """The configuration of a file, else of the one that LMCACHE_CORE_CONFIG names, else the defaults. Its backends
    have been made, since they see contradictions between their options; nothing is opened.

    Raises:
        InvalidConfig: It can't be used. The message has file, line and key.
    """
    from lmcache_core.coding.recipe import recipe_of  # imports what hashes, for those who have a configuration

    loaded = load_config(None if file is None else Path(file))
    problems = []
    for number, tier in enumerate(loaded.config.tiers):
        place = ("tiers", number)
        try:
            backend = load_backend(tier.backend).create(tier.options)
        except (ConfigError, PluginError) as error:
            below = error.key if isinstance(error, InvalidSetting) else ()
            problems.append(f"{loaded.provenance.nearest((*place, *below))}: {dotted(place)}: {error}")
            continue
        try:
            recipe_of(dotted(place), tier, backend)
            check_capacity(dotted(place), tier, backend)
        except ConfigError as error:
            problems.append(f"{loaded.provenance.nearest(place)}: {error}")
    if problems:
        raise InvalidConfig(problems[:MOST_PROBLEMS])
    return loaded
