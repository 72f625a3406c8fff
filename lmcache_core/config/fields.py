"""What the fields of an options struct are: key, type, default and description, as a person would read them."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import pathlib
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from lmcache_core.config.masking import masked_in
from lmcache_core.units import format_duration, format_size


class Field(NamedTuple):
    """One key a user may write."""

    key: str
    attribute: str
    """Name of the struct's field; differs from `key` only where the struct renames its fields."""
    annotation: Any
    type: str
    default: str
    """Text of the default, `required` if there is none."""
    required: bool
    description: str
    secret: bool
    default_value: object
    """The default itself; None if there is none."""


def unwrap(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    """The type inside `Annotated`, and its annotations."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metas = typing.get_args(annotation)
        return inner, [meta for meta in metas if isinstance(meta, msgspec.Meta)]
    return annotation, []


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, None excepted; empty if `annotation` is no union."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return ()
    return tuple(member for member in typing.get_args(annotation) if member is not types.NoneType)


def marked(annotation: Any, mark: str) -> Any:
    """What `Meta(extra={mark: ...})` says of a type or of a member of a union, else None."""
    inner, metas = unwrap(annotation)
    found = [meta.extra[mark] for meta in metas if meta.extra and mark in meta.extra]
    found += [value for member in union_members(inner) if (value := marked(member, mark)) is not None]
    return found[-1] if found else None


def holds_secret(annotation: Any) -> bool:
    """Whether a type is secret or has a secret anywhere inside."""
    return _holds_secret(annotation, set())


def _holds_secret(annotation: Any, seen: set[Any]) -> bool:
    if marked(annotation, "secret"):
        return True
    inner, _ = unwrap(annotation)
    if is_struct(inner):
        if inner in seen:
            return False
        seen.add(inner)
        return any(field.secret or _holds_secret(field.annotation, seen) for field in fields_of(inner))
    return any(_holds_secret(argument, seen) for argument in typing.get_args(inner))


def secrets_of(options: msgspec.Struct) -> list[str]:
    """The texts of all secrets in a struct, for leaving them out of errors."""
    found = []
    for field in fields_of(type(options)):
        value = getattr(options, field.attribute, None)
        if isinstance(value, msgspec.Struct):
            found += secrets_of(value)
        elif field.secret or holds_secret(field.annotation):
            found += _texts(value)
        else:
            found += masked_in(value)
    return found


def _texts(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple | set | frozenset):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, msgspec.Struct):
        return secrets_of(value)
    return [] if value is None or isinstance(value, bool) else [str(value)]


def is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def describe_type(annotation: Any) -> str:
    """A type in words: `size`, `duration`, `integer`, `through | evict | never`, `list of text`."""
    inner, _ = unwrap(annotation)
    unit = marked(annotation, "unit")
    if members := union_members(inner):
        return " | ".join(dict.fromkeys(describe_type(member) for member in members))
    if unit is not None:
        return {"bytes": "size", "seconds": "duration"}.get(unit, "number")
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return " | ".join(str(member.value) for member in inner)
    if origin in (list, tuple, set, frozenset):
        return f"list of {describe_type(arguments[0])}" if arguments else "list"
    if is_struct(inner) or origin in (dict, Mapping) or inner is dict:
        return "mapping"
    names = {bool: "true | false", int: "integer", float: "number", str: "text", pathlib.Path: "path", Any: "any"}
    return names.get(inner, getattr(inner, "__name__", str(inner)))


def format_value(value: object, annotation: Any) -> str:
    """A value as a user would write it in the YAML."""
    unit = marked(annotation, "unit")
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if unit == "bytes" and isinstance(value, int):
        return format_size(value)
    if unit == "seconds" and isinstance(value, int | float):
        return format_duration(value)
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(format_value(item, Any) for item in value)}]"
    if isinstance(value, Mapping):
        inner = (*typing.get_args(unwrap(annotation)[0]), Any, Any)[1]
        return f"{{{', '.join(f'{key}: {format_value(item, inner)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        return str(value) or "''"
    if isinstance(value, msgspec.Struct):
        return f"{{{', '.join(f'{f.key}: {f.default}' for f in fields_of(type(value)))}}}"
    return str(value)


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The keys of a struct, in order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    docstrings = _docstrings(struct)
    result = []
    for info in msgspec.structs.fields(struct):
        annotation = hints[info.name]
        default_value = None if info.required else _default(info)
        default = "required" if info.required else format_value(default_value, annotation)
        descriptions = [meta.description for meta in unwrap(annotation)[1] if meta.description]
        description = descriptions[-1] if descriptions else docstrings.get(info.name, "")
        result.append(
            Field(
                key=info.encode_name,
                attribute=info.name,
                annotation=annotation,
                type=describe_type(annotation),
                default=default,
                required=info.required,
                description=" ".join(description.split()),
                secret=bool(marked(annotation, "secret")),
                default_value=default_value,
            )
        )
    return tuple(result)


def _default(info: msgspec.structs.FieldInfo) -> object:
    return info.default_factory() if info.default is msgspec.NODEFAULT else info.default


def _docstrings(struct: type) -> dict[str, str]:
    """Docstrings below the fields. Python doesn't keep them, so they are read from the source if it is there."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        definition = tree.body[0]
        if not isinstance(definition, ast.ClassDef):
            continue
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[field.target.id] = text.value.value
    return found
