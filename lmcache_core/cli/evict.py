"""`lmcache-core evict`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json
from lmcache_core.cli.prompts import add_prompt_options, at_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_prompt_options(parser)
    parser.add_argument(
        "--tier",
        metavar="TIER",
        action="append",
        help="only from this tier, `cpu` for memory; may be given more than once",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take the chunks of a prompt out of tiers."""
    with at_node(arguments) as at:
        chunks = at.cache.evict(at.prompt, arguments.tier)
        model = at.client.register(at.cache.namespace)
        left = at.client.lookup(model, at.prompt.keys, arguments.tier, quiet=True).pages * at.cache.page_tokens
    if arguments.json:
        print_json(at.told() | {"chunks": chunks, "left": left})
    else:
        print(f"{chunks} chunks evicted" + (f"; {left} tokens stay, pinned or in use" if left else ""))
    return 0
