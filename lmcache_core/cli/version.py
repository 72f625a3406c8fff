"""`lmcache-core version`"""

from __future__ import annotations

import argparse

from lmcache_core import __version__
from lmcache_core.cli.output import add_json_option, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the version."""
    if arguments.json:
        print_json({"version": __version__})
    else:
        print(f"lmcache-core {__version__}")
    return 0
