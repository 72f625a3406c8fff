"""`lmcache-core freeze`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json
from lmcache_core.cli.running import add_node_options, connected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument("--off", action="store_true", help="have it store again")
    add_node_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Have a node store nothing new, or go on."""
    with connected(arguments) as (client, _):
        client.freeze(not arguments.off)
    if arguments.json:
        print_json({"socket": client.path, "frozen": not arguments.off})
    elif arguments.off:
        print(f"the node at {client.path} stores again")
    else:
        undo = "undo it with: lmcache-core freeze --off"
        print(f"the node at {client.path} stores nothing new and serves what it has; {undo}")
    return 0
