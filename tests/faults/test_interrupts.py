"""Ctrl-C raises in the main thread wherever it is. Afterwards a cache works, or says that it doesn't; nothing locks up.

CPython looks for signals when it enters a function and when it comes back from a C function that was called. A profile
function is called at just these points, so that it can raise at each of them in turn.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt
from benchmarks.faults.stress import leftovers
from lmcache_core import ClosedError, LayoutError, UsageError
from tests.faults.kit import an_engine
from tests.node.shelf import Shelf

PROMPT = Prompt(0, 2 * CHUNK_PAGES)
STEPS = 20
"""How many of the points are tried, about: each has a node of its own."""


class Interrupter:
    """Raises at point number `at` of what happens inside it on this thread, or counts the points."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.points = 0

    def _point(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or "lmcache_core" not in frame.f_code.co_filename:
            return
        if any(name == "__del__" for name in callers(frame)):
            return  # Python itself reports and drops what is raised there
        self.points += 1
        if self.points == self.at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sys.setprofile(self._point)
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


def callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def store(engine: Engine) -> None:
    result = engine.cache.store(PROMPT.tokens, engine.view(PROMPT))
    assert result.stored == len(PROMPT.tokens)


def retrieve(engine: Engine) -> None:
    engine.cache.retrieve(PROMPT.tokens, engine.view(PROMPT))


def look_up(engine: Engine) -> None:
    engine.cache.lookup(PROMPT.tokens)
    engine.cache.pin(PROMPT.tokens)
    engine.cache.unpin(PROMPT.tokens)
    engine.cache.evict(PROMPT.tokens)


DEEDS: dict[str, Callable[[Engine], None]] = {"store": store, "retrieve": retrieve, "look_up": look_up}


def interrupted(deed: str, at: int | None) -> tuple[int, str]:
    """Do it with an interrupt at a point. Returns how many points there were, and how it ended."""
    with an_engine(Shelf(), lease_timeout=0.05) as engine:
        guard = engine.cache.client.node.guard  # type: ignore[attr-defined]
        if deed != "store":
            assert engine.stored(PROMPT)
        interrupter = Interrupter(at)
        with interrupter():
            DEEDS[deed](engine)
        assert guard.mutex.acquire(timeout=5), "the mutex is held by nobody who will let go of it"
        guard.mutex.release()
        if guard.broken:
            with pytest.raises(ClosedError, match="interrupted"):
                engine.cache.lookup(PROMPT.tokens)
            return interrupter.points, "refuses"
        engine.cache.unpin(PROMPT.tokens)  # the interrupt may have come between that and the pin
        gc.collect()  # what the interrupt's traceback kept alive
        assert until(lambda: not leftovers(engine.cache.stats()), 5), leftovers(engine.cache.stats())
        assert engine.serves(PROMPT)
        return interrupter.points, "works"


@pytest.mark.parametrize("deed", DEEDS)
def test_an_interrupt_at_any_point_leaves_a_cache_that_works_or_says_that_it_does_not(deed: str) -> None:
    points, how = interrupted(deed, None)
    assert points > 20
    assert how == "works"
    ends = [interrupted(deed, at)[1] for at in range(1, points + 1, max(1, points // STEPS))]
    assert {"works", "refuses"} >= set(ends)
    assert "works" in ends


def test_one_that_waits_for_the_mutex_is_interrupted_without_it() -> None:
    with an_engine() as engine:
        guard = engine.cache.client.node.guard  # type: ignore[attr-defined]
        engine.store(PROMPT)
        with pytest.raises(KeyboardInterrupt), guard.turn:
            raise KeyboardInterrupt
        assert guard.broken
        assert not guard.mutex.locked()


def test_a_mistake_of_a_caller_who_is_mending_something_is_a_mistake_and_no_interrupt() -> None:
    """What is being handled when a call is made has nothing to do with what the call does."""
    with an_engine() as engine:
        client = engine.cache.client
        other = msgspec.structs.replace(engine.cache.namespace, shards=1 << 20)
        try:
            raise KeyError("something of the engine's")
        except KeyError:
            with pytest.raises(LayoutError, match="too large"):
                client.register(other)
            storing = client.begin_store(engine.cache._model, engine.cache.prompt(PROMPT.tokens).keys)
            engine.view(PROMPT).gather(0, 0, CHUNK_PAGES, storing.rooms[0].target)
            client.filled(storing.rooms[0])
            with pytest.raises(UsageError, match="reported twice"):
                client.filled(storing.rooms[0])
            client.finish_store(storing)
        engine.store(PROMPT)
        assert engine.retrieve(PROMPT) == PROMPT.pages


def test_closing_ends_for_those_who_wait_on_other_threads() -> None:
    shelf = Shelf()
    with an_engine(shelf) as engine:
        assert engine.stored(PROMPT)
        node = engine.cache.client.node  # type: ignore[attr-defined]
        ends: list[object] = []

        def use() -> None:
            try:
                while True:
                    engine.cache.lookup(PROMPT.tokens)
            except ClosedError as error:
                ends.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        node.guard.interrupted(KeyboardInterrupt())
        for thread in threads:
            thread.join(5)
        assert len(ends) == 3
        node.close()
        assert not node._loop.thread.is_alive()
