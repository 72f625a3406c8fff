"""What settings must fulfil together, beyond each being of its type."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lmcache_core.config.conversion import InvalidSetting, Key, convert_at, dotted, shown
from lmcache_core.config.fields import fields_of, is_struct, union_members, unwrap
from lmcache_core.config.keys import KEY_BYTES, key_of
from lmcache_core.config.structs import CipherConfig, Config, ShareConfig, TierConfig
from lmcache_core.units import format_duration, format_size

_SMALLEST = 2**20
_LISTS: dict[str, type[msgspec.Struct]] = {"tiers": TierConfig, "shares": ShareConfig}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a tier or a tenant."""


LEAST_CALL_TIMEOUT = 0.001
LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket on Linux."""
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What a terminal or a log would obey, or a path cannot have."""


def check(config: Config) -> None:
    """Check a configuration as a whole. `load_config` has done it already; for one that was built in code.

    Raises:
        InvalidSetting: It contradicts itself; the message says what to write instead.
    """
    _check_types((), config, Config)
    for mistake in mistakes(config):
        raise mistake


def mistakes(config: Config) -> Iterator[InvalidSetting]:
    """What `check` raises the first of; the types of all settings have been checked."""
    return itertools.starmap(_mistake, itertools.chain(_of_sections(config), _of_all(config)))


def mistakes_alone(config: Config, tiers: Mapping[int, TierConfig]) -> Iterator[InvalidSetting]:
    """Those that do not depend on other sections, for a configuration of which some could not be read. `tiers` are
    those that could be, by their number."""
    of_tiers = (_tier(("tiers", number), tier) for number, tier in tiers.items())
    return itertools.starmap(_mistake, itertools.chain(_of_sections(config), *of_tiers))


def _mistake(key: Key, problem: str) -> InvalidSetting:
    return InvalidSetting(key, f"{dotted(key)}: {problem}")


def _check_types(key: Key, struct: object, wanted: type[msgspec.Struct]) -> None:
    """Code can give a field any value; a file can't."""
    if not isinstance(struct, wanted):
        where = dotted(key) or "the configuration"
        raise InvalidSetting(key, f"{where}: {shown(struct)} is not possible; write {wanted.__name__}(...)")
    for field in fields_of(wanted):
        place, value = (*key, field.key), getattr(struct, field.attribute)
        inner, _ = unwrap(field.annotation)
        section = next(filter(is_struct, (inner, *union_members(inner))), None)
        if section is not None:
            if value is not None or inner is section:
                _check_types(place, value, section)
        elif wanted is Config and field.attribute in _LISTS:
            entry = _LISTS[field.attribute]
            if not isinstance(value, tuple | list):
                raise InvalidSetting(
                    place, f"{field.key}: {shown(value)} is not possible; write ({entry.__name__}(...),)"
                )
            for number, item in enumerate(value):
                _check_types((*place, number), item, entry)
        elif field.attribute != "options":
            converted = convert_at(place, value, field.annotation)
            if type(converted) is not type(value) and not isinstance(value, int | str):
                raise InvalidSetting(place, f"{dotted(place)}: {shown(value)} is not possible; write {converted!r}")
            if isinstance(value, str) and not isinstance(converted, str):
                raise InvalidSetting(place, f"{dotted(place)}: {shown(value)} is text; in code write {converted!r}")


