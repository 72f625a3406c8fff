"""`lmcache-core prefetch`"""

from __future__ import annotations

import argparse
from concurrent.futures import CancelledError

from lmcache_core.cli.output import add_json_option, print_json, print_note, visible
from lmcache_core.cli.prompts import add_prompt_options, at_node
from lmcache_core.cli.running import add_timeout_option, not_there, timeout_of
from lmcache_core.units import format_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_prompt_options(parser)
    parser.add_argument(
        "--to", metavar="TIER", default="cpu", help="where to bring it, `cpu` for memory (default: %(default)s)"
    )
    parser.add_argument(
        "--from",
        metavar="TIER",
        action="append",
        dest="source",
        help="only from this tier; may be given more than once; any by default",
    )
    add_timeout_option(parser, "30s", "how long to wait for it")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Bring what can be restored of a prompt to a tier. The exit code is 1 if that is nothing, or takes longer than the
    timeout."""
    limit = timeout_of(arguments)
    with at_node(arguments) as at:
        model = at.client.register(at.cache.namespace)
        future = at.client.prefetch(model, at.prompt.keys, arguments.source, arguments.to)
        try:
            tokens = future.result(limit) * at.cache.page_tokens
            late = False
        except (TimeoutError, CancelledError):
            tokens, late = 0, True
        if not at.client.wait_until_up(0):
            raise not_there(at.client, at.config)
    if arguments.json:
        print_json(at.told() | {"destination": arguments.to, "there": tokens, "late": late})
    elif late:
        print(visible(f"it is not all on {arguments.to} within {format_duration(limit)}; it goes on"))
    elif not tokens:
        print_note(f"nothing of this prompt is there to be brought to {arguments.to}")
    else:
        print(visible(f"{tokens} of {at.prompt.tokens} tokens are on {arguments.to}"))
    return 0 if tokens else 1
