"""`lmcache-core config`: check, show, schema, migrate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import Column, add_json_option, print_error, print_json, print_note, print_table, visible
from lmcache_core.config import InvalidConfig, LoadedConfig, load_config, migrate, schema, show
from lmcache_core.config.document import MAX_BYTES
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.service.address import socket_path
from lmcache_core.units import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="config_command", required=True)

    text = "Say whether a configuration is valid; opens nothing. The exit code is 1 if not."
    check = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument(
        "file", metavar="FILE", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    add_json_option(check)
    check.set_defaults(run=run_check)

    text = "Print every setting in force and where it is from. Secrets are masked."
    shown = commands.add_parser("show", help=text, description=text, allow_abbrev=False)
    shown.add_argument(
        "file", metavar="FILE", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    add_json_option(shown)
    shown.set_defaults(run=run_show)

    text = "Print a JSON schema of the file, with the options of all installed backends."
    described = commands.add_parser("schema", help=text, description=text, allow_abbrev=False)
    add_json_option(described)
    described.set_defaults(run=run_schema)

    text = "Convert a configuration of LMCache: YAML to standard output, what became of each key to standard error."
    migrated = commands.add_parser("migrate", help=text, description=text, allow_abbrev=False)
    migrated.add_argument("file", metavar="FILE", help="LMCache's YAML file")
    add_json_option(migrated)
    migrated.set_defaults(run=run_migrate)


def run_check(arguments: argparse.Namespace) -> int:
    """Load a configuration as an engine would, and make its backends without opening them."""
    loaded = None
    problems: Sequence[str] = ()
    try:
        loaded = load_usable(arguments.file)
    except InvalidConfig as error:
        problems = error.problems
    except LMCacheError as error:
        problems = [str(error)]
    warnings = [] if loaded is None else _warnings(loaded)
    if arguments.json:
        name = arguments.file if loaded is None else loaded.provenance.name
        connect = (loaded and loaded.config.connect) or None
        told = {"file": name, "valid": not problems, "error": next(iter(problems), None), "errors": list(problems)}
        print_json(told | {"warnings": warnings, "connect": connect and socket_path(connect)})
    elif loaded is None:
        for problem in problems:
            print_error(problem)
    else:
        for warning in warnings:
            print_note(f"warning: {warning}")
        connect = loaded.config.connect
        tiers = ", ".join(tier.name for tier in loaded.config.tiers) or "none"
        what = f"uses the node at {socket_path(connect)} and its tiers" if connect else f"tiers: {tiers}"
        print(visible(f"{loaded.provenance.name}: valid; {what}; nothing was opened"))
    return 1 if problems else 0


def _warnings(loaded: LoadedConfig) -> list[str]:
    """What cannot work on this machine now, though it may on another."""
    from lmcache_core.hostpool import available_memory  # imports what moves KV

    capacity, free = loaded.config.cpu.capacity, available_memory()
    if loaded.config.connect or free is None or capacity <= free:  # the memory is the node's then
        return []
    where = loaded.provenance.nearest(("cpu", "capacity"))
    return [
        f"{where}: cpu.capacity: {format_size(capacity)} is more than the {format_size(free)} of memory that this "
        "machine has free; an engine here would not start"
    ]


def run_show(arguments: argparse.Namespace) -> int:
    """Print the settings in force."""
    settings = show(load_config(None if arguments.file is None else Path(arguments.file)))
    if arguments.json:
        print_json({"settings": [{"key": each.key, "value": each.plain, "source": each.source} for each in settings]})
    else:
        print_table([Column("setting"), Column("value"), Column("from")], [setting[:3] for setting in settings])
    return 0


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the schema, which is JSON in any case."""
    print_json(schema())
    return 0


def run_migrate(arguments: argparse.Namespace) -> int:
    """Convert LMCache's file."""
    result = migrate(_read(arguments.file), arguments.file)
    if arguments.json:
        print_json({"yaml": result.yaml_text, "notes": [note._asdict() for note in result.notes]})
        return 0
    for note in result.notes:
        print_note(f"{note.status}: {note.key}: {note.why}")
    print(result.yaml_text, end="")
    return 0


def _read(file: str) -> str:
    with open(file, "rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes; this is not a configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8 text; save the file as UTF-8") from None
