"""`lmcache-core clear`: deletes through the backend itself, and only what nobody uses."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lmcache_core.cli.clear_node import clear_node, holdings, node_of_process, node_that_is_named, tier_of_path
from lmcache_core.cli.clear_shared import Survey, clear_listed, survey
from lmcache_core.cli.disk_cache import Inspected, Shard, Space, can_be_inspected, look, namespaces, the_one_named
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import add_json_option, print_json, print_note, visible
from lmcache_core.cli.running import connected, settings_of
from lmcache_core.config import Config, TierConfig
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import Scannable, StorageBackend
from lmcache_core.service.remote import RemoteClient
from lmcache_core.units import format_size

_BATCH = 256
_BOUNDLESS = 1 << 50
OTHERS = (
    "what others have stored there, and this node has not looked up, stays; clear it with --config and the file that "
    "has the tier"
)
DOWN = "the node could not use it, so what lies there stays; clear it once it is up again (`lmcache-core status`)"
READ_ONLY = "it is only read (write: never); clear it where it is written"


class _Target(NamedTuple):
    """One tier, or the path of one."""

    name: str
    backend: str
    options: Any
    paths: list[Path]
    read_only: bool = False
    tier: TierConfig | None = None
    """As the configuration has it, if it is no disk's."""


class _Outcome(NamedTuple):
    """What became of a tier."""

    tier: str
    chunks: int
    nbytes: int
    problem: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument("path", metavar="PATH", nargs="?", help="the `path` of a disk tier")
    parser.add_argument("--config", metavar="FILE", help="clear every tier of this configuration instead")
    parser.add_argument("--socket", metavar="PATH", help="clear the node at this socket instead, memory too")
    parser.add_argument(
        "--tier", metavar="TIER", action="append", help="only this tier; may be given more than once; not with PATH"
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="only chunks of this namespace: its model's name, or the first digits of what `lmcache-core inspect` "
        "or `lmcache-core status` prints",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Delete chunks. The exit code is 1 if a tier could not be cleared, or if the answer was no."""
    named = [each for each in (arguments.path, arguments.config, arguments.socket) if each is not None]
    if len(named) != 1:
        arguments.usage_error("name either PATH or --config FILE, or --socket PATH for a node at work")
    if arguments.path is not None and arguments.tier is not None:
        arguments.usage_error("PATH is of one tier; --tier goes with --config or --socket")
    if not arguments.yes and not sys.stdin.isatty():
        arguments.usage_error("nobody can be asked here; add --yes")
    if arguments.socket is not None:
        with connected(arguments) as (client, _):
            return _clear_node(arguments, client, arguments.tier)
    if arguments.config is None:
        targets, config = [_path(arguments.path)], None
        _refuse_if_no_cache(targets[0].paths[0])
    else:
        config = load_usable(arguments.config).config
        targets = _tiers(config, arguments.config, arguments.tier)
    seen = {target.name: [look(path) for path in target.paths if path.is_dir()] for target in targets}
    owners = {_process(shard) for found in seen.values() for each in found for shard in each.shards if shard.locked}
    with _node(arguments, config, targets, owners) as node:
        if node is not None:
            _refuse_if_elsewhere(node, targets, seen)
            return _clear_node(arguments, node, _places(arguments, node, targets), targets, _read_only(targets))
    for target in targets:
        _refuse_if_in_use(target, seen[target.name])
    shared: dict[str, Survey] = {}
    if arguments.namespace is not None or not arguments.yes:
        shared = _surveyed(targets)
    wanted = None
    if arguments.namespace is not None:
        wanted = _namespace(arguments.namespace, [each for found in seen.values() for each in found], shared.values())
    if not arguments.yes and not _confirmed(targets, seen, shared, wanted):
        return 1
    outcomes = [_clear(target, seen[target.name], wanted) for target in targets]
    _tell(outcomes, as_json=arguments.json)
    for target in targets:
        left = [shard.name for each in seen[target.name] for shard in each.shards if not shard.readable]
        if left:
            print_note(f"{target.name}: left as they are, since they cannot be read: {', '.join(left)}")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def _node(
    arguments: argparse.Namespace, config: Config | None, targets: Sequence[_Target], owners: set[str]
) -> AbstractContextManager[RemoteClient | None]:
    """The node that is to be asked: the one that the configuration names, else the one that has the tiers open."""
    if config is None or not (config.connect or config.socket):
        if not targets:
            raise LMCacheError(
                f"{arguments.config} has no tiers, and names no node with `socket` or `connect`: there is nothing to "
                "clear; name the node with --socket PATH (an engine without a socket clears its own with Cache.clear)"
            )
        return node_of_process(arguments, owners)
    wants_memory = "cpu" in (arguments.tier or ())
    return node_that_is_named(arguments, owners, must=not targets or wants_memory)


def _places(arguments: argparse.Namespace, node: RemoteClient, targets: Sequence[_Target]) -> list[str] | None:
    if arguments.path is not None:
        return [tier_of_path(node, targets[0].paths[0], None)]
    if not targets:
        return None if arguments.tier is None else list(arguments.tier)
    memory = ["cpu"] if arguments.tier is None or "cpu" in arguments.tier else []
    return memory + [target.name for target in targets if not target.read_only]


def _refuse_if_elsewhere(node: RemoteClient, targets: Sequence[_Target], seen: dict[str, list[Inspected]]) -> None:
    """
    Raises:
        LMCacheError: The node uses a tier of that name, but not what lies at its path.
    """
    up = {tier.name for tier in node.stats().tiers if tier.up}
    for target in targets:
        locked = any(shard.locked for each in seen[target.name] for shard in each.shards)
        if target.paths and not target.read_only and target.name in up and not locked:
            raise LMCacheError(
                f"the node at {node.path} has a tier {target.name!r}, but not at {target.paths[0]}; clear what the "
                f"node has with: lmcache-core clear --socket {node.path}; and the path with: lmcache-core clear "
                f"{target.paths[0]}"
            )


def _read_only(targets: Sequence[_Target]) -> list[_Outcome]:
    return [_Outcome(target.name, 0, 0, READ_ONLY) for target in targets if target.read_only]


def _clear_node(
    arguments: argparse.Namespace,
    node: RemoteClient,
    tiers: Sequence[str] | None,
    targets: Sequence[_Target] = (),
    left: Sequence[_Outcome] = (),
) -> int:
    known, shares = holdings(node, arguments.namespace, tiers, settings_of(arguments)[1])
    if not arguments.yes:
        told = [(share.tier, share.chunks, share.nbytes) for share in shares]
        print_note(f"the node at {node.path}:")
        if not _agreed(told):
            return 1
    down = _down(node)
    cleared = clear_node(node, known, shares)
    down |= _down(node)
    outcomes = [
        _Outcome(share.tier, share.chunks or 0, share.nbytes, DOWN if share.tier in down else None) for share in cleared
    ]
    others = {target.name: target for target in targets if target.tier is not None}
    for tier in node.stats().tiers:
        if tier.shared:
            spaces = None if known is None else frozenset(known.digests)
            outcomes = [
                _with_others(each, others.get(tier.name), spaces) if each.tier == tier.name else each
                for each in outcomes
            ]
    outcomes += left
    _tell(outcomes, as_json=arguments.json)
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def _with_others(cleared: _Outcome, target: _Target | None, spaces: frozenset[bytes] | None) -> _Outcome:
    """A shared tier, of which the node has deleted what it knew: what others have stored there goes too."""
    if target is None or target.tier is None:
        return cleared._replace(problem=cleared.problem or OTHERS)
    try:
        others = clear_listed(target.tier, spaces)
    except LMCacheError as error:
        return cleared._replace(problem=str(error))
    if others is None:
        return cleared._replace(problem=cleared.problem or OTHERS)
    return _Outcome(cleared.tier, cleared.chunks + others[0], cleared.nbytes + others[1], None)


def _down(node: RemoteClient) -> set[str]:
    return {tier.name for tier in node.stats().tiers if not tier.up}


def _path(text: str) -> _Target:
    path = Path(text).absolute()
    if not path.is_dir():
        raise LMCacheError(f"{path} is no directory; name the `path` of a disk tier")
    options = msgspec.convert(
        {"path": str(path), "capacity": _BOUNDLESS, "min_free": 0}, load_backend("disk").options_type
    )
    return _Target(str(path), "disk", options, [path])


def _tiers(config: Config, file: str, only: Sequence[str] | None) -> list[_Target]:
    targets: list[_Target] = []
    if config.connect:
        return targets  # which the node knows
    tiers = config.tiers
    known = [tier.name for tier in tiers] + (["cpu"] if config.socket else [])
    if unknown := [name for name in only or () if name not in known]:
        names = ", ".join(known)
        raise ConfigError(f"there is no tier {unknown[0]!r}; {file} has {names or 'none'}")
    for tier in tiers:
        if only is not None and tier.name not in only:
            continue
        paths = [Path(path) for path in tier.options.paths()] if can_be_inspected(tier.backend) else []
        targets.append(
            _Target(tier.name, tier.backend, tier.options, paths, tier.write == "never", None if paths else tier)
        )
    return targets


def _refuse_if_in_use(target: _Target, found: Sequence[Inspected]) -> None:
    """
    Raises:
        LMCacheError: A process has the tier open.
    """
    for inspected in found:
        for shard in inspected.shards:
            if shard.locked:
                raise _in_use(target.name, shard)


def _in_use(name: str, shard: Shard) -> LMCacheError:
    return LMCacheError(
        f"{name} is in use by process {_process(shard)} (shard {shard.name}); stop that process, or clear the cache "
        "from it (a node with a socket: lmcache-core clear --socket PATH)"
    )


def _process(shard: Shard) -> str:
    return shard.owner.partition("-")[0] or "unknown"


def _refuse_if_no_cache(path: Path) -> None:
    """
    Raises:
        LMCacheError: Something else lies there.
    """
    if not look(path).shards and any(path.iterdir()):
        raise LMCacheError(
            f"{path}: no cache of this user; name the `path` of a disk tier, and be the user that its engine runs as; "
            "what is no disk tier's is cleared with --config"
        )


def _surveyed(targets: Sequence[_Target]) -> dict[str, Survey]:
    """What lies on shared tiers, by their names; of those that cannot be reached their clearing tells."""
    found = {}
    for target in targets:
        if target.tier is not None and not target.read_only:
            with suppress(LMCacheError):
                if (each := survey(target.tier)) is not None:
                    found[target.name] = each
    return found


def _namespace(prefix: str, found: Sequence[Inspected], shared: Iterable[Survey]) -> Space:
    by_digest = {space.digests[0]: space for space in namespaces(found)}
    for each in shared:
        for listed in each.spaces():
            by_digest.setdefault(listed.digests[0], listed)
    stored = list(by_digest.values())
    space = the_one_named(prefix, stored)
    if space is None:
        names = ", ".join(each.id[:16] for each in stored) or "none"
        raise LMCacheError(f"there is no namespace {prefix!r}; stored are: {names}")
    return space


def _confirmed(
    targets: Sequence[_Target], seen: dict[str, list[Inspected]], shared: dict[str, Survey], wanted: Space | None
) -> bool:
    told: list[tuple[str, int | None, int | None]] = []
    for target in targets:
        if not target.paths and target.name not in shared:
            told.append((target.name, None, None))
            continue
        stored = namespaces(seen[target.name]) if target.paths else shared[target.name].spaces()
        stored = [each for each in stored if wanted is None or each.digests[0] in wanted.digests]
        told.append((target.name, sum(each.chunks for each in stored), sum(each.nbytes for each in stored)))
    return _agreed(told)


def _agreed(told: Sequence[tuple[str, int | None, int | None]]) -> bool:
    """Whether somebody says yes to deleting so many chunks of so many bytes, by tier."""
    for name, chunks, nbytes in told:
        known = [] if chunks is None else [f"{chunks} chunks"]
        known += [] if nbytes is None else [format_size(nbytes)]
        print_note(f"{name}: {', '.join(known)}" if known else name)
    print("Delete them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _clear(target: _Target, found: Sequence[Inspected], wanted: Space | None) -> _Outcome:
    if target.read_only:
        return _Outcome(target.name, 0, 0, READ_ONLY)
    if target.paths and not any(inspected.shards for inspected in found):
        return _Outcome(target.name, 0, 0, None)  # opening it would make it
    digests = None if wanted is None else frozenset(wanted.digests)
    try:
        backend = load_backend(target.backend).create(target.options)
        if isinstance(backend, Scannable):
            chunks, nbytes = asyncio.run(_delete(target, backend, digests))
        elif target.tier is not None and (cleared := clear_listed(target.tier, digests)) is not None:
            chunks, nbytes = cleared
        else:
            return _Outcome(target.name, 0, 0, f"backend {target.backend} cannot list what it holds; clear it there")
    except LMCacheError as error:
        return _Outcome(target.name, 0, 0, str(error))
    return _Outcome(target.name, chunks, nbytes, None)


async def _delete(target: _Target, backend: StorageBackend, digests: frozenset[bytes] | None) -> tuple[int, int]:
    assert isinstance(backend, Scannable)
    await backend.open()
    try:
        await asyncio.to_thread(_check_owner, target)
        stored = [
            each async for batch in backend.scan() for each in batch if digests is None or each.key.space in digests
        ]
        for start in range(0, len(stored), _BATCH):
            await backend.delete([each.key for each in stored[start : start + _BATCH]])
        return len(stored), sum(each.nbytes for each in stored)
    finally:
        await backend.close()


def _check_owner(target: _Target) -> None:
    """Opening has taken every shard that was free; one that is another's has an owner who came just now, or whom this
    system does not show. What cannot be read nobody takes."""
    for path in target.paths:
        for shard in look(path).shards:
            if shard.readable and not shard.owner.startswith(f"{os.getpid()}-"):
                raise _in_use(target.name, shard)


def _tell(outcomes: Sequence[_Outcome], *, as_json: bool) -> None:
    if as_json:
        chunks, nbytes = sum(each.chunks for each in outcomes), sum(each.nbytes for each in outcomes)
        print_json({"chunks": chunks, "nbytes": nbytes, "tiers": [each._asdict() for each in outcomes]})
        return
    for each in outcomes:
        if each.problem is None or each.chunks:
            print(visible(f"{each.tier}: {each.chunks} chunks deleted, {format_size(each.nbytes)}"))
        if each.problem is not None:
            print_note(f"{each.tier}: not cleared: {each.problem}")
