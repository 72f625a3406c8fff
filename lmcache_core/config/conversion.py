"""Values as written become values of the declared types; what doesn't fit is named by its place and told how to write.

msgspec alone can't do it: its hooks don't fire for annotated `int` and `float` (units), its errors know no key that is
near a misspelt one, and it reports a place as text only, which has no line in a file.
"""

from __future__ import annotations

import difflib
import enum
import pathlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from lmcache_core.config.fields import describe_type, fields_of, is_struct, marked, union_members, unwrap
from lmcache_core.config.masking import LooseText, MaskedText, mask_url
from lmcache_core.errors import ConfigError
from lmcache_core.units import UnitError, parse_duration, parse_size

Key = tuple[str | int, ...]
"""Place of a value: `("tiers", 0, "capacity")`."""

T = TypeVar("T")

_EXPECTED = {
    "true | false": "write true or false",
    "integer": "write a whole number",
    "number": "write a number",
    "text": "write text; quote it if it looks like a number, date or truth value",
    "path": "write a path",
}


class InvalidSetting(ConfigError):
    """A value can't be used. `key` is its place."""

    def __init__(self, key: Key, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def dotted(key: Key) -> str:
    """A place as people write it: `tiers[0].breaker.cooldown`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def shown(value: object) -> str:
    """A value in an error: short, and without secrets."""
    text = mask_url(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert(value: object, type: type[T]) -> T:
    """Turn plain data (mappings, lists, numbers, text) into `type`, usually a struct of options.

    Raises:
        InvalidSetting: A key is unknown or missing, or a value isn't what it must be; the message says what to write.
    """
    return typing.cast(T, convert_at((), value, type))


def convert_at(key: Key, value: object, annotation: Any) -> Any:
    """`convert` for the value that stands at `key`."""
    inner, _ = unwrap(annotation)
    if isinstance(value, str) and marked(annotation, "secret"):
        value = MaskedText(value)
    if members := union_members(inner):
        return _convert_union(key, value, annotation, members)
    if is_struct(inner):
        return convert_struct(key, value, inner)
    origin = typing.get_origin(inner) or inner
    if origin in (list, tuple, set, frozenset, Sequence):
        return _convert_list(key, value, annotation, inner)
    if origin in (dict, Mapping):
        return _convert_mapping(key, value, inner)
    return _convert_scalar(key, value, annotation)


def convert_struct(key: Key, value: object, struct: type[msgspec.Struct], also_known: Iterable[str] = ()) -> Any:
    """A struct from a mapping. `also_known` are keys beside the struct's own, offered for misspelt ones."""
    mapping = mapping_at(key, value)
    fields = {field.key: field for field in fields_of(struct)}
    for name in mapping:
        if name not in fields:
            raise unknown_key(key, name, [*fields, *also_known])
    arguments = {}
    for field in fields.values():
        if field.key in mapping:
            arguments[field.attribute] = convert_at((*key, field.key), mapping[field.key], field.annotation)
        elif field.required:
            what = f": {field.description}" if field.description else ""
            where = dotted(key) or "the configuration"
            raise InvalidSetting(key, f"{where} lacks the key {field.key!r} ({field.type}){what}")
    try:
        return struct(**arguments)
    except InvalidSetting as inner:
        raise InvalidSetting((*key, *inner.key), str(inner)) from None
    except (ConfigError, ValueError, TypeError) as refused:
        where = f"{dotted(key)}: " if key else ""
        raise InvalidSetting(key, f"{where}{refused}") from refused


def mapping_at(key: Key, value: object) -> Mapping[str, object]:
    """`value` if it is a mapping with text keys. A section without content counts as empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        where = dotted(key) or "the top level"
        raise InvalidSetting(key, f"{where} must be a mapping of keys to values, not {_kind(value)} {shown(value)}")
    for name in value:
        if not isinstance(name, str):
            raise InvalidSetting(
                (*key, str(name)), f"the key {shown(name)} in {dotted(key) or 'the top level'} is no text"
            )
    return value


def list_at(key: Key, value: object) -> list[object]:
    """`value` if it is a list. A section without content counts as empty."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise InvalidSetting(
            key, f"{dotted(key)} must be a list, not {_kind(value)} {shown(value)}; start each entry with '- '"
        )
    return list(value)


