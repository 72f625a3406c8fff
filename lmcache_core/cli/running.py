"""A node at work as commands see it: found by its socket, asked, and its namespaces chosen by name."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from lmcache_core.cli.disk_cache import can_be_inspected, look, namespace_of, the_one_named
from lmcache_core.cli.output import visible
from lmcache_core.client import SpaceStats
from lmcache_core.config import Config, load_config
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from lmcache_core.namespace import Namespace
from lmcache_core.service.address import AUTO, socket_path
from lmcache_core.service.remote import RemoteClient
from lmcache_core.units import format_duration, parse_duration

__all__ = [
    "Known",
    "add_node_options",
    "add_timeout_option",
    "connected",
    "listens",
    "namespaces_of",
    "not_there",
    "own_name",
    "registered",
    "settings_of",
    "the_namespace",
    "timeout_of",
]

NO_MANIFESTS: Mapping[bytes, bytes] = MappingProxyType({})
PATIENCE = 5.0
"""Least seconds that a node has for an answer: a person waits longer than an engine, and asks for more."""
DIGITS = 12
"""Hex digits of a namespace that people are shown."""


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which node is meant."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="socket of the node; by default the configuration's `connect`, or its `socket`, else `auto`",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the YAML file, for socket, salt and disk tiers; by default the one that LMCACHE_CORE_CONFIG names",
    )


def add_timeout_option(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Add `--timeout`, to be read with `timeout_of`."""
    parser.add_argument("--timeout", metavar="TIME", default=default, help=f"{text} (default: %(default)s)")
    parser.set_defaults(usage_error=parser.error)


def timeout_of(arguments: argparse.Namespace) -> float:
    """Seconds that `--timeout` says."""
    try:
        return parse_duration(arguments.timeout)
    except ConfigError as error:
        arguments.usage_error(f"--timeout: {error}")
        raise  # which it has ended already


def settings_of(arguments: argparse.Namespace) -> tuple[str, Config]:
    """The path of the socket that is meant, and the configuration.

    Raises:
        ConfigError: The configuration cannot be used, or the path is none.
    """
    config = load_config(None if arguments.config is None else Path(arguments.config)).config
    path = socket_path(arguments.socket or config.connect or config.socket or AUTO)
    return path, msgspec.structs.replace(config, call_timeout=max(config.call_timeout, PATIENCE))


def own_name(command: str) -> str:
    """What the node calls this process to people."""
    return f"lmcache-core {command} ({os.getpid()})"


@contextmanager
def connected(arguments: argparse.Namespace, *, must: bool = True) -> Iterator[tuple[RemoteClient, Config]]:
    """A client of the node that is meant; if it `must` be there, only then.

    Raises:
        LMCacheError: It is not there. The message says what to do.
    """
    path, config = settings_of(arguments)
    logging.getLogger("lmcache_core").addHandler(logging.NullHandler())  # what is wrong, the command says itself
    client = RemoteClient(path, config, own_name(arguments.command), operator=True)
    try:
        if must and not client.wait_until_up(0):
            raise not_there(client, config, file=arguments.config)
        yield client, config
    finally:
        client.close()


def not_there(client: RemoteClient, config: Config, error: str = "", file: str | None = None) -> LMCacheError:
    """Why there is no connection, or why a call ended with `error`, and what to do about it. `file` is the
    configuration that was named."""
    path = client.path
    why = error if "in time" in error else client.why or error
    try:
        there = listens(path, config.call_timeout)
    except BackendError as error:
        return error
    words = "" if file is None else f"--config {file} "
    if not there:
        return BackendError(
            f"there is no node at {path}; start it with: lmcache-core serve {words}--socket {path}; or name the socket "
            "of another one with --socket"
        )
    if "timed out" in why or "in time" in why:
        limit = format_duration(config.call_timeout)
        return BackendError(
            f"the node at {path} does not answer within {limit}; it may be stopped (SIGSTOP, a debugger) or busy; "
            "LMCACHE_CORE_CALL_TIMEOUT=10s waits longer"
        )
    return BackendError(why or f"the node at {path} is not connected yet")


