"""The effective configuration with the source of each value, safe to print."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lmcache_core.config.conversion import Key, dotted
from lmcache_core.config.fields import Field, fields_of, format_value, holds_secret
from lmcache_core.config.masking import MASK, MaskedText, mask_url
from lmcache_core.config.structs import TierConfig

if TYPE_CHECKING:
    from lmcache_core.config.loading import LoadedConfig


class Provenance(NamedTuple):
    """Where values are from."""

    sources: dict[Key, str]
    """`file:line`, `environment VARIABLE` or `argument` by place; what isn't here has its default."""
    hidden: set[Key]
    """Places whose values came from `${env:…}` or `${file:…}`."""
    name: str
    """The whole configuration's name."""

    def source(self, key: Key) -> str:
        """Where the value at `key` is from: `default` if nobody set it."""
        return self.sources.get(key, "default")

    def nearest(self, key: Key) -> str:
        """Best answer to where a person should look to change `key`, for errors."""
        for length in range(len(key), -1, -1):
            source = self.sources.get(key[:length])
            if source is not None:
                return self.name if source == "argument" else source
        return self.name


class Setting(NamedTuple):
    """One effective setting."""

    key: str
    """`tiers[0].capacity`"""
    value: str
    """As one would write it in the YAML; secrets are masked."""
    source: str
    """`default`, `file:line`, `environment VARIABLE`, or `argument` for a mapping given in code."""
    plain: Any = None
    """The value for programs: sizes in bytes, durations in seconds, truth values, lists, mappings; masked alike."""


def show(loaded: LoadedConfig) -> list[Setting]:
    """Every setting that is in force, with its value and source, in the order of the documentation."""
    return list(_walk((), loaded.config, loaded.provenance))


def _walk(key: Key, struct: msgspec.Struct, provenance: Provenance, skip: Collection[str] = ()) -> Iterator[Setting]:
    for field in fields_of(type(struct)):
        if field.key in skip:
            continue
        here = (*key, field.key)
        value = getattr(struct, field.attribute)
        if isinstance(struct, TierConfig) and field.key == "options":
            if isinstance(value, msgspec.Struct):
                yield from _walk(key, value, provenance, skip=[generic.key for generic in fields_of(TierConfig)])
        elif isinstance(value, msgspec.Struct):
            yield from _walk(here, value, provenance)
        elif isinstance(value, tuple | list) and any(isinstance(item, msgspec.Struct) for item in value):
            for number, item in enumerate(value):
                yield from _walk((*here, number), item, provenance)
        else:
            if field.key == "path" and callable(paths := getattr(struct, "paths", None)):
                value = paths()[0] if isinstance(value, str) else paths()  # `~` and `..` as they are understood
            if _is_hidden(here, getattr(struct, field.attribute), field, provenance):
                text, plain = MASK, MASK
            else:
                text, plain = mask_url(format_value(value, field.annotation)), _plain(value)
            yield Setting(dotted(here), text, provenance.source(here), plain)


def _is_hidden(key: Key, value: Any, field: Field, provenance: Provenance) -> bool:
    # A list or mapping is one setting here and may have a secret anywhere inside.
    referred = any(place[: len(key)] == key for place in provenance.hidden)
    return bool(referred or isinstance(value, MaskedText) or (value and holds_secret(field.annotation)))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {mask_url(str(key)): _plain(item) for key, item in value.items()}
    return mask_url(str(value))
