"""Settings from environment variables: `LMCACHE_CORE_CPU__CAPACITY=8GiB`, `LMCACHE_CORE_TIERS__0__PATH=/nvme/kv`."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmcache_core.config.conversion import Key, dotted, list_at, mapping_at
from lmcache_core.config.fields import Field, fields_of, is_struct, union_members, unwrap
from lmcache_core.config.masking import LooseText
from lmcache_core.config.structs import Config, TierConfig
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.plugins import load_backend

PREFIX = "LMCACHE_CORE_"
FILE_VARIABLE = "LMCACHE_CORE_CONFIG"

# Kubernetes puts such variables into every container of a namespace that has a service named lmcache-core-….
_SERVICE_LINK = re.compile(r"(?:[A-Z0-9_]*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)\w*)?)")


def overrides(env: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Variables that set something, with the parts of their names. Backends come first: they say which keys exist."""
    found = []
    for variable in env:
        name = variable.removeprefix(PREFIX)
        if name == variable or variable == FILE_VARIABLE or _is_service_link(name, env[variable]):
            continue
        found.append((variable, name.split("__")))
    return sorted(found, key=lambda item: (item[1][-1] != "BACKEND", [_order(part) for part in item[1]]))


def apply_overrides(tree: dict[str, Any], env: Mapping[str, str], sources: dict[Key, str]) -> None:
    """Write the environment's settings into `tree`, and where they are from into `sources`.

    Raises:
        ConfigError: A variable names nothing; the message has the nearest that does.
        InvalidSetting: What a variable would be put into has the wrong type in the file.
    """
    for variable, parts in overrides(env):
        place = _Placement(variable, LooseText(env[variable]), sources)
        place.into_struct((), tree, Config, parts)


class _Placement:
    """Puts one variable into its place."""

    def __init__(self, variable: str, value: LooseText, sources: dict[Key, str]) -> None:
        self._variable = variable
        self._value = value
        self._sources = sources

    def into_struct(self, key: Key, tree: dict[str, Any], struct: type[msgspec.Struct], parts: Sequence[str]) -> None:
        fields = {field.key.upper(): field for field in _keys_of(struct, tree)}
        field = fields.get(parts[0])
        if field is None and struct is TierConfig and not _backend_is_known(tree):
            # The missing or misspelt backend is the error to tell, and is told later.
            self._set(key, tree, parts[0].lower())
        elif field is None:
            raise self._unknown(key, parts[0], list(fields))
        else:
            self._descend(key, tree, field.key, field.annotation, parts[1:])

    def _descend(self, key: Key, tree: dict[str, Any], name: str, annotation: Any, parts: Sequence[str]) -> None:
        inner, _ = unwrap(annotation)
        if parts:
            # Of `str | list[str]` the parts of the name mean the list.
            inner = next((member for member in union_members(inner) if _has_parts(member)), inner)
        origin = typing.get_origin(inner) or inner
        here = (*key, name)
        if origin in (list, tuple):
            self._into_list(here, tree, name, typing.get_args(inner)[0], parts)
        elif is_struct(inner):
            if not parts:
                raise self._section(here, [field.key for field in fields_of(inner)])
            tree[name] = section = dict(mapping_at(here, tree.get(name)))
            self.into_struct(here, section, inner, parts)
        elif origin in (dict, Mapping) and parts:
            tree[name] = section = dict(mapping_at(here, tree.get(name)))
            self._set(here, section, "__".join(parts).lower())
        elif parts:
            raise ConfigError(f"environment {self._variable}: {dotted(here)} is one value and has no keys")
        else:
            self._set(key, tree, name)

    def _into_list(self, key: Key, tree: dict[str, Any], name: str, item_type: Any, parts: Sequence[str]) -> None:
        written = tree.get(name)
        items: list[Any] = [written] if isinstance(written, str) else list_at(key, written)
        if not parts or not re.fullmatch(r"\d{1,4}", parts[0], re.ASCII):
            raise ConfigError(
                f"environment {self._variable}: {dotted(key)} is a list; name the entry by its number, as in "
                f"{PREFIX}{name.upper()}__0__…"
            )
        number = int(parts[0])
        if number > len(items):
            raise ConfigError(
                f"environment {self._variable}: there is no {dotted((*key, number))}; the list has {len(items)} "
                f"entries, so the next is number {len(items)}"
            )
        tree[name] = items
        if number == len(items):
            items.append({} if is_struct(item_type) else None)
            self._sources[(*key, number)] = f"environment {self._variable}"
        if is_struct(item_type):
            if len(parts) == 1:
                raise self._section((*key, number), [field.key for field in fields_of(item_type)])
            items[number] = section = dict(mapping_at((*key, number), items[number]))
            self.into_struct((*key, number), section, item_type, parts[1:])
        else:
            items[number] = self._value
            self._sources[key] = self._sources[(*key, number)] = f"environment {self._variable}"

    def _set(self, key: Key, tree: dict[str, Any], name: str) -> None:
        tree[name] = self._value
        self._sources[(*key, name)] = f"environment {self._variable}"

    def _section(self, key: Key, names: list[str]) -> ConfigError:
        example = f"{self._variable}__{names[0].upper()}"
        return ConfigError(f"environment {self._variable}: {dotted(key)} is a section; set its keys, as in {example}")

    def _unknown(self, key: Key, part: str, known: list[str]) -> ConfigError:
        prefix = PREFIX + "".join(f"{name}__" for name in map(str, key)).upper()
        near = [f"{name}__{part[len(name) + 1 :]}" for name in known if part.startswith(f"{name}_")]
        near += difflib.get_close_matches(part, known, n=1, cutoff=0.55)
        advice = f"did you mean {prefix}{near[0]}?" if near else f"known are {prefix} + {', '.join(sorted(known))}"
        place = f" in {dotted(key)}" if key else ""
        return ConfigError(f"environment {self._variable}: unknown key {part!r}{place}; {advice}")


def _keys_of(struct: type[msgspec.Struct], tree: Mapping[str, Any]) -> list[Field]:
    if struct is not TierConfig:
        return list(fields_of(struct))
    keys = [field for field in fields_of(TierConfig) if field.key != "options"]
    if _backend_is_known(tree):
        known = {field.key for field in keys}
        options_type = load_backend(str(tree["backend"])).options_type
        keys += [field for field in fields_of(options_type) if field.key not in known]
    return keys


def _backend_is_known(tree: Mapping[str, Any]) -> bool:
    try:
        load_backend(str(tree.get("backend")))
    except PluginError:
        return False
    return True


def _has_parts(annotation: Any) -> bool:
    inner, _ = unwrap(annotation)
    return is_struct(inner) or (typing.get_origin(inner) or inner) in (list, tuple, dict, Mapping)


def _is_service_link(name: str, value: str) -> bool:
    if "__" in name or not _SERVICE_LINK.fullmatch(name):
        return False
    return "SERVICE_" in name or not name.endswith("PORT") or "://" in value


def _order(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() and len(part) < 5 else (-1, part)
