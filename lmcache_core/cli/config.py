"""`lmcache-core config`: check, show, schema, migrate."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmcache_core.cli.output import Column, add_json_option, print_error, print_json, print_note, print_table, visible
from lmcache_core.config import LoadedConfig, load_config, migrate, schema, show
from lmcache_core.config.document import MAX_BYTES
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.plugins import load_backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="config_command", required=True)

    text = "Say whether a configuration can be used; the exit code is 1 if not."
    check = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("file", metavar="FILE", help="the YAML file")
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
    problem = None
    try:
        loaded = load_config(Path(arguments.file))
        _make_backends(loaded)
    except LMCacheError as error:
        problem = str(error)
    if arguments.json:
        print_json({"file": arguments.file, "valid": problem is None, "error": problem})
    elif problem is not None:
        print_error(problem)
    else:
        tiers = ", ".join(tier.name for tier in loaded.config.tiers) or "none"
        print(visible(f"{arguments.file}: can be used; tiers: {tiers}"))
    return 0 if problem is None else 1


def _make_backends(loaded: LoadedConfig) -> None:
    """Backends see contradictions between their options, and say so when they are made."""
    for number, tier in enumerate(loaded.config.tiers):
        try:
            load_backend(tier.backend).create(tier.options)
        except ConfigError as error:
            raise ConfigError(f"{loaded.provenance.nearest(('tiers', number))}: tiers[{number}]: {error}") from error


def run_show(arguments: argparse.Namespace) -> int:
    """Print the settings in force."""
    settings = show(load_config(None if arguments.file is None else Path(arguments.file)))
    if arguments.json:
        print_json({"settings": [setting._asdict() for setting in settings]})
    else:
        print_table([Column("setting"), Column("value"), Column("from")], settings)
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
