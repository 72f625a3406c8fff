"""Configuration from a file, a text or a mapping, with the environment on top."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_core.config.conversion import (
    InvalidSetting,
    Key,
    convert_at,
    convert_struct,
    dotted,
    list_at,
    mapping_at,
    unknown_key,
)
from lmcache_core.config.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, Document, read_document
from lmcache_core.config.environment import FILE_VARIABLE, apply_overrides
from lmcache_core.config.fields import fields_of
from lmcache_core.config.foreign import is_foreign
from lmcache_core.config.masking import MASK, MaskedText, mask, masked_in
from lmcache_core.config.provenance import Provenance
from lmcache_core.config.references import resolve
from lmcache_core.config.rules import mistakes, mistakes_alone
from lmcache_core.config.structs import Config, TierConfig
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.plugins import list_backends, load_backend

MOST_PROBLEMS = 20
"""That are told of one configuration at once."""

# What a path never looks like: several lines, `key: value`, a list entry, braces.
_TEXT = re.compile(r"\n|:\s|:$|^\s*$|^\s*[{\[#]|^\s*- ")


class InvalidConfig(ConfigError):
    """A configuration can't be used. The text is the first of `problems`, which has what can be told at once, in the
    order of the file: at least one of each section and tier that is wrong, and at most `MOST_PROBLEMS`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems[0])
        self.problems = tuple(problems)


class _Refused(ConfigError):
    def __init__(self, found: list[ConfigError]) -> None:
        super().__init__(found[0])
        self.found = found


class LoadedConfig(NamedTuple):
    """A configuration and where each of its values is from."""

    config: Config
    provenance: Provenance


