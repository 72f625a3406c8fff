"""What a user may write in `--hicache-storage-backend-extra-config`, beside SGLang's own keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from lmcache_core.config.conversion import convert
from lmcache_core.config.environment import FILE_VARIABLE
from lmcache_core.errors import ConfigError
from lmcache_core.units import Duration

__all__ = ["THEIRS", "Options", "lacking", "read_options"]

THEIRS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys that are SGLang's."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the backend. A field's docstring is its documentation everywhere."""

    config: Any = None
    """The cache's configuration: path of a YAML file, or the settings themselves as a mapping. By default the file that
    the environment variable `LMCACHE_CORE_CONFIG` names."""
    weights_id: str = ""
    """Text that stands for these weights and no others, instead of a digest of the checkpoint's files."""
    lookup_timeout: Duration = 1.0
    """Time that a look-up waits at most for tiers that cannot tell at once what they hold."""
    read_timeout: Duration = 1.0
    """Time that a read of up to 128 pages may take, besides `read_timeout_per_ki_token`; what has not come by then is
    computed."""
    read_timeout_per_ki_token: Duration = 0.25
    """Time that a read may take for each 1024 tokens of it."""
    store_timeout: Duration = 1.0
    """Time that a store waits at most for pages in front of it that share a chunk with it and lie on a tier only."""
    retry_after: Duration = 5.0
    """Time for which a page that could not be read counts as missing."""
    promises: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Look-ups whose pages are kept until they have been read. The oldest are forgotten."""


def lacking(written: Mapping[str, Any], passes_prefix_keys: bool | None) -> list[str]:
    """What the extra configuration lacks for telling where in a prompt a run of pages begins, as it is written.

    Args:
        written: What of it has come to the backend.
        passes_prefix_keys: Whether SGLang has taken it to say so; None where that is not known.
    """
    found = [] if written.get("interface_v1") else ['"interface_v1": 1']
    return found if passes_prefix_keys in (True, None) else [*found, '"hicache_storage_pass_prefix_keys": true']


def read_options(written: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """The options in the extra configuration, and the keys in it that are neither ours nor SGLang's.

    Raises:
        ConfigError: One is not what it must be, or misspelt; the message says which and what to write.
    """
    names = Options.__struct_fields__
    strange = [key for key in written if key not in names and key not in THEIRS]
    for key in strange:
        meant = difflib.get_close_matches(str(key), names, n=1, cutoff=0.8)
        if meant:
            raise ConfigError(f"hicache-storage-backend-extra-config: unknown key {key!r}; did you mean {meant[0]!r}?")
    try:
        options = convert({key: value for key, value in written.items() if key in names}, Options)
    except ConfigError as error:
        raise ConfigError(f"hicache-storage-backend-extra-config: {error}") from error
    if options.config == "" or isinstance(options.config, bool | int | float | list):
        raise ConfigError(
            f"hicache-storage-backend-extra-config: config: {options.config!r} is no configuration; write the path of "
            f"a YAML file or the settings as a mapping, or leave it out for the file that {FILE_VARIABLE} names"
        )
    return options, strange
