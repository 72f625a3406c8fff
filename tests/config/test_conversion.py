"""Plugins' option structs: whatever they declare is converted, checked and described."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from lmcache_core.config import InvalidSetting, MaskedText, convert, fields_of
from lmcache_core.units import ByteSize, Duration, Secret


class Codec(enum.Enum):
    """A codec."""

    NONE = "none"
    LZ4 = "lz4"


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section."""

    size: ByteSize = 2**20
    """Of it."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """All kinds of options."""

    size: ByteSize
    """How
    large."""
    at_least: Annotated[ByteSize, msgspec.Meta(ge=10, description="Not below ten.")] = 10
    wait: Duration | None = None
    codec: Codec = Codec.NONE
    level: Literal[1, 2, 3] = 1
    root: Path = Path("/")
    paths: str | list[str] = "/a"
    free: ByteSize | str = "5%"
    sizes: tuple[ByteSize, ...] = ()
    limits: dict[str, Duration] = {}
    inner: Inner = Inner()
    inners: list[Inner] = []
    token: Secret = ""
    name: Annotated[str, msgspec.Meta(pattern="^[a-z]+$")] = "a"
    ratio: float = 0.5
    anything: Any = None


def options(**values: object) -> Options:
    return convert({"size": 1, **values}, Options)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("size", "1KiB", 1024),
        ("at-least", "10B", 10),
        ("wait", "250ms", 0.25),
        ("wait", None, None),
        ("codec", "lz4", Codec.LZ4),
        ("level", 3, 3),
        ("root", "/x", Path("/x")),
        ("paths", "/b", "/b"),
        ("paths", ["/b", "/c"], ["/b", "/c"]),
        ("free", "1GiB", 2**30),
        ("free", "7%", "7%"),
        ("sizes", ["1KiB", 5], (1024, 5)),
        ("limits", {"read": "2m"}, {"read": 120.0}),
        ("inner", {"size": "2MiB"}, Inner(2**21)),
        ("inner", None, Inner()),
        ("inners", [{"size": 3}, {}], [Inner(3), Inner()]),
        ("token", "abc", "abc"),
        ("ratio", 1, 1.0),
        ("anything", {"a": [1]}, {"a": [1]}),
    ],
)
def test_values(key: str, written: object, value: object) -> None:
    result = getattr(options(**{key: written}), key.replace("-", "_"))
    assert result == value
    assert type(result) is (MaskedText if key == "token" else type(value))


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("at-least", 5, "at-least: 5 is not possible; write a size of at least 10"),
        ("at-least", -5, "at-least: -5 is not a size: it must not be negative"),
        ("wait", "soon", "wait: 'soon' is not a duration; write a number of seconds"),
        ("codec", "lz5", "codec: 'lz5' is not possible; write one of none, lz4 (did you mean 'lz4'?)"),
        ("level", 4, "level: 4 is not possible; write one of 1, 2, 3"),
        (
            "level",
            True,
            "level: true is not possible (YAML reads yes, no, on and off as true and false; quote them); write one",
        ),
        ("root", 5, "root: 5 is not possible; write a path"),
        ("paths", 5, "paths: 5 is not possible; write text or a list of text; quote text that looks like a number"),
        ("sizes", ["1KiB", "x"], "sizes[1]: 'x' is not a size"),
        ("limits", {"read": "x"}, "limits.read: 'x' is not a duration"),
        ("inner", {"sise": 1}, "unknown key 'sise' in inner; did you mean 'size'?"),
        ("inners", [{}, {"size": "x"}], "inners[1].size: 'x' is not a size"),
        ("at_least", 5, "unknown key 'at_least'; did you mean 'at-least'?"),
        ("name", "A1", "name: 'A1' is not possible; write text; quote it if it looks like a number, date or truth"),
        ("ratio", "half", "ratio: 'half' is not possible; write a number"),
        ("token", 5, "token: a number is not possible (it is secret, so it is not shown); write text: quote it"),
    ],
)
def test_mistakes(key: str, written: object, says: str) -> None:
    with pytest.raises(InvalidSetting) as error:
        options(**{key: written})
    assert str(error.value).startswith(says)


def test_a_missing_key_is_described() -> None:
    with pytest.raises(InvalidSetting, match=r"^the configuration lacks the key 'size' \(size\): How large\.$"):
        convert({}, Options)


def test_the_place_of_a_mistake() -> None:
    with pytest.raises(InvalidSetting) as error:
        options(inners=[{}, {"size": "x"}])
    assert error.value.key == ("inners", 1, "size")


def test_descriptions_types_and_defaults() -> None:
    assert [(field.key, field.type, field.default, field.description) for field in fields_of(Options)] == [
        ("size", "size", "required", "How large."),
        ("at-least", "size", "10B", "Not below ten."),
        ("wait", "duration", "none", ""),
        ("codec", "none | lz4", "none", ""),
        ("level", "1 | 2 | 3", "1", ""),
        ("root", "path", "/", ""),
        ("paths", "text | list of text", "/a", ""),
        ("free", "size | text", "5%", ""),
        ("sizes", "list of size", "[]", ""),
        ("limits", "mapping", "{}", ""),
        ("inner", "mapping", "{size: 1MiB}", ""),
        ("inners", "list of mapping", "[]", ""),
        ("token", "text", "''", ""),
        ("name", "text", "a", ""),
        ("ratio", "number", "0.5", ""),
        ("anything", "any", "none", ""),
    ]


def test_a_struct_without_source_has_no_descriptions() -> None:
    made = msgspec.defstruct("Made", [("a", int), ("b", int, 2)])
    assert [(field.key, field.description) for field in fields_of(made)] == [("a", ""), ("b", "")]