def load_config(
    source: Path | str | Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read a configuration: a file (`Path`, or text that is a path), YAML text, or a mapping as YAML would give.

    Without a source it is the file named in LMCACHE_CORE_CONFIG, or the defaults if there is none. Variables of `env`
    (the process's environment by default) that start with LMCACHE_CORE_ override it.

    Raises:
        ConfigError: It can't be used. The message has file, line and key, and what to write instead.
    """
    env = os.environ if env is None else env
    try:
        document = _document(source, env)
    except ConfigError as error:
        raise ConfigError(mask(str(error))) from None
    origin = "argument" if isinstance(source, Mapping) else ""
    provenance = Provenance(
        {key: origin or f"{document.name}:{line}" for key, line in document.lines.items()}, set(), document.name
    )
    resolved: object = None
    try:
        tree = _copy(_top_level(document.value))
        apply_overrides(tree, env, provenance.sources)
        resolved = resolve((), tree, env, provenance.hidden)
        config = _convert(mapping_at((), resolved))
    except _Refused as refused:
        found = refused.found
    except ConfigError as error:
        found = [error]
    else:
        return LoadedConfig(config, provenance)
    secrets = list(masked_in(resolved))
    first, *more = sorted(found, key=lambda error: _line(_place(error, provenance)))
    told = mask(str(first), secrets)
    problems = [f"{_place(error, provenance)}{mask(str(error), secrets)}" for error in (first, *more)]
    raise InvalidConfig(problems) from (first if told == str(first) else None)


def _place(error: ConfigError, provenance: Provenance) -> str:
    return f"{provenance.nearest(error.key)}: " if isinstance(error, InvalidSetting) else ""


def _line(place: str) -> float:
    """To order mistakes by; those that are not of the file come last."""
    number = place.removesuffix(": ").rpartition(":")[2]
    return int(number) if number.isdecimal() else math.inf


def _document(source: Path | str | Mapping[str, Any] | None, env: Mapping[str, str]) -> Document:
    if isinstance(source, Mapping):
        lines: dict[Key, int] = {}
        _number(source, (), lines)
        return Document("configuration", source, lines)
    if source is None:
        path = env.get(FILE_VARIABLE, "")
        return _read_file(Path(path), f"{FILE_VARIABLE}: ") if path else Document("defaults", None, {})
    if isinstance(source, str) and _TEXT.search(source):
        return read_document(source, "<text>")
    if not isinstance(source, str | Path):
        raise ConfigError(f"a configuration is read from a path, text or a mapping, not from {type(source).__name__}")
    return _read_file(Path(source), "")


def _read_file(path: Path, prefix: str) -> Document:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{prefix}the configuration {str(path)!r} cannot be read: {problem}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; this is not a configuration") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    return read_document(text, str(path))


def _number(value: object, key: Key, lines: dict[Key, int]) -> None:
    """Give every place of a mapping from code a line, so that it counts as set; the number says nothing. One that
    holds itself goes on for ever, so there is an end to both depth and number.

    Raises:
        InvalidSetting: It is larger or deeper than a configuration can be.
    """
    lines[key] = 0
    if len(key) > MAX_DEPTH:
        raise InvalidSetting(key[:2], f"{dotted(key[:2])}: nested deeper than {MAX_DEPTH} levels, or holds itself")
    if len(lines) > MAX_NODES:
        raise InvalidSetting((), f"more than {MAX_NODES} values; this is not a configuration")
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in items:
        _number(item, (*key, name), lines)


def _copy(value: Any) -> Any:
    """Plain dicts and lists that may be changed."""
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _top_level(value: object) -> Mapping[str, object]:
    if isinstance(value, list):
        raise InvalidSetting((), "the top level is a list; write 'tiers:' above it and indent it")
    return mapping_at((), value, hidden=True)


def _convert(tree: Mapping[str, object]) -> Config:
    values: dict[str, Any] = {}
    tiers: dict[int, TierConfig] = {}
    found: list[ConfigError] = list(islice(_fill(tree, values, tiers), MOST_PROBLEMS))
    if found:
        config = Config(**values)
        found += islice(mistakes_alone(config, tiers), MOST_PROBLEMS - len(found))
    else:
        config = Config(**values, tiers=tuple(tiers.values()))
        found += islice(mistakes(config), MOST_PROBLEMS)
    if found:
        raise _Refused(found)
    return config


def _fill(tree: Mapping[str, object], values: dict[str, Any], tiers: dict[int, TierConfig]) -> Iterator[InvalidSetting]:
    """Put what can be read into `values` and `tiers`, and yield what is wrong with the rest."""
    known = [field.key for field in fields_of(Config)]
    for name in tree:
        if name not in known:
            advice = "it is a key of LMCache; 'lmcache-core config migrate' converts its files"
            yield unknown_key((), name, known, advice if is_foreign(name) else "")
            if is_foreign(name):
                break  # the rest of them is of that kind too
    for name in known:
        if name in tree and name != "tiers":
            try:
                values[name] = getattr(convert_struct((), {name: tree[name]}, Config), name)
            except InvalidSetting as error:
                yield error
    try:
        listed = list_at(("tiers",), tree.get("tiers"))
    except InvalidSetting as error:
        listed = []
        yield error
    for number, tier in enumerate(listed):
        try:
            tiers[number] = _tier(("tiers", number), tier)
        except InvalidSetting as error:
            yield error


def _tier(key: Key, value: object) -> TierConfig:
    tree = mapping_at(key, value)
    generic = {field.key: field for field in fields_of(TierConfig) if field.key != "options"}
    if "backend" not in tree:
        installed = ", ".join(info.name for info in list_backends()) or "none"
        raise InvalidSetting(
            key, f"{dotted(key)} lacks the key 'backend'; write 'backend: NAME', installed are: {installed}"
        )
    backend = convert_at((*key, "backend"), tree["backend"], str)
    try:
        options_type = load_backend(str(backend)).options_type
    except PluginError as error:
        problem = str(error).replace(backend, MASK) if isinstance(backend, MaskedText) else str(error)
        raise InvalidSetting((*key, "backend"), f"{dotted((*key, 'backend'))}: {problem}") from None
    own = [field.key for field in fields_of(options_type)]
    for name in tree:
        if name not in generic and name not in own:
            raise unknown_key(key, name, [*generic, *own])
    arguments = {
        name: convert_at((*key, name), tree[name], field.annotation) for name, field in generic.items() if name in tree
    }
    options = convert_struct(key, {name: tree[name] for name in own if name in tree}, options_type)
    if "capacity" in own and "capacity" not in arguments:
        arguments["capacity"] = getattr(options, "capacity", None)
    return TierConfig(**arguments, options=options)
