"""`lmcache-core unpin`"""

from __future__ import annotations

import argparse

from lmcache_core.cli.output import add_json_option, print_json
from lmcache_core.cli.prompts import add_prompt_options, at_node
from lmcache_core.cli.running import connected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    add_prompt_options(parser, optional=True)
    parser.add_argument("--all", action="store_true", help="undo every pin of `lmcache-core pin`, instead of FILE's")
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Undo pins of `lmcache-core pin`."""
    if (arguments.file is None) != arguments.all:
        arguments.usage_error("name either FILE or --all")
    if arguments.all:
        with connected(arguments) as (client, _):
            chunks = client.unpin_kept()
        if arguments.json:
            print_json({"socket": client.path, "unpinned_chunks": chunks})
        else:
            print(f"{chunks} chunks are pinned no longer")
        return 0
    with at_node(arguments) as at:
        model = at.client.register(at.cache.namespace)
        undone = at.client.unpin_one(model, at.prompt.keys, kept=True)
    tokens = undone.pages * at.cache.page_tokens
    if arguments.json:
        print_json(at.told() | {"unpinned": tokens, "left": undone.left})
    elif not undone.was:
        print("this prompt was not pinned by `lmcache-core pin`")
    else:
        left = f"; this prompt is still pinned {_times(undone.left)}" if undone.left else ""
        print(f"{tokens} of {at.prompt.tokens} tokens are pinned no longer{left}")
    return 0


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
