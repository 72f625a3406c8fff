"""`lmcache-core backends`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import Column, add_json_option, print_json, print_note, print_table, visible
from lmcache_core.plugins import BackendInfo, list_backends

COLUMNS = [Column("option"), Column("type"), Column("default"), Column("meaning")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List what is installed. The exit code is 1 if one of them is broken."""
    found = list_backends()
    if arguments.json:
        print_json({"backends": [_plain(info) for info in found]})
    else:
        for number, info in enumerate(found):
            print("\n" if number else "", end="")
            _print(info)
        if not found:
            print_note("no backend is installed, not even those of lmcache-core: install it again")
    return 1 if not found or any(info.error for info in found) else 0


def _print(info: BackendInfo) -> None:
    print(visible(f"{info.name} ({info.distribution} {info.version})"))
    if info.error is not None:
        print(visible(f"cannot be used: {info.error}"))
        return
    if info.lacks:
        are = "is" if len(info.lacks) == 1 else "are"
        print(visible(f"lacks {' and '.join(info.lacks)}, which {are} not installed: {_install(info)}"))
    if info.options:
        print_table(COLUMNS, [(each.key, each.type, each.default, each.description) for each in info.options])
    else:
        print("no options")


def _install(info: BackendInfo) -> str:
    return f"pip install '{info.extra}'"


def _plain(info: BackendInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "error": info.error,
        "lacks": list(info.lacks),
        "install": _install(info) if info.lacks else None,
        "options": [
            {
                "key": each.key,
                "type": each.type,
                "default": None if each.required else each.default,
                "required": each.required,
                "secret": each.secret,
                "description": each.description,
            }
            for each in info.options
        ],
    }
