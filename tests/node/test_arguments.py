"""Whatever callers give to the public interface: a documented result, or an error of our own that helps.

The cases are the product of all arguments of all public methods with values that none, or only some, of them can take.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import decimal
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmcache_core
from lmcache_core import (
    AsyncCache,
    Cache,
    Encoding,
    Group,
    LMCacheError,
    Lookup,
    Namespace,
    Prompt,
    Retrieved,
    StoreResult,
    make_seed,
    page_extras,
    page_keys,
)
from lmcache_core.client import Stats
from lmcache_core.config import Config, CpuConfig, TierConfig
from tests.node.kv import PAGE_TOKENS, PageView, at_rest, namespace, open_cache, tokens

PAGES = 6


class NoGather:
    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """Takes it."""


class GatherIsNoMethod:
    gather = scatter = 5


class Raising:
    """Says that it is a sequence, and is none."""

    def __len__(self) -> int:
        raise ValueError("a length it has not")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("nothing in it")

    def __getitem__(self, number: int) -> int:
        raise KeyError(number)


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("has no text")


def recursive_dict() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["tiers"] = [made]
    return made


def recursive_list() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep_list() -> list[Any]:
    made: list[Any] = [1]
    for _ in range(5000):
        made = [made]
    return made


HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "-1": lambda: -1,
    "7": lambda: 7,
    "10**30": lambda: 10**30,
    "-10**30": lambda: -(10**30),
    "1.5": lambda: 1.5,
    "2.0": lambda: 2.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e300": lambda: 1e300,
    "complex": lambda: 1j,
    "Decimal": lambda: decimal.Decimal("1.5"),
    "timedelta": lambda: datetime.timedelta(seconds=1),
    "np.int64": lambda: np.int64(3),
    "np.float64 nan": lambda: np.float64("nan"),
    "np.bool": lambda: np.bool_(True),
    "''": lambda: "",
    "'cpu'": lambda: "cpu",
    "'t0'": lambda: "t0",
    "a word": lambda: "word",
    "a surrogate": lambda: "\ud800",
    "a NUL": lambda: "a\0b",
    "b''": lambda: b"",
    "3 bytes": lambda: b"abc",
    "32 bytes": lambda: bytes(32),
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(bytes(8)),
    "released memoryview": lambda: _released(),
    "2-D memoryview": lambda: memoryview(bytes(16)).cast("I", (2, 2)),
    "[]": lambda: [],
    "()": lambda: (),
    "{}": dict,
    "set()": set,
    "{1, 2}": lambda: {1, 2},
    "frozenset": lambda: frozenset({"cpu"}),
    "{1: 2}": lambda: {1: 2},
    "{'cpu': 1}": lambda: {"cpu": 1},
    "{0: 64 bytes}": lambda: {0: bytes(64)},
    "{0: text}": lambda: {0: "x" * 64},
    "{'0': bytes}": lambda: {"0": bytes(64)},
    "{True: bytes}": lambda: {True: bytes(64)},
    "{-1: bytes}": lambda: {-1: bytes(64)},
    "{1.5: bytes}": lambda: {1.5: bytes(64)},
    "{0: 5}": lambda: {0: 5},
    "{0: None}": lambda: {0: None},
    "OrderedDict": lambda: collections.OrderedDict({0: bytes(64)}),
    "['cpu']": lambda: ["cpu"],
    "['cpu', 5]": lambda: ["cpu", 5],
    "['tape']": lambda: ["tape"],
    "[['cpu']]": lambda: [["cpu"]],
    "[None]": lambda: [None],
    "[1.0]": lambda: [1.0],
    "[nan]": lambda: [float("nan")],
    "[-1]": lambda: [-1],
    "[2**32]": lambda: [2**32],
    "[10**30]": lambda: [10**30],
    "[[1]]": lambda: [[1]],
    "['1']": lambda: ["1"],
    "[True]": lambda: [True],
    "(0, 1, 'hash')": lambda: (0, 1, "hash"),
    "[(0, 1, 'hash')]": lambda: [(0, 1, "hash")],
    "[(0, 10**30, 'hash')]": lambda: [(0, 10**30, "hash")],
    "[(10**30, 1, 'hash')]": lambda: [(10**30, 1, "hash")],
    "[(0.5, 1, 'hash')]": lambda: [(0.5, 1, "hash")],
    "[(0, 1, 5)]": lambda: [(0, 1, 5)],
    "a generator": lambda: (number for number in range(40)),
    "range": lambda: range(40),
    "dict_values": lambda: {1: 2}.values(),
    "array of floats": lambda: np.zeros(4),
    "array of objects": lambda: np.array([None, {}], object),
    "array of bools": lambda: np.ones(4, bool),
    "2-D array": lambda: np.zeros((2, 2), np.int64),
    "0-D array": lambda: np.array(5),
    "array of text": lambda: np.array(["cpu"]),
    "array of complex": lambda: np.zeros(4, complex),
    "negative array": lambda: np.array([-5]),
    "recursive dict": recursive_dict,
    "recursive list": recursive_list,
    "deep list": deep_list,
    "an object": object,
    "a class": lambda: int,
    "a function": lambda: len,
    "a module": lambda: lmcache_core,
    "a path": lambda: Path("/nonexistent/nothing.yaml"),
    "raising": Raising,
    "unreadable": Unreadable,
    "no gather": NoGather,
    "gather is no method": GatherIsNoMethod,
    "the class of a view": lambda: PageView,
    "an Ellipsis": lambda: ...,
    "Config": lambda: Config(chunk_tokens="256"),  # type: ignore[arg-type]
    "Config, cpu": lambda: Config(cpu=5),  # type: ignore[arg-type]
    "Config, capacity": lambda: Config(cpu=CpuConfig(capacity=float("nan"))),  # type: ignore[arg-type]
    "Config, tiers": lambda: Config(tiers=5),  # type: ignore[arg-type]
    "Config, tier": lambda: Config(tiers=({"backend": "disk"},)),  # type: ignore[arg-type]
    "Config, backend": lambda: Config(tiers=(TierConfig(backend=5),)),  # type: ignore[arg-type]
    "Config, nan": lambda: Config(lease_timeout=float("nan")),
    "Config, options": lambda: Config(cpu=CpuConfig(capacity=2**20), tiers=(TierConfig(backend="disk", options=5),)),
}


def _released() -> memoryview:
    view = memoryview(bytes(8))
    view.release()
    return view


@dataclass
class Room:
    """What the methods are called on."""

    cache: Cache
    prompt: Prompt
    result: StoreResult
    async_cache: AsyncCache


def good(room: Room, parameter: str, method: str) -> Any:
    """A value that a method can take."""
    keys = room.prompt.keys
    values: dict[str, Any] = {
        "prompt": tokens("abcdef"),
        "tokens": tokens("ab"),
        "view": PageView.of(keys) if method == "store" else PageView(PAGES),
        "client": room.cache.client,
        "namespace": room.cache.namespace,
        "config": {"cpu": {"capacity": "1MiB"}, "page_tokens": PAGE_TOKENS},
        "page_tokens": PAGE_TOKENS,
        "spans": [(0, 4, "hash")],
    }
    return values[parameter]


METHODS: dict[str, Callable[[Room], Callable[..., Any]]] = {
    "Cache": lambda room: Cache,
    "Cache.open": lambda room: Cache.open,
    "Cache.prompt": lambda room: room.cache.prompt,
    "Prompt.extend": lambda room: room.cache.prompt([1, 2, 3]).extend,
    "Cache.lookup": lambda room: room.cache.lookup,
    "Cache.retrieve": lambda room: room.cache.retrieve,
    "Cache.store": lambda room: room.cache.store,
    "Cache.prefetch": lambda room: room.cache.prefetch,
    "Cache.contains": lambda room: room.cache.contains,
    "Cache.pin": lambda room: room.cache.pin,
    "Cache.unpin": lambda room: room.cache.unpin,
    "Cache.evict": lambda room: room.cache.evict,
    "Cache.clear": lambda room: room.cache.clear,
    "Cache.flush": lambda room: room.cache.flush,
    "StoreResult.wait": lambda room: room.result.wait,
    "AsyncCache": lambda room: AsyncCache,
    "AsyncCache.open": lambda room: AsyncCache.open,
    "AsyncCache.prompt": lambda room: room.async_cache.prompt,
    "AsyncCache.lookup": lambda room: room.async_cache.lookup,
    "AsyncCache.retrieve": lambda room: room.async_cache.retrieve,
    "AsyncCache.store": lambda room: room.async_cache.store,
    "AsyncCache.prefetch": lambda room: room.async_cache.prefetch,
    "AsyncCache.contains": lambda room: room.async_cache.contains,
    "AsyncCache.pin": lambda room: room.async_cache.pin,
    "AsyncCache.unpin": lambda room: room.async_cache.unpin,
    "AsyncCache.evict": lambda room: room.async_cache.evict,
    "AsyncCache.clear": lambda room: room.async_cache.clear,
    "make_seed": lambda room: make_seed,
    "page_keys": lambda room: page_keys,
    "page_extras": lambda room: page_extras,
}

NO_ARGUMENTS = {
    "Cache.stats",
    "Cache.close",
    "AsyncCache.stats",
    "AsyncCache.close",
    "AsyncCache.flush",
    "StoreResult.written",
}
RESULTS = (Cache, AsyncCache, Prompt, Lookup, Retrieved, StoreResult, Stats, int, bool, dict, list, bytes, type(None))


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(function).parameters.values() if each.name != "self"]


def test_the_table_has_every_public_method() -> None:
    named = set(METHODS) | NO_ARGUMENTS
    for owner in (Cache, AsyncCache, Prompt, StoreResult):
        for name, _ in inspect.getmembers(owner, callable):
            if not name.startswith("_"):
                assert f"{owner.__name__}.{name}" in named
    callables = {name for name in lmcache_core.__all__ if inspect.isfunction(getattr(lmcache_core, name))}
    assert callables <= named


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    from lmcache_backends.cpu import CpuBackend, CpuOptions

    with open_cache(CpuBackend(CpuOptions()), slots=16) as cache:
        prompt = cache.prompt(tokens("abcdef"))
        result = cache.store(prompt, PageView.of(prompt.keys))
        assert result.wait(10)
        yield Room(cache, prompt, result, AsyncCache(cache.client, cache.namespace))


def attempt(room: Room, name: str, wrong: str, value: Any) -> Any:
    """Call a method with one wrong argument."""
    method = METHODS[name](room)
    arguments = {
        each.name: good(room, each.name, name.rpartition(".")[2])
        for each in parameters(method)
        if each.default is inspect.Parameter.empty
    }
    called = method(**arguments | {wrong: value})
    return asyncio.run(called) if inspect.iscoroutine(called) else called


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_taken_or_refused_by_name(room: Room, name: str) -> None:
    problems = []
    for parameter in parameters(METHODS[name](room)):
        for label, make in HOSTILE.items():
            try:
                got = attempt(room, name, parameter.name, make())
            except LMCacheError as error:
                text = str(error)
                if not re.search(r"[a-z]{3}", text) or "Traceback" in text or len(text) > 1500:
                    problems.append(f"{parameter.name}={label}: says {text!r}")
            except Exception as error:  # noqa: BLE001  # everything else is what this test is for
                problems.append(f"{parameter.name}={label}: {type(error).__name__}: {error}")
            else:
                if not isinstance(got, RESULTS):
                    problems.append(f"{parameter.name}={label}: gives {type(got).__name__}")
                if isinstance(got, Cache | AsyncCache) and got.client is not room.cache.client:
                    with contextlib.closing(got.client):
                        pass
    assert not problems, "\n".join(problems)
    pinned = room.cache.unpin(room.prompt)
    while pinned:
        pinned = room.cache.unpin(room.prompt)


def test_nothing_of_it_stays_behind(room: Room) -> None:
    for name in METHODS:
        for parameter in parameters(METHODS[name](room)):
            if parameter.name in ("view", "source", "placement", "first_token", "max_tokens", "turns"):
                for make in HOSTILE.values():
                    with contextlib.suppress(LMCacheError):
                        attempt(room, name, parameter.name, make())
    at_rest(room.cache)


OK = object()
"""Taken."""
TIERS = [
    (None, OK),
    ("cpu", OK),
    ("t0", OK),
    (["cpu", "t0"], OK),
    (("t0",), OK),
    ({"cpu"}, OK),
    ([], OK),
    ("tape", "there is no tier 'tape'; this node has cpu, t0"),
    ("", "there is no tier ''"),
    (["cpu", 5], r"name of a tier.*not 5"),
    ({"cpu": 1}, r"names of tiers.*not a dict"),
    (b"cpu", r"names of tiers.*not a bytes"),
    (5, r"names of tiers.*not an int"),
]


@pytest.mark.parametrize(("given", "expected"), TIERS)
def test_tiers_are_one_name_or_several(room: Room, given: Any, expected: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: room.cache.lookup(room.prompt, source=given),
        lambda: room.cache.retrieve(room.prompt, PageView(PAGES), source=given),
        lambda: room.cache.store(room.prompt, PageView.of(room.prompt.keys), placement=given),
        lambda: room.cache.prefetch(room.prompt, source=given),
        lambda: room.cache.evict([1], given),
    ]
    for call in calls:
        if expected is OK:
            call()
        else:
            with pytest.raises(LMCacheError, match=expected):
                call()


def test_a_tier_given_as_text_is_that_tier(room: Room) -> None:
    fresh = room.cache.prompt(tokens("uvwxyz"))
    assert room.cache.store(fresh, PageView.of(fresh.keys), placement="cpu").stored == PAGES * PAGE_TOKENS
    assert room.cache.contains(fresh) == {"cpu": PAGES * PAGE_TOKENS, "t0": 0}
    assert room.cache.lookup(fresh, source="t0").tokens == 0
    assert room.cache.lookup(fresh, source="cpu").tokens == PAGES * PAGE_TOKENS
    assert room.cache.evict(fresh, "t0") == 0
    assert room.cache.evict(fresh, "cpu") == 2


NUMBERS = [
    (0, OK),
    (PAGE_TOKENS, OK),
    (np.int64(PAGE_TOKENS), OK),
    (10**30, OK),
    (-1, "must not be negative: -1"),
    (16.0, "whole number of tokens, not 16.0"),
    (float("nan"), "whole number of tokens, not nan"),
    (float("inf"), "whole number of tokens, not inf"),
    (True, "whole number of tokens, not True"),
    ("16", "whole number of tokens, not '16'"),
]


@pytest.mark.parametrize(("given", "expected"), NUMBERS)
def test_numbers_of_tokens_are_whole(room: Room, given: Any, expected: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "first_token": lambda: room.cache.retrieve(room.prompt, PageView(PAGES), first_token=given),
        "max_tokens": lambda: room.cache.retrieve(room.prompt, PageView(PAGES), max_tokens=given),
        "first_token ": lambda: room.cache.store(room.prompt, PageView.of(room.prompt.keys), first_token=given),
        "turns": lambda: room.cache.store(room.prompt, PageView.of(room.prompt.keys), turns=[given]),
    }
    for name, call in calls.items():
        if expected is OK:
            call()
        else:
            with pytest.raises(LMCacheError, match=f"{name.strip()}.*{re.escape(expected)}"):
                call()


def test_max_tokens_without_end_says_what_to_write(room: Room) -> None:
    with pytest.raises(LMCacheError, match=r"max_tokens.*None for no limit"):
        room.cache.retrieve(room.prompt, PageView(PAGES), max_tokens=float("inf"))  # type: ignore[arg-type]


def test_turns_are_a_list(room: Room) -> None:
    view = PageView.of(room.prompt.keys)
    for given in (16, "16", {16: 1}, None):
        with pytest.raises(LMCacheError, match=r"turns.*write \[32, 64\]"):
            room.cache.store(room.prompt, view, turns=given)  # type: ignore[arg-type]
    assert room.cache.store(room.prompt, view, turns=np.array([16, 32])).present == PAGES * PAGE_TOKENS  # type: ignore[arg-type]


def test_a_view_that_lacks_a_method_is_refused_before_anything_is_reserved(room: Room) -> None:
    fresh = room.cache.prompt(tokens("ghijkl"))
    for view in (object(), NoGather(), GatherIsNoMethod(), None, np.zeros(4)):
        with pytest.raises(LMCacheError, match=r"view.*gather\(group, first_page, pages, into\)"):
            room.cache.store(fresh, view)  # type: ignore[arg-type]
    for view in (object(), GatherIsNoMethod(), None):
        with pytest.raises(LMCacheError, match=r"view.*scatter\(group, first_page, pages, source\)"):
            room.cache.retrieve(fresh, view)  # type: ignore[arg-type]
    assert room.cache.contains(fresh) == {"cpu": 0, "t0": 0}
    at_rest(room.cache)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({1: 2}, "tokens.*order.*dict"),
        ({1, 2}, "tokens.*order.*set"),
        (frozenset({1}), "tokens.*order.*frozenset"),
        ({1: 2}.keys(), "tokens.*order.*dict_keys"),
        ("abc", "tokens.*flat sequence of integers"),
        (None, "tokens.*flat sequence of integers"),
        ([1.0], "tokens.*flat sequence of integers"),
        ([float("nan")], "tokens.*flat sequence of integers"),
        ([-1], r"not -1 at 0"),
        (_released(), "tokens"),
    ],
)
def test_tokens_that_are_none(room: Room, given: Any, expected: str) -> None:
    prompt = room.cache.prompt([1, 2])
    for call in (
        lambda: room.cache.prompt(given),
        lambda: prompt.extend(given),
        lambda: room.cache.lookup(given),
        lambda: room.cache.pin(given),
        lambda: page_keys(given, 16),
    ):
        with pytest.raises(LMCacheError, match=expected):
            call()
    assert prompt.tokens == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([bytes(64)], "extras.*page_extras.*not a list"),
        ("x", "extras.*page_extras.*not a str"),
        ({0: "x" * 64}, "extras of page 0.*page_extras"),
        ({0: 5}, "extras of page 0.*page_extras"),
        ({0: b"abc"}, "extras of page 0.*page_extras"),
        ({"0": bytes(64)}, "extras of page '0'.*page_extras"),
        ({True: bytes(64)}, "extras of page True.*page_extras"),
        ({-1: bytes(64)}, "extras of page -1.*page_extras"),
    ],
)
def test_extras_that_are_none(room: Room, given: Any, expected: str) -> None:
    with pytest.raises(LMCacheError, match=expected):
        room.cache.prompt(tokens("ab"), extras=given)
    with pytest.raises(LMCacheError, match=expected):
        page_keys(tokens("ab"), 16, extras=given)


def test_a_manifest_is_one_or_refused() -> None:
    for make in HOSTILE.values():
        with pytest.raises(LMCacheError, match="manifest"):
            Namespace.from_manifest(make())


@pytest.mark.parametrize("cls", [Namespace, Group, Encoding])
def test_fields_of_a_namespace_are_what_they_say(cls: Any) -> None:
    whole = namespace()
    model = {Namespace: whole, Group: whole.groups[0], Encoding: whole.encoding}[cls]
    fields = {name: getattr(model, name) for name in cls.__struct_fields__}
    problems = []
    for name in fields:
        for label, make in HOSTILE.items():
            try:
                made = cls(**fields | {name: make()})
                if cls is Namespace:
                    assert len(made.content) == 32
                    assert Namespace.from_manifest(made.manifest()) == made
            except LMCacheError:
                pass
            except Exception as error:  # noqa: BLE001  # everything else is what this test is for
                problems.append(f"{name}={label}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)
