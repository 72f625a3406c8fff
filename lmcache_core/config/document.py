"""YAML text to plain data that remembers the line of each key. Bounded: no text makes it slow, huge or unsafe."""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml

from lmcache_core.config.conversion import Key, dotted
from lmcache_core.errors import ConfigError

MAX_BYTES = 2**20
MAX_NODES = 20_000
MAX_DEPTH = 32

_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")


class Document(NamedTuple):
    """A parsed text."""

    name: str
    """What it is called in errors: the path of the file."""
    value: object
    lines: dict[Key, int]


def read_document(text: str, name: str) -> Document:
    """Parse YAML.

    Raises:
        ConfigError: It isn't YAML, has a key twice, or is larger or deeper than a configuration can be.
    """
    if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES} bytes; this is not a configuration")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            builder = _Builder(loader, name)
            value = builder.build((), node, 0) if node is not None else None
            return Document(name, value, builder.lines)
        finally:
            loader.dispose()
    except _TooManyValues as error:
        raise ConfigError(
            f"{name}:{error.args[0]}: more than {MAX_NODES} values; this is not a configuration"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: a character that YAML does not allow: {error.character!r}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain(error, text, name)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: not YAML: {error}") from None


class _TooManyValues(Exception):
    pass


class _Loader(yaml.SafeLoader):
    """Stops early where a text goes on for too long: PyYAML needs 20 us and more for each value."""

    _composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_NODES:
            raise _TooManyValues(self.line + 1)
        return super().compose_node(parent, index)


class _Builder:
    """Turns nodes into data. An alias counts as often as it is used, so a bomb of aliases ends early."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.lines: dict[Key, int] = {}
        self._loader = loader
        self._name = name
        self._nodes = 0

    def build(self, key: Key, node: yaml.Node, depth: int) -> object:
        self._nodes += 1
        self.lines.setdefault(key, _line(node))
        if self._nodes > MAX_NODES:
            raise self._error(node, f"more than {MAX_NODES} values (aliases count each time they are used)")
        if depth > MAX_DEPTH:
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(key, node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build((*key, number), item, depth + 1) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in self._loader.yaml_constructors:
            return self._scalar(key, node)
        # Not its name: an unquoted password may begin so.
        raise self._error(node, f"a tag{_in(key)} is not allowed; delete it, or quote text that begins with '!'")

    def _mapping(self, key: Key, node: yaml.MappingNode, depth: int) -> dict[object, object]:
        result: dict[object, object] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise self._error(name_node, f"a key in {dotted(key) or 'the top level'} is not text")
            if name_node.tag == "tag:yaml.org,2002:merge":
                raise self._error(name_node, "merge keys ('<<') are not supported; write the keys out")
            name = self._scalar(key, name_node)
            place = (*key, name if isinstance(name, str) else str(name))
            if name in result:
                first = self.lines[place]
                where = f" in {dotted(key)}" if key else ""
                raise self._error(name_node, f"the key {name!r}{where} is already on line {first}; delete one of them")
            self.lines[place] = _line(name_node)
            result[name] = self.build(place, value_node, depth + 1)
        return result

    def _scalar(self, key: Key, node: yaml.ScalarNode) -> object:
        if node.tag == "tag:yaml.org,2002:int" and _OCTAL.fullmatch(node.value):
            problem = f"YAML reads a number that begins with 0{_in(key)} as octal"
            raise self._error(node, f"{problem}; leave out the zero, or quote it if it is text")
        value: object = self._loader.construct_object(node)
        return value

    def _error(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._name}:{_line(node)}: {problem}")


def _in(key: Key) -> str:
    return f" in {dotted(key)}" if key else ""


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _explain(error: yaml.MarkedYAMLError, text: str, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = " ".join(part for part in (error.context, error.problem) if part)
    if "undefined alias" in problem:
        return f"{name}:{line}: no anchor ('&') has the name of this alias ('*'); quote text that begins with '*'"
    lines = text.splitlines()
    source = lines[line - 1] if line <= len(lines) else ""
    if "'\\t'" in problem or source[: len(source) - len(source.lstrip())].count("\t"):
        return f"{name}:{line}: a tab; indent with spaces"
    if "single document" in problem:
        return f"{name}:{line}: a second document starts ('---'); a configuration is one document"
    return f"{name}:{line}: not YAML: {problem}; look at this line and the one before it"
