"""Backends and transfers by name: found in the metadata of installed packages, imported on first use.

Built-in plugins and third parties' come through the same door. Each plugin has a plugin manager of its own, so a hook
call reaches exactly the plugin that was named and no other can answer for it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pluggy

from lmcache_core import hookspecs
from lmcache_core.config.conversion import InvalidSetting
from lmcache_core.config.fields import Field, fields_of, secrets_of
from lmcache_core.config.masking import mask
from lmcache_core.config.structs import TierConfig
from lmcache_core.errors import ConfigError, LMCacheError, PluginError
from lmcache_core.extras import extra_of, lacking
from lmcache_core.protocols import Scannable, StorageBackend

if TYPE_CHECKING:
    from lmcache_core.protocols import Transfer

__all__ = [
    "BackendInfo",
    "BackendPlugin",
    "TransferPlugin",
    "list_backends",
    "load_backend",
    "load_transfer",
]

BACKENDS = "lmcache_core.backends"
TRANSFERS = "lmcache_core.transfers"

_DISTRIBUTION = "lmcache-core"
# Names people may expect and that this version lacks.
_LATER = frozenset({"infinistore"})
# Names by which people know what a backend of ours is for, without separators: the backend, and what to say of it.
_FILES = ("disk", " for a drive of this host, 'backend: nfs' for a file system that hosts share")
_ANY_SHARED = ("nfs", ", which is for any file system that hosts share")
_ANY_S3 = ("s3", ", which is for any server that speaks S3")
_KNOWN_AS = {
    **dict.fromkeys(("file", "files", "filesystem", "fs", "posix"), _FILES),
    **dict.fromkeys(("local", "localdisk", "localfs", "nvme", "ssd"), ("disk", "")),
    **dict.fromkeys(("beegfs", "cephfs", "gluster", "gpfs", "lustre", "sharedfs", "weka"), _ANY_SHARED),
    **dict.fromkeys(("ceph", "minio", "r2", "seaweedfs"), _ANY_S3),
    **dict.fromkeys(("azblob", "azureblob", "blob"), ("azure", "")),
    **dict.fromkeys(("google", "googlecloud", "gs"), ("gcs", "")),
    **dict.fromkeys(("cufile", "gpudirect", "kvikio"), ("gds", "")),
    **dict.fromkeys(("rediss", "rediscluster"), ("redis", "")),
    "s3express": ("s3", ", which is for S3 Express too"),
    "valkey": ("redis", ", which is for Valkey too"),
}
_MEMORY = frozenset({"dram", "host", "hostmemory", "localcpu", "mem", "memory", "ram"})
# What a tier understands itself. `capacity` is for both: the node evicts by it, and a backend may want to know it.
_TIER_KEYS = frozenset(field.key for field in fields_of(TierConfig)) - {"capacity"}


class BackendPlugin(NamedTuple):
    """A backend that can be created."""

    name: str
    options_type: type[msgspec.Struct]
    create: Callable[[Any], StorageBackend]
    """Takes an instance of `options_type`. Raises `ConfigError` if the options contradict each other."""


class TransferPlugin(NamedTuple):
    """A transfer that can be created."""

    name: str
    create: Callable[[Mapping[str, Any]], Transfer]


class BackendInfo(NamedTuple):
    """An installed backend, for people."""

    name: str
    distribution: str
    version: str
    options: tuple[Field, ...]
    error: str | None
    """Why it can't be used; None if it can."""
    lacks: tuple[str, ...] = ()
    """Packages of its extra that aren't installed, without which it can't be opened, or can't do all."""
    extra: str = ""
    """Its extra, as pip takes it; empty if it has none."""


