"""Storing and retrieving a prompt, step by step, written once for blocking and awaiting callers.

An operation is a generator. It yields `Copy` (run this, it moves bytes) or `Wait` (wait for this future, at most so
long) and is sent what came of it. `run` drives it on the caller's thread, `arun` on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from lmcache_core.client import AHEAD, Client, Grant, Held, Model, counted_group
from lmcache_core.errors import ClosedError
from lmcache_core.protocols import KVView

T = TypeVar("T")

MOST_ASKING = 10.0
"""Seconds to wait at most for what tiers that cannot be listed hold; their own deadlines come first where they can be
cancelled."""
TRIES = 3
"""How often the boundary is looked for again when a part of a group could not be had."""


class Copy(NamedTuple):
    """Call `move`; it copies bytes and may take a while."""

    move: Callable[[], None]


class Wait(NamedTuple):
    """Wait for `future`, at most `seconds`. The answer sent is its result, or False when it isn't there in time."""

    future: Future[bool]
    seconds: float | None


Step = Copy | Wait
Operation = Generator[Step, bool, T]


def run(operation: Operation[T]) -> T:
    """Carry an operation out on this thread."""
    answer = False
    try:
        step = next(operation)
        while True:
            if isinstance(step, Copy):
                step.move()
            else:
                try:
                    answer = step.future.result(step.seconds)
                except (TimeoutError, CancelledError):  # the latter: the node is being closed
                    answer = False
            step = operation.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()


async def arun(operation: Operation[T]) -> T:
    """Carry an operation out for a coroutine: copies go to a thread, so that the event loop runs on."""
    answer = False
    try:
        step = next(operation)
        while True:
            if isinstance(step, Copy):
                copying = asyncio.ensure_future(asyncio.to_thread(step.move))
                await _ended(copying)
            else:
                try:
                    answer = await asyncio.wait_for(
                        asyncio.shield(asyncio.wrap_future(step.future)), timeout=step.seconds
                    )
                except TimeoutError:
                    answer = False
                except asyncio.CancelledError:
                    if not step.future.cancelled() or ((me := asyncio.current_task()) and me.cancelling()):
                        raise
                    answer = False  # the node is being closed
            step = operation.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()


async def _ended(copying: asyncio.Future[None]) -> None:
    """Wait until a copy has ended, however often this is cancelled meanwhile: until then its slot is in use."""
    cancelled = False
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    copying.result()


@dataclass(slots=True)
class Loaded:
    """Outcome of `retrieve`: pages that are in the view now, by tier how many of them were copied from there, the bytes
    that were copied, and whether a part of what was promised was missing."""

    pages: int
    tiers: dict[str, int]
    nbytes: int = 0
    broken: bool = False


