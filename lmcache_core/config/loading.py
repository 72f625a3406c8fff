"""Configuration from a file, a text or a mapping, with the environment on top."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
from lmcache_core.config.rules import check
from lmcache_core.config.structs import Config, TierConfig
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.plugins import list_backends, load_backend

# What a path never looks like: several lines, `key: value`, a list entry, braces.
_TEXT = re.compile(r"\n|:\s|:$|^\s*$|^\s*[{\[#]|^\s*- ")


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
        check(config)
    except ConfigError as error:
        where = f"{provenance.nearest(error.key)}: " if isinstance(error, InvalidSetting) else ""
        told = mask(str(error), masked_in(resolved))
        raise ConfigError(f"{where}{told}") from (error if told == str(error) else None)
    return LoadedConfig(config, provenance)


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
    rest = {name: value for name, value in tree.items() if name != "tiers"}
    known = [field.key for field in fields_of(Config)]
    for name in rest:
        if name not in known:
            advice = "it is a key of LMCache; 'lmcache-core config migrate' converts its files"
            raise unknown_key((), name, known, advice if is_foreign(name) else "")
    config: Config = convert_struct((), rest, Config)
    tiers = [_tier(("tiers", number), tier) for number, tier in enumerate(list_at(("tiers",), tree.get("tiers")))]
    return Config(**{name: getattr(config, name) for name in known if name != "tiers"}, tiers=tuple(tiers))


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
