"""`lmcache-core drain`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json, print_note
from lmcache_core.cli.running import add_node_options, connected
from lmcache_core.errors import ConfigError
from lmcache_core.units import parse_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "--timeout", metavar="TIME", default="60s", help="how long it may take to write (default: %(default)s)"
    )
    add_node_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Have a node write what is queued and end. The exit code is 1 if not all was written in time."""
    try:
        limit = parse_duration(arguments.timeout)
    except ConfigError as error:
        arguments.usage_error(f"--timeout: {error}")
    with connected(arguments) as (client, _):
        try:
            written = client.drain(limit)
        except TimeoutError:  # it does not even answer
            written = False
    if arguments.json:
        print_json({"socket": client.path, "written": written})
    elif written:
        print(f"the node at {client.path} has written everything; it ends, or stays frozen inside an engine")
    else:
        print_note(f"the node at {client.path} has not written everything within {arguments.timeout}")
    return 0 if written else 1