def retrieve(
    client: Client,
    model: Model,
    keys: Sequence[bytes],
    view: KVView,
    *,
    first_page: int = 0,
    places: Sequence[str] | None = None,
    seconds: float | None = None,
) -> Operation[Loaded]:
    """Copy the longest prefix that can be restored into `view`; pages in front of `first_page` are there already.

    A part that cannot be had ends the prefix in front of it. What lies in the view behind the pages returned is
    undefined.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    for number in range(TRIES):
        counted = number == 0  # what comes after it is the same request
        held = client.hold(model, keys, places, counted=counted)
        if held.asked is not None:
            client.release(held)
            left = _left(deadline)
            yield Wait(held.asked, MOST_ASKING if left is None else min(left, MOST_ASKING))
            held = client.hold(model, keys, places, counted=counted)
        try:
            loaded = yield from load(client, held, view, first_page, deadline)
        finally:
            client.release(held)
        if not loaded.broken or len(model.namespace.groups) == 1:
            break
        keys = keys[: max(held.pages - 1, 0)]
    else:
        loaded = Loaded(0, {})
    count_loaded(client, loaded, model.namespace.page_tokens)
    return loaded


def count_loaded(client: Client, loaded: Loaded, page_tokens: int) -> None:
    """Count what has come from where."""
    for tier, pages in loaded.tiers.items():
        client.count("retrieved_tokens", tier, pages * page_tokens)


class Granter(Protocol):
    """What `load` asks of a client; see `Client`."""

    def grant(self, held: Held, start: int, ahead: int) -> list[Grant]: ...
    def consume(self, held: Held, parts: int) -> None: ...
    def count(self, name: str, label: str, amount: float = 1) -> None: ...


class Target(Protocol):
    """What `load` asks of a view; see `KVView`."""

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None: ...


def load(
    client: Granter, held: Held, view: Target, first_page: int = 0, deadline: float | None = None
) -> Operation[Loaded]:
    """Copy all parts of a lease into `view`; pages in front of `first_page` are there already. Where one is missing,
    what lies in front of it is what there is; of several groups, nothing."""
    parts = held.parts
    counted = counted_group([part.group for part in parts]) if parts else 0
    tiers: dict[str, int] = {}
    granted: list[Any] = []
    copied_bytes = 0
    started = time.perf_counter()
    number = 0
    broken = False
    while number < len(parts):
        if not granted or granted[0].source is None:
            granted = client.grant(held, number, AHEAD)
            if not granted:
                broken = True
                break
            if granted[0].wait is not None:
                if not (yield Wait(granted[0].wait, _left(deadline))):
                    broken = True
                    break
                continue
        ready = 0
        for grant in granted:
            if grant.source is None:
                break
            part = parts[number + ready]
            ready += 1
            there = max(0, first_page - part.first)
            if there >= part.pages:
                continue
            source = grant.source[len(grant.source) // part.pages * there :]
            yield Copy(_scatter(view, part.group, part.first + there, part.pages - there, source))
            copied_bytes += len(source)
            if part.group == counted:
                tiers[grant.tier] = tiers.get(grant.tier, 0) + part.pages - there
        client.consume(held, ready)
        number += ready
        granted = granted[ready:]
    if copied_bytes:
        client.count("copied_bytes", "to_engine", copied_bytes)
        client.count("copy_seconds", "to_engine", time.perf_counter() - started)
    pages = held.pages
    if broken:
        single = len({part.group for part in parts}) == 1
        pages = parts[number].first if single else 0
        tiers = tiers if single else {}
    return Loaded(pages, tiers, copied_bytes, broken)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _scatter(view: Target, group: int, first: int, pages: int, source: memoryview) -> Callable[[], None]:
    return lambda: view.scatter(group, first, pages, source)


@dataclass(slots=True)
class Stored:
    """Outcome of `store`, in pages over all groups."""

    stored: int
    present: int
    dropped: int
    written: Future[bool]


def store(
    client: Client,
    model: Model,
    keys: Sequence[bytes],
    view: KVView,
    *,
    at: Sequence[int] = (),
    first_page: int = 0,
    places: Sequence[str] | None = None,
) -> Operation[Stored]:
    """Copy what the node lacks of a prompt out of `view`."""
    storing = client.begin_store(model, keys, at, first_page, places)
    copied = 0
    started = time.perf_counter()
    try:
        for room in storing.rooms:
            yield Copy(_gather(view, room.part.group, room.part.first, room.part.pages, room.target))
            copied += len(room.target)
            client.filled(room)
    except BaseException:  # whatever it is, what has been copied is kept and the rest given back
        with contextlib.suppress(ClosedError):  # it must not hide what happened
            client.finish_store(storing)
        raise
    finished = client.finish_store(storing)
    if copied:
        client.count("copied_bytes", "from_engine", copied)
        client.count("copy_seconds", "from_engine", time.perf_counter() - started)
    tokens = model.namespace.page_tokens
    client.count("stored_tokens", "store", finished.pages * tokens)
    client.count("present_tokens", "store", storing.present * tokens)
    lost = sum(room.part.pages for room in storing.rooms) - finished.pages
    return Stored(finished.pages, storing.present, storing.dropped + lost, finished.written)


def _gather(view: KVView, group: int, first: int, pages: int, into: memoryview) -> Callable[[], None]:
    return lambda: view.gather(group, first, pages, into)
