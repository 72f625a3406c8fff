"""`lmcache-core lookup`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import Column, add_json_option, print_json, print_table, visible
from lmcache_core.cli.prompts import add_prompt_options, at_node

COLUMNS = [Column("tier"), Column("holds", right=True), Column("would give", right=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_prompt_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say what a node has of a prompt. Nothing is counted, renewed or read for it."""
    with at_node(arguments) as at:
        cache, prompt = at.cache, at.prompt
        model = at.client.register(cache.namespace)
        found = at.client.lookup(model, prompt.keys, quiet=True)
        gives = {tier: pages * cache.page_tokens for tier, pages in found.tiers.items()}
        holds = cache.contains(prompt)
    restorable = found.pages * cache.page_tokens
    if arguments.json:
        told = at.told() | {"page_tokens": cache.page_tokens, "restorable": restorable}
        print_json(told | {"tiers": {tier: {"holds": holds[tier], "gives": gives.get(tier, 0)} for tier in holds}})
        return 0
    print(visible(f"{restorable} of {prompt.tokens} tokens of this prompt can be restored"))
    print_table(COLUMNS, [(tier, str(number), str(gives.get(tier, 0))) for tier, number in holds.items()])
    return 0
