"""`lmcache-core inspect`"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from lmcache_core.cli.disk_cache import Entry, Inspected, Shard, Space, look, namespaces
from lmcache_core.cli.output import (
    Column,
    add_json_option,
    age,
    byte_progress,
    print_json,
    print_note,
    print_table,
    visible,
)
from lmcache_core.cli.verification import Damage, verify_entries
from lmcache_core.units import format_size

T = TypeVar("T")

LIVE = {True: "in use", False: "left", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument("path", metavar="PATH", help="the `path` of a disk tier")
    parser.add_argument(
        "--verify", action="store_true", help="read every chunk and check its checksums; exit code 1 if one is damaged"
    )
    parser.add_argument("--chunks", action="store_true", help="list every chunk")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say what lies below a path. The exit code is 1 if that is no cache, or one with damage."""
    path = Path(arguments.path)
    inspected = look(path)
    damage = _verify(path, inspected) if arguments.verify else None
    if arguments.json:
        print_json(_plain(arguments.path, inspected, damage, chunks=arguments.chunks))
    elif inspected.shards:
        _print(inspected, damage, chunks=arguments.chunks)
        _name_owners(inspected)
    if not inspected.shards:
        print_note(
            f"{path}: no cache of this user; name the `path` of a disk tier, and be the user that its engine runs as"
        )
        return 1
    logs_damaged = arguments.verify and any(shard.damaged for shard in inspected.shards)
    return 1 if damage or logs_damaged else 0


def _name_owners(inspected: Inspected) -> None:
    owners = sorted({_process(shard) or "unknown" for shard in inspected.shards if shard.locked})
    if owners:
        print_note(
            f"in use by process {', '.join(owners)}; what it holds now, memory included, and who uses it: "
            "lmcache-core status"
        )


def _verify(path: Path, inspected: Inspected) -> list[Damage]:
    with byte_progress() as bar:
        task = bar.add_task("verifying", total=_nbytes(inspected.entries()))
        return verify_entries(path, inspected.entries(), lambda nbytes: bar.advance(task, nbytes))


def _nbytes(entries: Iterable[Entry]) -> int:
    return sum(entry.stored.nbytes for entry in entries)


# For people


def _print(inspected: Inspected, damage: list[Damage] | None, *, chunks: bool) -> None:
    _print_rows(SHARDS, inspected.shards)
    print()
    _print_rows(NAMESPACES, namespaces([inspected]))
    if chunks:
        print()
        _print_rows(CHUNKS, inspected.entries())
    if damage is not None:
        print()
        _print_damage(inspected, damage)


def _print_rows(fields: Sequence[tuple[Column, Callable[[T], str]]], items: Iterable[T]) -> None:
    print_table([column for column, _ in fields], [[cell(item) for _, cell in fields] for item in items])


def _print_damage(inspected: Inspected, damage: list[Damage]) -> None:
    checked = sum(len(shard.entries) for shard in inspected.shards)
    print(f"{checked} chunks checked, {len(damage)} damaged")
    for entry, problem in damage:
        print(visible(f"{entry.file} at {entry.offset}: chunk {entry.stored.key.page.hex()[:16]}: {problem}"))
    if damage:
        print("a damaged chunk is a miss and is deleted when it is asked for; look for errors of the drive in dmesg")


def _process(shard: Shard) -> str:
    """The process that an owner says it is."""
    return shard.owner.partition("-")[0]


def _last_use(shard: Shard) -> float | None:
    return shard.entries[-1].used if shard.entries else None


def _model(space: Space) -> str:
    return "" if space.namespace is None else space.namespace.model_name


def _dtype(space: Space) -> str:
    return "" if space.namespace is None else ", ".join(dict.fromkeys(group.dtype for group in space.namespace.groups))


def _kinds(space: Space) -> list[str]:
    return [] if space.namespace is None else [group.kind.value for group in space.namespace.groups]


def _number(header: str) -> Column:
    return Column(header, right=True)