def check_capacity(place: str, tier: TierConfig, backend: StorageBackend) -> None:
    """See that somebody keeps to a tier's `capacity`: the node, of what it can list, or the backend.

    Raises:
        ConfigError: Nobody does.
    """
    fields = getattr(tier.options, "__struct_fields__", ())
    if tier.capacity is not None and not isinstance(backend, Scannable) and "capacity" not in fields:
        raise ConfigError(
            f"{place}.capacity: a tier of {tier.backend!r} is not bounded by this node, since others store there too; "
            "delete capacity, and bound it where it is kept (maxmemory, a lifecycle rule, a quota)"
        )


@functools.cache
def load_backend(name: str) -> BackendPlugin:
    """The backend plugin of that name.

    Raises:
        PluginError: It isn't installed, or what is installed is broken; the message says what to do.
    """
    plugin = _Plugin(BACKENDS, name, needs=("lmcache_backend_options", "lmcache_create_backend"))
    try:
        options_type = plugin.call("lmcache_backend_options")
    except Exception as failure:  # a plugin may raise anything; who wrote it must hear what
        raise plugin.error(f"lmcache_backend_options failed: {type(failure).__name__}: {failure}") from failure
    if not (isinstance(options_type, type) and issubclass(options_type, msgspec.Struct)):
        raise plugin.error(f"lmcache_backend_options returned {options_type!r}; it must return a msgspec.Struct type")
    if not options_type.__struct_config__.forbid_unknown_fields:
        raise plugin.error(f"declare {options_type.__name__} with forbid_unknown_fields=True: typing errors must show")
    try:
        keys = {field.key for field in fields_of(options_type)}
    except Exception as error:  # annotations are evaluated here, so a plugin may raise anything
        raise plugin.error(f"its options {options_type.__name__} cannot be read: {error}") from error
    if taken := sorted(_TIER_KEYS & keys):
        raise plugin.error(f"option {taken[0]!r} is a key of every tier; rename it")

    def create(options: Any) -> StorageBackend:
        try:
            backend = plugin.call("lmcache_create_backend", options=options)
        except Exception as failure:  # a plugin may raise anything
            told = _told(plugin, options, failure)
            if told is failure:
                raise
            raise told from (failure if str(failure) in str(told) else None)
        if not isinstance(backend, StorageBackend):
            verbs = ("open", "close", "contains", "read", "write", "delete")
            lacking = [verb for verb in verbs if inspect.getattr_static(backend, verb, None) is None]
            raise plugin.error(f"lmcache_create_backend returned a {type(backend).__name__} without {lacking}")
        return backend

    return BackendPlugin(name, options_type, create)


@functools.cache
def load_transfer(name: str) -> TransferPlugin:
    """The transfer plugin of that name.

    Raises:
        PluginError: It isn't installed, or what is installed is broken; the message says what to do.
    """
    plugin = _Plugin(TRANSFERS, name, needs=("lmcache_create_transfer",))

    def create(options: Mapping[str, Any]) -> Transfer:
        transfer: Transfer = plugin.call("lmcache_create_transfer", options=options)
        if transfer is None:
            raise plugin.error("lmcache_create_transfer returned None")
        return transfer

    return TransferPlugin(name, create)


def list_backends() -> list[BackendInfo]:
    """All installed backends by name, also those that can't be used. Imports every one of them."""
    result = []
    for name, entries in sorted(_installed(BACKENDS).items()):
        options: tuple[Field, ...] = ()
        error = None
        try:
            options = fields_of(load_backend(name).options_type)
        except PluginError as broken:
            error = str(broken)
        distributions = ", ".join(_distribution(entry) for entry in entries)
        versions = ", ".join(entry.dist.version if entry.dist else "?" for entry in entries)
        lacks, extra = lacking(entries[0].dist, name), extra_of(entries[0].dist, name)
        result.append(BackendInfo(name, distributions, versions, options, error, lacks, extra))
    return result


