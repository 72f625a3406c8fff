"""The page about the command line has every command and option there is, with the text of `--help`, and no other."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.cli import COMMANDS, joined, make_parser

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Parsers of the commands that do something."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for each in action.choices.values():
            yield from leaves(each)


COMMAND_PARSERS = {parser.prog: parser for parser in leaves(make_parser(*COMMANDS))}


def sections() -> dict[str, str]:
    """Text of the page below each heading that is a command."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name.strip("`"): text for name, text in found.items() if name.startswith("`")}


def arguments(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What may be written behind a command, and what `--help` says of it."""
    found = {}
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        name = " ".join(filter(None, [", ".join(action.option_strings), value]))
        found[name] = formatter._expand_help(action) if action.help else ""
    return found


def rows(text: str) -> dict[str, str]:
    """Of the first table."""
    _, _, table = text.partition("| argument | meaning |\n")
    return dict(re.findall(r"^\| `([^`]+)` \| (.*)\. \|$", table.partition("\n\n")[0], flags=re.MULTILINE))


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def test_every_command_is_in_the_page_and_no_other() -> None:
    assert list(sections()) == list(COMMAND_PARSERS)


@pytest.mark.parametrize("name", COMMAND_PARSERS)
def test_every_argument_is_in_the_page_and_no_other(name: str) -> None:
    wanted = arguments(COMMAND_PARSERS[name])
    found = rows(sections()[name])
    assert found.keys() == wanted.keys(), f"docs/cli.md, {name}: rows must be for {list(wanted)}"
    if name != "lmcache-core demo":  # its defaults depend on the machine
        assert found == {argument: sentence(text) for argument, text in wanted.items()}


def shown_commands() -> list[str]:
    """Command lines that the documentation shows."""
    pages = [*PAGE.parent.glob("*.md"), PAGE.parents[1] / "README.md"]
    found = [
        re.findall(r"^(?:\$ )?(lmcache-core [a-z][^#\n>]*)", page.read_text(), flags=re.MULTILINE) for page in pages
    ]
    return sorted({line.strip() for lines in found for line in lines} - {"lmcache-core COMMAND --help"})


@pytest.mark.parametrize("line", shown_commands())
def test_command_lines_that_are_shown_are_understood(line: str) -> None:
    words = joined(shlex.split(line)[1:])
    assert make_parser(words[0]).parse_args(words).command == words[0]


@pytest.mark.parametrize("name", COMMAND_PARSERS)
def test_every_command_and_argument_has_a_text(name: str) -> None:
    parser = COMMAND_PARSERS[name]
    assert parser.description
    assert parser.description in sections()[name].replace("\n", " ")
    assert [argument for argument, text in arguments(parser).items() if not text] == []