def unknown_key(key: Key, name: str, known: Iterable[str], more: str = "") -> InvalidSetting:
    """The error for a key nobody knows, with the nearest one that is known."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    place = f" in {dotted(key)}" if key else ""
    return InvalidSetting((*key, name), f"unknown key {name!r}{place}; {more or advice}")


def _convert_union(key: Key, value: object, annotation: Any, members: Sequence[Any]) -> Any:
    if value is None and type(None) in typing.get_args(unwrap(annotation)[0]):
        return None
    failures = []
    for member in members:
        try:
            return convert_at(key, value, member)
        except InvalidSetting as failure:
            failures.append(failure)
    if len(failures) == 1:
        raise failures[0]
    raise InvalidSetting(key, f"{dotted(key)}: {shown(value)} is none of: {describe_type(annotation)}")


def _convert_list(key: Key, value: object, annotation: Any, inner: Any) -> Any:
    items = list_at(key, value)
    arguments = typing.get_args(inner)
    item_type = arguments[0] if arguments else Any
    converted = [convert_at((*key, number), item, item_type) for number, item in enumerate(items)]
    return _checked(key, value, converted, annotation)


def _convert_mapping(key: Key, value: object, inner: Any) -> Any:
    arguments = typing.get_args(inner)
    value_type = arguments[1] if arguments else Any
    return {name: convert_at((*key, name), item, value_type) for name, item in mapping_at(key, value).items()}


def _convert_scalar(key: Key, value: object, annotation: Any) -> Any:
    inner, _ = unwrap(annotation)
    if inner is Any or inner is object:
        return value
    if value is None and inner is not type(None):
        raise InvalidSetting(key, f"{dotted(key)} has no value; write one ({describe_type(annotation)}) or delete it")
    unit = marked(annotation, "unit")
    if unit is not None:
        parse = parse_size if unit == "bytes" else parse_duration
        try:
            return _checked(key, value, parse(value), annotation)  # type: ignore[arg-type]  # it checks
        except UnitError as error:
            raise InvalidSetting(key, f"{dotted(key)}: {error}") from None
    choices = _choices(inner)
    if choices:
        return _choose(key, value, inner, choices)
    if inner is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if inner is str and type(value) is LooseText:
        value = str(value)
    return _checked(key, value, value, annotation)


def _choices(inner: Any) -> list[Any]:
    if typing.get_origin(inner) is Literal:
        return list(typing.get_args(inner))
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return [member.value for member in inner]
    return []


def _choose(key: Key, value: object, inner: Any, choices: list[Any]) -> Any:
    for choice in choices:
        alike = type(choice) is type(value) and choice == value
        if alike or (isinstance(value, LooseText) and str(choice) == value):
            return inner(choice) if isinstance(inner, type) else choice
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.55)
    advice = f"did you mean {near[0]!r}? " if near and not isinstance(value, MaskedText) else ""
    raise InvalidSetting(key, f"{dotted(key)}: {shown(value)} is not possible; {advice}Write one of {', '.join(names)}")


def _checked(key: Key, written: object, value: object, annotation: Any) -> Any:
    """`value` after msgspec has checked its type and constraints."""
    try:
        return msgspec.convert(value, annotation, strict=not isinstance(value, LooseText))
    except msgspec.ValidationError as error:
        _, metas = unwrap(annotation)
        limits = {
            f"{words} {limit}": None
            for meta in metas
            for words, limit in (
                ("of at least", meta.ge),
                ("greater than", meta.gt),
                ("of at most", meta.le),
                ("less than", meta.lt),
                ("that matches", meta.pattern),
            )
            if limit is not None
        }
        expected = _EXPECTED.get(describe_type(annotation), f"write a {describe_type(annotation)}")
        place = f"{dotted(key)}: " if key else ""
        known = describe_type(annotation) in _EXPECTED or limits
        advice = f"{expected} {' and '.join(limits)}".rstrip() if known else f"{expected} ({error})"
        raise InvalidSetting(key, f"{place}{shown(written)} is not possible; {advice}") from None


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "the mapping"
    if isinstance(value, list | tuple):
        return "the list"
    return "the text" if isinstance(value, str) else "the value"
