"""An engine as a cache sees one: KV that follows from its key, and calls that are checked each time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.faults.campaign import Run
from lmcache_core import Cache, Encoding, Group, GroupKind, Namespace, StoreResult
from lmcache_core.client import TierStats
from lmcache_core.frame import FrameShape, shape

__all__ = [
    "CHUNK_PAGES",
    "CHUNK_TOKENS",
    "PAGE_BYTES",
    "PAGE_TOKENS",
    "Engine",
    "Prompt",
    "View",
    "content",
    "frame_shape",
    "namespace",
    "settings",
]

T = TypeVar("T")

PAGE_TOKENS = 4
CHUNK_TOKENS = 16
CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS
LAYERS = 2
PAGE_LAYER_BYTES = 1504
"""No multiple of 4096, so that a frame has padding."""
PAGE_BYTES = LAYERS * PAGE_LAYER_BYTES
DEADLINE = 5.0
"""Seconds that a call that waits for no I/O may take on a busy machine, and that others may take longer than asked."""


def namespace(model: str = "model", dtype: str = "float16") -> Namespace:
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(LAYERS)),
        page_layer_bytes=PAGE_LAYER_BYTES,
        dtype=dtype,
        kv_heads=1,
        head_size=94,
    )
    return Namespace(
        weights=model,
        model_name=model,
        page_tokens=PAGE_TOKENS,
        groups=(group,),
        encoding=Encoding(layout="canonical"),
    )


def frame_shape(pages: int = CHUNK_PAGES) -> FrameShape:
    return shape(pages, 1, PAGE_BYTES)


def settings(path: Path, *, cpu: str | int = "1MiB", capacity: str | int = "64MiB", **tier: Any) -> dict[str, Any]:
    """A configuration with one disk tier, as YAML would have it."""
    disk = {"backend": "disk", "path": str(path), "capacity": capacity, "min_free": 0, **tier}
    disk.setdefault("breaker", {"cooldown": "50ms", "max_cooldown": "200ms"})
    return {"chunk_tokens": CHUNK_TOKENS, "page_tokens": PAGE_TOKENS, "cpu": {"capacity": cpu}, "tiers": [disk]}


class Prompt(NamedTuple):
    """A prompt: those of one number are beginnings of each other, those of two numbers have nothing in common."""

    number: int
    pages: int

    @property
    def tokens(self) -> list[int]:
        first = self.number << 12
        return list(range(first, first + self.pages * PAGE_TOKENS))


def content(key: bytes, space: bytes) -> bytes:
    """The KV of one page: it follows from its key and from what it is the KV of."""
    return hashlib.shake_128(key + space).digest(PAGE_BYTES)


class View:
    """KV of one request."""

    def __init__(self, keys: Sequence[bytes], space: bytes) -> None:
        self.keys = keys
        self.space = space
        self.got: dict[int, bytes] = {}

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        into[:] = b"".join(content(key, self.space) for key in self.keys[first_page : first_page + pages])

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        for number in range(pages):
            self.got[first_page + number] = bytes(source[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])

    def first_difference(self, first_page: int, pages: int) -> int | None:
        """The first page of the range that is not what was stored."""
        for number in range(first_page, pages):
            if self.got.get(number) != content(self.keys[number], self.space):
                return number
        return None


class Engine:
    """Uses a cache and reports to a run what an engine must never see: an exception, a late answer, other bytes."""

    def __init__(self, cache: Cache, run: Run, deadline: float = DEADLINE) -> None:
        self.cache = cache
        self.space = cache.namespace.space(0)
        self._run = run
        self._deadline = deadline

    def view(self, prompt: Prompt) -> View:
        return View(self.cache.prompt(prompt.tokens).keys, self.space)

    def store(self, prompt: Prompt) -> StoreResult | None:
        """None if it raised."""
        return self._call("store", lambda: self.cache.store(prompt.tokens, self.view(prompt)))

    def stored(self, prompt: Prompt, timeout: float = 10.0) -> bool:
        """Store and wait until it is durable."""
        result = self.store(prompt)
        return result is not None and result.wait(timeout)

    def lookup(self, prompt: Prompt) -> int:
        """Pages."""
        found = self._call("lookup", lambda: self.cache.lookup(prompt.tokens))
        return 0 if found is None else found.tokens // PAGE_TOKENS

    def retrieve(self, prompt: Prompt, timeout: float | None = None, *, first_page: int = 0, **more: Any) -> int:
        """Pages that came back, with the right bytes."""
        view = self.view(prompt)
        first = first_page * PAGE_TOKENS
        found = self._call(
            "retrieve",
            lambda: self.cache.retrieve(prompt.tokens, view, timeout=timeout, first_token=first, **more),
            timeout or 0.0,
        )
        if found is None:
            return 0
        pages = found.tokens // PAGE_TOKENS
        if pages > prompt.pages:
            self._run.wrong(f"{pages} pages of {prompt} came back")
        elif (page := view.first_difference(first_page, pages)) is not None:
            self._run.wrong(f"page {page} of {prompt} has other bytes")
        return pages

    def expect(self, prompt: Prompt, pages: int | None = None) -> bool:
        """So many pages, all by default, must come back; less is a loss, more means that something damaged was
        served."""
        wanted = prompt.pages if pages is None else pages
        got = self.retrieve(prompt)
        if got < wanted:
            self._run.lost(f"{got} of {wanted} pages of {prompt} came back")
        elif got > wanted:
            self._run.wrong(f"{got} pages of {prompt} came back, of which only {wanted} are undamaged")
        return got == wanted

    def serves(self, prompt: Prompt, tries: int = 1) -> bool:
        """A prompt can be stored so that it is durable, and comes back from the tier."""
        failed = ""
        for _ in range(tries):
            if not self.stored(prompt):
                failed = f"{prompt} could not be stored: {self.cache.stats()}"
                continue
            self.cache.clear(["cpu"])
            if (got := self.retrieve(prompt)) == prompt.pages:
                return True
            failed = f"{got} pages of {prompt} came back: {self.cache.stats()}"
        self._run.note(failed)
        return False

    def tier(self) -> TierStats:
        """State of the first tier."""
        return self.cache.stats().tiers[0]

    def count(self, name: str) -> int:
        """One of the node's counters, over all labels."""
        return int(sum(self.cache.stats().counts.get(name, {}).values()))

    def _call(self, name: str, call: Callable[[], T], more: float = 0.0) -> T | None:
        started = time.monotonic()
        try:
            return call()
        except Exception as error:  # noqa: BLE001  an engine must see none, whatever it is
            self._run.lost(f"{name} raised {type(error).__name__}: {error}")
            return None
        finally:
            took = time.monotonic() - started
            if took > self._deadline + more:
                self._run.lost(f"{name} took {took:.1f} s")
