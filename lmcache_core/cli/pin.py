"""`lmcache-core pin`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json, print_note
from lmcache_core.cli.prompts import add_prompt_options, at_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_prompt_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pin what can be restored of a prompt. The exit code is 1 if that is nothing."""
    with at_node(arguments) as at:
        model = at.client.register(at.cache.namespace)
        pinned = at.client.pin(model, at.prompt.keys, kept=True) * at.cache.page_tokens
    if arguments.json:
        print_json(at.told() | {"pinned": pinned})
    elif pinned:
        print(f"{pinned} of {at.prompt.tokens} tokens are pinned until they are unpinned or the node ends")
    else:
        print_note("nothing of this prompt is there to be pinned")
    return 0 if pinned else 1