def _of_sections(config: Config) -> Iterator[tuple[Key, str]]:
    yield from _capacity(("cpu", "capacity"), config.cpu.capacity, "20GiB")
    if config.lease_timeout <= 0:
        yield ("lease_timeout",), "must be longer than 0; write for example 30s"
    if config.call_timeout < LEAST_CALL_TIMEOUT:
        yield ("call_timeout",), "must be 1ms or longer; write for example 1s"
    for name in ("socket", "connect"):
        path = os.path.expanduser(getattr(config, name))
        if path not in ("", "auto") and not os.path.isabs(path):
            yield (name,), f"{getattr(config, name)!r} must be absolute; write it from / on, or auto"
        if CONTROLS.search(getattr(config, name)):
            yield (name,), f"{getattr(config, name)!r} has control characters; write a path without them"
        if len(os.fsencode(os.path.abspath(os.path.expanduser(getattr(config, name))))) > LONGEST_SOCKET:
            yield (name,), f"a socket's path has at most {LONGEST_SOCKET} bytes; write a shorter one"
    if config.share_timeout <= 0:
        yield ("share_timeout",), "must be longer than 0; write for example 1h"
    if config.tenant:
        yield from _tenant(("tenant",), config.tenant)


def _of_all(config: Config) -> Iterator[tuple[Key, str]]:
    if config.chunk_tokens % config.page_tokens:
        pages = max(1, round(config.chunk_tokens / config.page_tokens))
        yield (
            ("chunk_tokens",),
            f"{config.chunk_tokens} is not a multiple of page_tokens ({config.page_tokens}); "
            f"write {pages * config.page_tokens}",
        )
    if config.connect and config.socket:
        yield (
            ("connect",),
            "a node of another process is used, so there is none here that `socket` could serve; write one of the two",
        )
    if config.connect and config.tiers:
        yield ("connect",), "the tiers are those of the node that is used; delete `tiers` here, and write them there"
    seen: dict[str, int] = {}
    for number, tier in enumerate(config.tiers):
        key: Key = ("tiers", number)
        yield from _tier(key, tier)
        if tier.name == "cpu":
            yield (*key, "name"), "'cpu' is the host pool's name; give the tier another, as in 'name: memory'"
        if tier.name in seen:
            first = dotted(("tiers", seen[tier.name]))
            yield (
                (*key, "name"),
                f"{tier.name!r} is already the name of {first}; write another, as in 'name: {tier.name}-2'",
            )
        seen.setdefault(tier.name, number)
    yield from _beside_each_other(config.tiers)
    owners: dict[tuple[str, str], int] = {}
    for number, share in enumerate(config.shares):
        key = ("shares", number)
        yield from _share(key, share, list(seen))
        same = owners.setdefault((share.tenant, share.model), number)
        if same != number:
            name = share.tenant or share.model
            yield key, f"{name!r} has a share already, {dotted(('shares', same))}; write what it is due there"


def _share(key: Key, share: ShareConfig, tiers: list[str]) -> Iterator[tuple[Key, str]]:
    if bool(share.tenant) == bool(share.model):
        yield key, "says whose it is by one of two keys; write 'tenant: NAME' or 'model: NAME'"
    if share.tenant:
        yield from _tenant((*key, "tenant"), share.tenant)
    if share.cpu is not None:
        yield from _capacity((*key, "cpu"), share.cpu, "10GiB")
    for name, nbytes in share.tiers.items():
        place = (*key, "tiers", name)
        if name not in tiers:
            yield place, f"there is no tier {name!r}; known are {', '.join(tiers) or 'none'}"
        yield from _capacity(place, nbytes, "100GiB")


def _tenant(key: Key, name: str) -> Iterator[tuple[Key, str]]:
    if not NAME.fullmatch(name):
        yield key, f"{name!r} is no name; write up to 64 letters, digits, '.', '_' and '-'"


def _beside_each_other(tiers: Sequence[TierConfig]) -> Iterator[tuple[Key, str]]:
    """What is wrong with tiers in one file that are right alone."""
    options: dict[tuple[str, str], int] = {}
    for number, tier in enumerate(tiers):
        for name in getattr(tier.options, "one_per_process", ()):
            first = options.setdefault((tier.backend, name), number)
            mine, its = getattr(tier.options, name), getattr(tiers[first].options, name)
            if mine != its:
                both = f"{shown(mine)} and {shown(its)} ({dotted(('tiers', first))})"
                yield ("tiers", number, name), f"{both} cannot both be in one process; write the same for both"
    # In this order what is inside of a directory follows it at once.
    directories = sorted((f"{path.rstrip('/')}/", number) for number, tier in enumerate(tiers) for path in _paths(tier))
    outer, owner = "", -1
    for path, number in directories:
        if not outer or not path.startswith(outer):
            outer, owner = path, number
        elif number != owner:
            yield _nested(path, number, outer, owner)


