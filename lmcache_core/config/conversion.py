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

from lmcache_core.config.fields import (
    describe_type,
    fields_of,
    holds_secret,
    is_struct,
    marked,
    secrets_of,
    union_members,
    unwrap,
)
from lmcache_core.config.masking import LooseText, MaskedText, mask, mask_url, masked_in
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
    """A value can't be used. `key` is its place. Passwords of URLs in the text are masked."""

    def __init__(self, key: Key, problem: str) -> None:
        super().__init__(mask_url(problem))
        self.key = key


def dotted(key: Key) -> str:
    """A place as people write it: `tiers[0].breaker.cooldown`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def shown(value: object) -> str:
    """A value in an error: short, and without secrets."""
    try:
        text = str(value).lower() if isinstance(value, bool) else mask_url(repr(value))
    except Exception:  # noqa: BLE001  a value from code may be anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert(value: object, type: type[T]) -> T:
    """Turn plain data (mappings, lists, numbers, text) into `type`, usually a struct of options.

    Raises:
        InvalidSetting: A key is unknown or missing, or a value isn't what it must be; the message says what to write.
    """
    return typing.cast(T, convert_at((), value, type))


def convert_at(key: Key, value: object, annotation: Any) -> Any:
    """`convert` for the value that stands at `key`."""
    if marked(annotation, "secret"):
        return _convert_secret(key, value, annotation)
    return _convert_open(key, value, annotation)


def _convert_secret(key: Key, value: object, annotation: Any) -> Any:
    """A value of which an error tells the kind only."""
    try:
        return _convert_open(key, MaskedText(value) if isinstance(value, str) else value, annotation)
    except InvalidSetting:
        pass  # its text has the value
    if value is None:
        problem = f"{dotted(key)} has no value; write one ({describe_type(annotation)}) or delete it"
    elif "text" in describe_type(annotation) and not isinstance(value, list | tuple | Mapping | str):
        problem = (
            f"{dotted(key)}: {_kind(value)} is not possible (it is secret, so it is not shown); write text: quote it"
        )
    else:
        wanted = describe_type(annotation)
        quoted = "; text with special characters must be quoted" if "text" in wanted else ""
        problem = (
            f"{dotted(key)}: {_kind(value)} is not possible (it is secret, so it is not shown); write {wanted}{quoted}"
        )
    raise InvalidSetting(key, problem)


def _convert_open(key: Key, value: object, annotation: Any) -> Any:
    inner, _ = unwrap(annotation)
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
    hidden = holds_secret(struct)
    mapping = mapping_at(key, value, hidden=hidden, advice="" if hidden else _section_for(value, key, struct))
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
        place, problem, cause = (*key, *inner.key), str(inner), None
    except (ConfigError, ValueError, TypeError) as refused:
        place, problem, cause = key, f"{dotted(key)}: {refused}" if key else str(refused), refused
    # What refused it is a plugin's, and may have written values of its options into the text.
    told = mask(problem, _secrets(struct, arguments))
    raise InvalidSetting(place, told) from (cause if told == problem else None)


def _secrets(struct: type[msgspec.Struct], arguments: Mapping[str, object]) -> list[str]:
    found = list(masked_in(arguments))
    for value in arguments.values():
        found += secrets_of(value) if isinstance(value, msgspec.Struct) else []
    for field in fields_of(struct):
        if field.secret and isinstance(value := arguments.get(field.attribute), int | float) and value is not True:
            found.append(str(value))
    return found


def _section_for(value: object, key: Key, struct: type[msgspec.Struct]) -> str:
    """How a section is written whose only value stands where its keys should."""
    if not key or value is None or isinstance(value, Mapping | list | tuple | MaskedText):
        return ""
    for field in fields_of(struct):
        if isinstance(value, bool) and field.key != "enabled":
            continue
        try:
            convert_at((), value, field.annotation)
        except InvalidSetting:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"; write {key[-1]}: {{{field.key}: {text}}}" if text.isprintable() and len(text) < 40 else ""
    return ""


def mapping_at(key: Key, value: object, *, hidden: bool = False, advice: str = "") -> Mapping[str, object]:
    """`value` if it is a mapping with text keys. A section without content counts as empty. What is `hidden` may hold
    a secret and is not in errors."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        where = dotted(key) or "the top level"
        # `password:abc` without the space is text.
        hidden = hidden or (isinstance(value, str) and ":" in value and "://" not in value)
        what = _kind(value) if hidden else f"{_kind(value, definite=True)} {shown(value)}"
        hint = "; write 'key: value', with a space after the colon" if hidden and isinstance(value, str) else ""
        raise InvalidSetting(key, f"{where} must be a mapping of keys to values, not {what}{advice or hint}")
    for name in value:
        if not isinstance(name, str):
            raise InvalidSetting(
                (*key, str(name)), f"the key {shown(name)} in {dotted(key) or 'the top level'} is no text"
            )
    return value


def list_at(key: Key, value: object, *, hidden: bool = False) -> list[object]:
    """`value` if it is a list. A section without content counts as empty. For `hidden` see `mapping_at`."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        what = _kind(value) if hidden else f"{_kind(value, definite=True)} {shown(value)}"
        raise InvalidSetting(key, f"{dotted(key)} must be a list, not {what}; start each entry with '- '")
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
    what = _kind(value) if holds_secret(annotation) else shown(value)
    wanted = " or ".join(dict.fromkeys(map(_in_words, members)))
    quoted = "; quote text that looks like a number, date or truth value" if "text" in wanted else ""
    raise InvalidSetting(key, f"{dotted(key)}: {what} is not possible{_truth(value)}; write {wanted}{quoted}")


def _convert_list(key: Key, value: object, annotation: Any, inner: Any) -> Any:
    items = list_at(key, value, hidden=holds_secret(annotation))
    arguments = typing.get_args(inner)
    item_type = arguments[0] if arguments else Any
    converted = [convert_at((*key, number), item, item_type) for number, item in enumerate(items)]
    return _checked(key, value, converted, annotation)


def _convert_mapping(key: Key, value: object, inner: Any) -> Any:
    arguments = typing.get_args(inner)
    value_type = arguments[1] if arguments else Any
    mapping = mapping_at(key, value, hidden=holds_secret(value_type))
    return {name: convert_at((*key, name), item, value_type) for name, item in mapping.items()}


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
    advice = f" (did you mean {near[0]!r}?)" if near and not isinstance(value, bool | MaskedText) else ""
    raise InvalidSetting(
        key, f"{dotted(key)}: {shown(value)} is not possible{_truth(value)}; write one of {', '.join(names)}{advice}"
    )


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
        what = _kind(written) if holds_secret(annotation) else shown(written)
        raise InvalidSetting(key, f"{place}{what} is not possible{_truth(written)}; {advice}") from None


def _truth(value: object) -> str:
    """Why a word has become a truth value."""
    return " (YAML reads yes, no, on and off as true and false; quote them)" if isinstance(value, bool) else ""


def _in_words(annotation: Any) -> str:
    name = describe_type(annotation)
    return name if name == "text" or " | " in name else f"a{'n' if name == 'integer' else ''} {name}"


def _kind(value: object, *, definite: bool = False) -> str:
    kinds = (
        (Mapping, "mapping"),
        (list | tuple, "list"),
        (str, "text"),
        (bool, "truth value"),
        (int | float, "number"),
    )
    name = next((name for kind, name in kinds if isinstance(value, kind)), "value")
    if definite:
        return f"the {name}"
    return name if name == "text" else f"a {name}"
