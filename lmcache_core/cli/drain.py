"""`lmcache-core drain`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json, print_note
from lmcache_core.cli.running import add_node_options, add_timeout_option, connected, timeout_of
from lmcache_core.units import format_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_timeout_option(parser, "60s", "how long it may take to write")
    add_node_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Have a node write what is queued and end. The exit code is 1 if not all was written in time."""
    limit = timeout_of(arguments)
    with connected(arguments) as (client, _):
        ends, engine = client.stats().standalone, client.node_pid
        try:
            written = client.drain(limit)
        except TimeoutError:  # it does not even answer
            written = False
    if ends:
        then = "it ends"
    else:
        process = f" (process {engine})" if engine else ""
        then = f"it stays frozen inside its engine{process} until: lmcache-core freeze --off --socket {client.path}"
    if arguments.json:
        print_json({"socket": client.path, "written": written, "ends": ends})
    elif written:
        print(f"the node at {client.path} has written everything; {then}")
    else:
        print_note(f"the node at {client.path} has not written everything within {format_duration(limit)}; {then}")
    return 0 if written else 1
