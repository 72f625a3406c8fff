"""The JSON schema of the configuration file, with the options of all installed backends. Editors complete from it."""

from __future__ import annotations

import enum
import pathlib
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from lmcache_core.config.fields import Field, fields_of, is_struct, marked, union_members, unwrap
from lmcache_core.config.structs import Config, TierConfig
from lmcache_core.errors import PluginError
from lmcache_core.plugins import list_backends, load_backend

_SIZE = {
    "type": "string",
    "pattern": r"^\s*\d+(\.\d+)?\s*([kKMGTP]i?)?B?\s*$",
    "examples": ["512MiB", "20GiB", "1.5TB"],
}
_DURATION = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|min|h|d)?\s*$", "examples": ["250ms", "2s"]}
_REFERENCE = {"type": "string", "pattern": r"\$\{(env|file):[^}]+\}"}


def schema() -> dict[str, Any]:
    """A JSON schema (2020-12). Backends that cannot be loaded are left out."""
    result = _object([field for field in fields_of(Config) if field.key != "tiers"])
    tiers = next(field for field in fields_of(Config) if field.key == "tiers")
    items = []
    for info in list_backends():
        try:
            items.append(_tier(info.name))
        except PluginError:
            continue
    result["properties"]["tiers"] = {
        "type": ["array", "null"],
        "description": tiers.description,
        "items": {"anyOf": items} if items else {"type": "object"},
        "default": [],
    }
    title = "Configuration of lmcache-core"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **result}


def _tier(name: str) -> dict[str, Any]:
    options = fields_of(load_backend(name).options_type)
    own = {field.key for field in options}
    generic = [field for field in fields_of(TierConfig) if field.key != "options" and field.key not in own]
    result = _object([*generic, *options])
    result["title"] = f"{name} tier"
    result["properties"]["backend"]["const"] = name
    return result


def _object(fields: Iterable[Field]) -> dict[str, Any]:
    fields = list(fields)
    return {
        "type": "object",
        "properties": {field.key: _property(field) for field in fields},
        "required": [field.key for field in fields if field.required],
        "additionalProperties": False,
    }


def _property(field: Field) -> dict[str, Any]:
    result = _value(field.annotation)
    if field.description:
        result["description"] = field.description
    if isinstance(field.default_value, str | int | float) and not field.secret:
        result["default"] = field.default if marked(field.annotation, "unit") else field.default_value
    return result


def _value(annotation: Any) -> dict[str, Any]:
    """Schema of one value. Every one may also come from the environment or a file."""
    inner, _ = unwrap(annotation)
    unit = marked(annotation, "unit")
    if members := union_members(inner):
        null = [{"type": "null"}] if type(None) in typing.get_args(inner) else []
        return {"anyOf": [*map(_value, members), *null]}
    if unit is not None:
        number = {"type": "integer" if unit == "bytes" else "number", "minimum": 0}
        return {"anyOf": [number, dict(_SIZE if unit == "bytes" else _DURATION), dict(_REFERENCE)]}
    if is_struct(inner):
        return _object(fields_of(inner))
    if typing.get_origin(inner) is dict:
        return {"type": "object", "additionalProperties": _value(typing.get_args(inner)[1])}
    if typing.get_origin(inner) in (list, tuple):
        return {"type": "array", "items": _value(typing.get_args(inner)[0])}
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return {"enum": [member.value for member in inner]}
    leaf = msgspec.json.schema(annotation, schema_hook=_foreign_type)
    return leaf if leaf.get("type") in ("string", "array", "object", None) else {"anyOf": [leaf, dict(_REFERENCE)]}


def _foreign_type(foreign: type) -> dict[str, Any]:
    return {"type": "string"} if issubclass(foreign, pathlib.PurePath) else {}