def _nested(inner: str, inner_tier: int, outer: str, outer_tier: int) -> tuple[Key, str]:
    """Of two tiers in each other's directories the later one is told."""
    later, earlier = max(inner_tier, outer_tier), dotted(("tiers", min(inner_tier, outer_tier)))
    one, other = inner.rstrip("/") or "/", outer.rstrip("/") or "/"
    if one == other:
        told = f"{one!r} is already the path of {earlier}; write another directory, or delete one of the two tiers"
    elif later == inner_tier:
        told = f"{one!r} is inside {other!r}, the path of {earlier}; write one beside that one"
    else:
        told = f"{one!r}, the path of {earlier}, is inside {other!r}; write one beside that one"
    return ("tiers", later, "path"), told


def _paths(tier: TierConfig) -> list[str]:
    """Normalised paths of a backend that keeps directories, which says so by a method `paths` of its options."""
    paths = getattr(tier.options, "paths", None)
    return list(paths()) if callable(paths) else []


def _tier(key: Key, tier: TierConfig) -> Iterator[tuple[Key, str]]:
    if not NAME.fullmatch(tier.name):
        yield (*key, "name"), f"{tier.name!r} is no name; write up to 64 letters, digits, '.', '_' and '-'"
    if tier.capacity is not None:
        yield from _capacity((*key, "capacity"), tier.capacity, "500GiB")
    if tier.write == "never" and tier.admit != "always":
        yield (
            (*key, "admit"),
            f"{tier.admit!r} says what is written, but 'write: never' writes nothing; delete one of the two",
        )
    for name, seconds in (("read_timeout", tier.read_timeout), ("write_timeout", tier.write_timeout)):
        if seconds <= 0:
            yield (*key, name), "must be longer than 0; write for example 2s"
    if tier.cipher is not None:
        yield from _cipher((*key, "cipher"), tier.cipher)
    breaker = tier.breaker
    if breaker.cooldown <= 0:
        yield (*key, "breaker", "cooldown"), "must be longer than 0; write for example 1s"
    if breaker.max_cooldown < breaker.cooldown:
        yield (
            (*key, "breaker", "max_cooldown"),
            f"{format_duration(breaker.max_cooldown)} is shorter than cooldown "
            f"({format_duration(breaker.cooldown)}); write at least {format_duration(breaker.cooldown)}",
        )


def _cipher(key: Key, cipher: CipherConfig) -> Iterator[tuple[Key, str]]:
    for name in cipher.tenants:
        yield from _tenant((*key, "tenants", name), name)
    keys: list[tuple[Key, str]] = [((*key, "key"), cipher.key)]
    keys += [((*key, "older", number), text) for number, text in enumerate(cipher.older)]
    keys += [((*key, "tenants", name), text) for name, text in cipher.tenants.items()]
    for place, text in keys:
        try:
            key_of(text)
        except ValueError as problem:
            yield (
                place,
                f"what is given {problem} (it is secret, so it is not shown); write {KEY_BYTES} random bytes in "
                f"base64, which 'openssl rand -base64 {KEY_BYTES}' makes, best in a file: "
                "${file:/run/secrets/kv-key}",
            )


def _capacity(key: Key, nbytes: int, example: str) -> Iterator[tuple[Key, str]]:
    if nbytes < _SMALLEST:
        yield (
            key,
            f"{format_size(nbytes)} cannot hold a chunk; write at least {format_size(_SMALLEST)}, with a unit, as in "
            f"{example} (a bare number is bytes)",
        )
