"""The command `lmcache-core`.

A command is a module of this package (`bench tier` is `bench_tier`) with `add_arguments(parser)`, which also says what
to run: `parser.set_defaults(run=...)`, a function of the parsed arguments that returns the exit code. Only the module
of the command that was asked for is imported, so `lmcache-core version` costs no more than it says.

Exit codes: 0 all is well, 1 a problem was found, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from lmcache_core import __version__
from lmcache_core.cli.output import accept_any_text, print_error
from lmcache_core.errors import LMCacheError

__all__ = ["COMMANDS", "joined", "main", "make_parser"]

COMMANDS = {
    "demo": "Show with a small model on this machine's CPU what reusing a prefix saves.",
    "bench": "Measure memory and the configured tiers on this machine, as ratios of what it can do.",
    "bench tier": "Measure one tier through its backend, beside what the machine can do there.",
    "plan": "Say for which prompts loading is faster than computing, and which chunks use a link well.",
    "doctor": "Try every tier of a configuration, and say what to fix.",
    "serve": "Run a node that all engines of this host share.",
    "status": "Show what a node holds, who uses it, and how much of what is asked for it has.",
    "lookup": "Say how many tokens of a prompt a node has, and on which tiers.",
    "prefetch": "Bring a prompt to a tier of a node, to memory by default.",
    "pin": "Keep a prompt where it is in a node, until it is unpinned or the node ends.",
    "unpin": "Undo what `lmcache-core pin` has pinned.",
    "evict": "Take a prompt out of tiers of a node, but for what is pinned or in use.",
    "freeze": "Have a node store nothing new, while it serves what it has.",
    "drain": "Have a node store nothing new, write what is queued, and end if it is a process of its own.",
    "config": "Check, explain, describe or convert a configuration.",
    "backends": "List the installed storage backends with their options.",
    "inspect": "Say what lies below the path of a disk tier; changes nothing, also while it is in use.",
    "clear": "Delete what is stored on a disk tier, on all tiers of a configuration, or in a node at work.",
    "copy": "Copy what one tier holds to another.",
    "version": "Print the version.",
}

INTERRUPTED = 130
BROKEN_PIPE = 141


def make_parser(*names: str) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the arguments of the commands `names` only."""
    parser = argparse.ArgumentParser(
        prog="lmcache-core", description="A KV-cache layer for LLM inference engines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"lmcache-core {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name in names:
            importlib.import_module(f"{__name__}.{name.replace(' ', '_')}").add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` is what follows the program's name. Returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # who has started this has closed it, and wants to see nothing
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process lives
    accept_any_text(sys.stdout, sys.stderr)
    try:
        code = _run(words)
        sys.stdout.flush()
    except LMCacheError as error:
        print_error(str(error))
        return 1
    except BrokenPipeError:
        _abandon_output()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print_error(f"{where}{error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _run(words: list[str]) -> int:
    try:
        words = joined(words)
        arguments = make_parser(*words[:1]).parse_args(words)
        code: int = arguments.run(arguments)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else 2
    return code


def joined(words: Sequence[str]) -> list[str]:
    """The words of a command line, those of a command of two words as one."""
    both = " ".join(words[:2])
    return [both, *words[2:]] if both in COMMANDS else list(words)


def _abandon_output() -> None:
    """Let Python's own flush at exit go nowhere: the reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except OSError:
        pass  # not a file of the system
    finally:
        os.close(nowhere)
