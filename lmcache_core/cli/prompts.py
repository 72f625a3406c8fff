"""Prompts as commands are given them, and their place at a node."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lmcache_core.cache import Cache, Prompt
from lmcache_core.cli.running import add_node_options, connected, registered, the_namespace
from lmcache_core.config import Config
from lmcache_core.errors import LMCacheError
from lmcache_core.service.remote import RemoteClient

__all__ = ["AtNode", "add_prompt_options", "at_node", "read_tokens"]

ADVICE = "write token ids as a JSON list or separated by white space; text needs --tokenizer DIR"


class AtNode(NamedTuple):
    """A prompt, and the node that is asked about it."""

    client: RemoteClient
    config: Config
    cache: Cache
    prompt: Prompt

    def told(self) -> dict[str, object]:
        """For programs: what was asked about."""
        namespace = self.cache.namespace
        return {
            "socket": self.client.path,
            "namespace": namespace.content.hex(),
            "model": namespace.model_name or None,
            "tokens": self.prompt.tokens,
        }


def add_prompt_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add what names a prompt, and the node that is meant."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?" if optional else None,
        help="the prompt's token ids, as a JSON list or separated by white space; - for standard input",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="FILE is text: tokenize it with the Hugging Face tokenizer in DIR"
    )
    parser.add_argument("--salt", metavar="TEXT", help="salt of the tenant, on top of the configuration's")
    parser.add_argument("--adapter", metavar="NAME", help="identity of the LoRA adapter, as the engine gives it")
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="name of the model or first digits of the namespace, as `status` shows them; the only one by default",
    )
    add_node_options(parser)


@contextmanager
def at_node(arguments: argparse.Namespace) -> Iterator[AtNode]:
    """The prompt that is meant, and a connection to the node.

    Raises:
        LMCacheError: The prompt cannot be read, or the node or the namespace is not there.
    """
    tokens = read_tokens(arguments.file, arguments.tokenizer)
    with connected(arguments) as (client, config):
        namespace = registered(the_namespace(client, arguments.namespace, config))
        cache = Cache(client, namespace, salt=config.salt)
        yield AtNode(client, config, cache, cache.prompt(tokens, salt=arguments.salt, adapter=arguments.adapter))


def read_tokens(file: str, tokenizer: str | None = None) -> list[int]:
    """The token ids in a file; of its text, if there is a tokenizer.

    Raises:
        LMCacheError: They cannot be read.
        OSError: The file cannot be.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LMCacheError(f"{file} is no UTF-8 text; {ADVICE}") from error
    tokens = _ids(file, text) if tokenizer is None else _tokenized(text, tokenizer)
    if not tokens:
        raise LMCacheError(f"{file} has no tokens; {ADVICE}")
    return tokens


def _ids(file: str, text: str) -> list[int]:
    if not text.lstrip().startswith("["):
        return [_id(file, word) for word in text.split()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LMCacheError(f"{file} is no JSON: {error}; {ADVICE}") from error
    return [_id(file, each) for each in found]


def _id(file: str, value: object) -> int:
    number = value
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) <= 10:
        number = int(value)
    if type(number) is not int or not 0 <= number < 1 << 32:
        shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:40] + "..."
        raise LMCacheError(f"{file}: {shown} is no token id; {ADVICE}")
    return number


def _tokenized(text: str, directory: str) -> list[int]:
    if not Path(directory).is_dir():
        raise LMCacheError(f"{directory} is no directory; --tokenizer needs one with a tokenizer of a model")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise LMCacheError("--tokenizer needs transformers: pip install 'lmcache-core[transformers]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # files of others are read here, by code of others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LMCacheError(f"{directory}: no tokenizer that can be loaded: {reason}") from error
    return list(tokenizer(text)["input_ids"])