SHARDS: Sequence[tuple[Column, Callable[[Shard], str]]] = (
    (Column("shard"), lambda shard: shard.name),
    (Column("owner"), lambda shard: _process(shard) or "-"),
    (Column("state"), lambda shard: LIVE[shard.locked] if shard.readable else "unreadable"),
    (_number("chunks"), lambda shard: str(len(shard.entries))),
    (_number("stored"), lambda shard: format_size(_nbytes(shard.entries))),
    (_number("on disk"), lambda shard: format_size(shard.nbytes)),
    (_number("last use"), lambda shard: age(_last_use(shard))),
    (_number("log damage"), lambda shard: str(shard.damaged)),
)
NAMESPACES: Sequence[tuple[Column, Callable[[Space], str]]] = (
    (Column("namespace"), lambda space: space.id[:16]),
    (Column("model"), lambda space: _model(space) or "unknown"),
    (Column("dtype"), lambda space: _dtype(space) or "-"),
    (Column("groups"), lambda space: " ".join(_kinds(space)) or "-"),
    (_number("page"), lambda space: "-" if space.namespace is None else str(space.namespace.page_tokens)),
    (_number("chunks"), lambda space: str(space.chunks)),
    (_number("stored"), lambda space: format_size(space.nbytes)),
    (_number("last use"), lambda space: age(space.used[1])),
    (_number("oldest"), lambda space: age(space.used[0])),
)
CHUNKS: Sequence[tuple[Column, Callable[[Entry], str]]] = (
    (Column("space"), lambda entry: entry.stored.key.space.hex()[:16]),
    (Column("last page"), lambda entry: entry.stored.key.page.hex()[:16]),
    (_number("pages"), lambda entry: str(len(entry.stored.pages))),
    (_number("stored"), lambda entry: format_size(entry.stored.nbytes)),
    (_number("last use"), lambda entry: age(entry.used)),
    (_number("offset"), lambda entry: str(entry.offset)),
    (Column("file"), lambda entry: str(entry.file)),
)


# For programs


def _plain(path: str, inspected: Inspected, damage: list[Damage] | None, *, chunks: bool) -> dict[str, object]:
    return {
        "path": path,
        "chunks": sum(len(shard.entries) for shard in inspected.shards),
        "nbytes": _nbytes(inspected.entries()),
        "shards": [_plain_shard(shard) for shard in inspected.shards],
        "namespaces": [_plain_space(space) for space in namespaces([inspected])],
        "entries": [_plain_entry(entry) for entry in inspected.entries()] if chunks else None,
        "verification": None if damage is None else _plain_verification(inspected, damage),
    }


def _plain_shard(shard: Shard) -> dict[str, object]:
    return {
        "name": shard.name,
        "owner": shard.owner,
        "in_use": shard.locked,
        "readable": shard.readable,
        "chunks": len(shard.entries),
        "nbytes": _nbytes(shard.entries),
        "file_bytes": shard.nbytes,
        "log_damage": shard.damaged,
        "first_use": shard.entries[0].used if shard.entries else None,
        "last_use": _last_use(shard),
    }


def _plain_space(space: Space) -> dict[str, object]:
    namespace = space.namespace
    return {
        "id": space.id,
        "encoding": None if namespace is None else namespace.encoding_digest.hex(),
        "model": _model(space) or None,
        "dtype": _dtype(space) or None,
        "page_tokens": None if namespace is None else namespace.page_tokens,
        "groups": _kinds(space),
        "spaces": [digest.hex() for digest in space.digests],
        "chunks": space.chunks,
        "nbytes": space.nbytes,
        "first_use": space.used[0],
        "last_use": space.used[1],
    }


def _plain_entry(entry: Entry) -> dict[str, object]:
    return {
        "space": entry.stored.key.space.hex(),
        "page": entry.stored.key.page.hex(),
        "parent": entry.stored.parent.hex(),
        "pages": len(entry.stored.pages),
        "nbytes": entry.stored.nbytes,
        "used": entry.used,
        "file": str(entry.file),
        "offset": entry.offset,
    }


def _plain_verification(inspected: Inspected, damage: list[Damage]) -> dict[str, object]:
    return {
        "checked": sum(len(shard.entries) for shard in inspected.shards),
        "damaged": [{**_plain_entry(entry), "problem": problem} for entry, problem in damage],
    }