def listens(path: str, timeout: float) -> bool:
    """Whether a process has the socket at `path`, whatever it says.

    Raises:
        BackendError: It is another user's.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return False
    except PermissionError:
        raise BackendError(f"the node at {path} is another user's; ask it as that user or as root") from None
    except OSError:  # it takes nobody now
        return True
    return True


@dataclass
class Known:
    """What a node holds of one namespace, or of a group of one that nobody has registered since it started."""

    namespace: Namespace | None
    digests: list[bytes]
    chunks: int = 0
    pages: int = 0
    pinned: int = 0
    leased: int = 0
    nbytes: dict[str, int] = field(default_factory=dict)
    """By place."""

    @property
    def id(self) -> str:
        """Hex digits that name it."""
        return self.digests[0].hex() if self.namespace is None else self.namespace.content.hex()

    @property
    def model(self) -> str:
        """Name of its model; empty if it is not known."""
        return "" if self.namespace is None else self.namespace.model_name

    def add(self, space: SpaceStats) -> None:
        """Count one group."""
        self.chunks += space.chunks
        self.pages += space.pages
        self.pinned += space.pinned
        self.leased += space.leased
        for place, nbytes in space.nbytes.items():
            self.nbytes[place] = self.nbytes.get(place, 0) + nbytes


def namespaces_of(spaces: Iterable[SpaceStats], manifests: Mapping[bytes, bytes] = NO_MANIFESTS) -> list[Known]:
    """The namespaces of a node, the largest first. `manifests` are of those that nobody has registered, by digest."""
    found: dict[bytes, Known] = {}
    for space in spaces:
        namespace = namespace_of(space.digest, space.manifest or manifests.get(space.digest, b""))
        digests = [space.digest]
        if namespace is not None:
            digests = _digests(namespace)
        found.setdefault(digests[0], Known(namespace, digests)).add(space)
    return sorted(found.values(), key=lambda known: (-sum(known.nbytes.values()), known.id))


def _digests(namespace: Namespace) -> list[bytes]:
    return [namespace.space(number) for number in range(len(namespace.groups))]


def manifests_below(config: Config) -> dict[bytes, bytes]:
    """What lies beside the chunks on the disk tiers of a configuration, by digest."""
    found: dict[bytes, bytes] = {}
    for tier in config.tiers:
        for path in tier.options.paths() if can_be_inspected(tier.backend) else ():
            with suppress(BackendError):  # there is none yet, or it cannot be read
                found |= look(Path(path)).manifests
    return found


def the_namespace(client: RemoteClient, name: str | None, config: Config) -> Known:
    """The namespace that a name of a model or the first digits of a digest mean; without any, the only one. One that
    nobody has registered is known by its manifest, if it is on a disk tier of the configuration.

    Raises:
        LMCacheError: There is none, or several. The message says which there are.
    """
    spaces = client.spaces()
    known = namespaces_of(spaces)
    if any(each.namespace is None for each in known):
        known = namespaces_of(spaces, manifests_below(config))
    if name is not None:
        found = the_one_named(name, known)
        if found is None:
            raise LMCacheError(f"there is no namespace {name!r}; the node has: {_listed(known)}")
        return found
    known = [each for each in known if each.chunks] or known  # what nothing is stored of is not what is meant
    if not known:
        raise LMCacheError(f"the node at {client.path} knows of no model yet; an engine must have used it first")
    if len(known) > 1:
        raise LMCacheError(f"the node has {len(known)} namespaces; choose one with --namespace: {_listed(known)}")
    return known[0]


def registered(known: Known) -> Namespace:
    """What its chunks are of.

    Raises:
        LMCacheError: Nobody has told the node since it started.
    """
    if known.namespace is None:
        raise LMCacheError(
            f"no engine has told this node what {known.id[:DIGITS]} is of since it started; name the configuration "
            "that has the node's tiers with --config"
        )
    return known.namespace


def _nameless(known: Known) -> str:
    return "unknown" if known.namespace is None else "no name"


def _listed(known: Sequence[Known]) -> str:
    return ", ".join(f"{visible(each.model) or _nameless(each)} ({each.id[:DIGITS]})" for each in known) or "none"