class _Plugin:
    """One plugin, alone in its manager."""

    def __init__(self, group: str, name: str, needs: Iterable[str]) -> None:
        self._kind = "backend" if group == BACKENDS else "transfer"
        self._name = name
        self._entry = _find(group, name)
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        plugin = self._import()
        self._check_names(plugin)
        try:
            self._manager.register(plugin, name=name)
        except pluggy.PluginValidationError as invalid:
            raise self.error(str(invalid)) from invalid
        for hook in needs:
            if not getattr(self._manager.hook, hook).get_hookimpls():
                raise self.error(f"it has no hook {hook}; define it and mark it with @lmcache_core.hookspecs.hookimpl")

    def error(self, problem: str) -> PluginError:
        return PluginError(
            mask(f"{self._kind} {self._name!r} ({self._entry.value}, from {_distribution(self._entry)}): {problem}")
        )

    def call(self, hook: str, **arguments: object) -> Any:
        return getattr(self._manager.hook, hook)(**arguments)

    def _import(self) -> object:
        try:
            return self._entry.load()
        except Exception as failure:  # A stranger's module may raise anything; it must not stop the others.
            extra = extra_of(self._entry.dist, self._name) if isinstance(failure, ImportError) else ""
            advice = f"; to install what it needs: pip install {extra!r}" if extra else ""
            raise self.error(f"cannot be imported: {type(failure).__name__}: {failure}{advice}") from failure

    def _check_names(self, plugin: object) -> None:
        known = [name for name in vars(hookspecs) if name.startswith("lmcache_")]
        for name in dir(plugin):
            marked = self._manager.parse_hookimpl_opts(plugin, name) is not None
            if marked and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise self.error(f"there is no hook {name!r}; {advice}")
            if name in known and not marked:
                raise self.error(f"{name} is not marked as a hook; mark it with @lmcache_core.hookspecs.hookimpl")


def _installed(group: str) -> dict[str, list[EntryPoint]]:
    """Entry points of a group by name. One that a distribution lists twice alike counts once."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=group):
        found.setdefault(entry.name, {}).setdefault((_distribution(entry), entry.value), entry)
    return {name: list(entries.values()) for name, entries in found.items()}


def _find(group: str, name: str) -> EntryPoint:
    installed = _installed(group)
    kind = "backend" if group == BACKENDS else "transfer"
    entries = installed.get(name, [])
    if not entries:
        advice = (group == BACKENDS and _advice(name, installed)) or _near(name, installed)
        names = ", ".join(sorted(installed)) or "none"
        raise PluginError(f"there is no {kind} {mask(repr(name))}{advice}; installed are: {names}")
    if len(entries) > 1:
        owners = " and ".join(f"{_distribution(entry)} ({entry.value})" for entry in entries)
        raise PluginError(f"{kind} {name!r} is provided by {owners}; uninstall all but one")
    return entries[0]


def _advice(name: str, installed: Collection[str]) -> str:
    """What is meant by the name of a backend that there is not; empty if that is not known."""
    if name in _LATER:
        return f"; this version of {_DISTRIBUTION} has no such backend"
    plain = re.sub(r"[-_. ]", "", name.lower())
    if plain in _MEMORY:
        return "; memory is no tier: write 'cpu: {capacity: 20GiB}', which stands beside 'tiers'"
    backend, what = _KNOWN_AS.get(plain, ("", ""))
    return f"; write 'backend: {backend}'{what}" if backend in installed else ""


def _near(name: str, installed: Collection[str]) -> str:
    near = difflib.get_close_matches(name.lower(), installed, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown distribution"


def _told(plugin: _Plugin, options: Any, failure: Exception) -> Exception:
    """What a backend raised instead of being made, without the secrets it may have written into the text."""
    secrets = secrets_of(options) if isinstance(options, msgspec.Struct) else []
    text = mask(str(failure), secrets)
    if not isinstance(failure, LMCacheError):
        return plugin.error(f"lmcache_create_backend failed: {type(failure).__name__}: {text}")
    if text == str(failure):
        return failure
    if isinstance(failure, InvalidSetting):
        return InvalidSetting(failure.key, text)
    return ConfigError(text) if isinstance(failure, ConfigError) else PluginError(text)
