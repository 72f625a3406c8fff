"""Asking tiers that cannot be listed what they hold of a prompt, once for all who want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.guard import IndexGuard
from lmcache_core.index import Space, tier_bit
from lmcache_core.index.boundary import chunks_to_store
from lmcache_core.namespace import GroupKind
from lmcache_core.prefixsearch import PrefixSearch
from lmcache_core.protocols import ChunkKey, CostlyProbes, Scannable, StorageBackend
from lmcache_core.tier import TierRunner

FRESH = 1.0
"""Seconds for which an answer is not asked for again."""
MOST_KEYS = 1024
_REMEMBERED = 4096

Prompt = tuple[bytes, bytes, int]
"""Space, last page, and places that were asked."""

Run = tuple[int, int]
"""First page and number of pages of a chunk."""


class Prober:
    """Probes of one node.

    Args:
        guard: Its index.
        runners: Its tiers.
        start: Runs a coroutine on its event loop.
        learned: Called with the number of a tier and the pages and parents of chunks that it holds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        guard: IndexGuard,
        runners: Sequence[TierRunner],
        start: Callable[[Coroutine[Any, Any, None]], Future[None]],
        learned: Callable[[int, Space, Sequence[tuple[tuple[bytes, ...], bytes]]], None],
        clock: Callable[[], float],
    ) -> None:
        self._guard = guard
        self._start = start
        self._learned = learned
        self._clock = clock
        self._asking: dict[Prompt, Future[None]] = {}
        self._fresh: dict[Prompt, float] = {}
        """Until when an answer is good, in order of answers."""
        self._runners = [runner for runner in runners if not isinstance(runner.backend, Scannable)]

    def ask(self, spaces: Sequence[Space], keys: Sequence[bytes], first_page: int, places: int) -> Future[None] | None:
        """Ask for the chunks of `keys` behind `first_page`. Called under the node's mutex, on any thread. Returns what
        is done when the answer is there, None if there is nobody to ask or a fresh answer."""
        runners = [runner for runner in self._runners if runner.up and places & tier_bit(runner.number)]
        if not runners or not keys:
            return None
        prompt = (spaces[0].digest, keys[-1], places)
        asking = self._asking.get(prompt)
        if asking is None and self._fresh.get(prompt, 0.0) <= self._clock():
            asking = self._start(self._ask(prompt, runners, spaces, keys, first_page))
            self._asking[prompt] = asking
        return asking

    async def _ask(
        self,
        prompt: Prompt,
        runners: Sequence[TierRunner],
        spaces: Sequence[Space],
        keys: Sequence[bytes],
        first_page: int,
    ) -> None:
        """Ask the tiers side by side, until all have answered or those that have hold the whole prompt."""
        asked = [asyncio.ensure_future(self._ask_tier(runner, spaces, keys, first_page)) for runner in runners]
        try:
            for answered in asyncio.as_completed(asked):
                await answered
                if len(asked) > 1 and self._complete(spaces, keys, prompt[2]):
                    break
        finally:
            for each in asked:
                each.cancel()
            with self._guard.mutex:
                del self._asking[prompt]
                self._fresh.pop(prompt, None)
                self._fresh[prompt] = self._clock() + FRESH
                while len(self._fresh) > _REMEMBERED:
                    del self._fresh[next(iter(self._fresh))]

    def _complete(self, spaces: Sequence[Space], keys: Sequence[bytes], places: int) -> bool:
        with self._guard.mutex:
            return not self._guard.broken and self._guard.index.find(spaces, keys, places).pages == len(keys)

    async def _ask_tier(
        self, runner: TierRunner, spaces: Sequence[Space], keys: Sequence[bytes], first_page: int
    ) -> None:
        health, session = runner.health, runner.health.session
        try:
            async with asyncio.timeout(runner.config.read_timeout):
                for space in spaces:
                    await self._ask_space(runner, space, keys, first_page)
        except TimeoutError:
            limit = runner.config.read_timeout
            if health.session == session:
                health.timed_out(f"did not tell what it holds within {limit:g} s", limit)
        except (BackendError, ConfigError) as error:
            if health.session == session:
                health.failed(error, "failed to look up")

    async def _ask_space(self, runner: TierRunner, space: Space, keys: Sequence[bytes], first_page: int) -> None:
        geometry = space.known
        size = geometry.chunk_pages
        chunks = chunks_to_store(geometry.kind, len(keys), size, geometry.window_pages, (len(keys),))
        chunks = [(first, pages) for first, pages in chunks if first + pages > first_page][:MOST_KEYS]
        if _costly(runner.backend) and space.kind is GroupKind.FULL:
            end = await self._search(runner, space, keys, chunks)
        else:
            held = await self._held(runner, space, keys, chunks)
            self._learn(runner, space, keys, [chunk for chunk, there in zip(chunks, held, strict=True) if there])
            end = held.index(False) if False in held else len(chunks)
        if end < len(chunks) and chunks[end][1] > 1:
            first, most = chunks[end]
            shorter = [(first, pages) for pages in range(most - 1, 0, -1)]
            held = await self._held(runner, space, keys, shorter)
            self._learn(runner, space, keys, [chunk for chunk, there in zip(shorter, held, strict=True) if there])

    async def _search(self, runner: TierRunner, space: Space, keys: Sequence[bytes], chunks: Sequence[Run]) -> int:
        """How many of a prompt's chunks are stored, found with few questions. Those in front of the last one that is
        there are taken to be there too."""
        search = PrefixSearch(len(chunks))
        while numbers := search.next():
            search.tell(numbers, await self._held(runner, space, keys, [chunks[number] for number in numbers]))
        self._learn(runner, space, keys, chunks[: search.stored])
        return search.stored

    async def _held(self, runner: TierRunner, space: Space, keys: Sequence[bytes], chunks: Sequence[Run]) -> list[bool]:
        return await runner.contains([ChunkKey(space.digest, keys[first + pages - 1]) for first, pages in chunks])

    def _learn(self, runner: TierRunner, space: Space, keys: Sequence[bytes], chunks: Sequence[Run]) -> None:
        found = [(tuple(keys[first : first + pages]), keys[first - 1] if first else b"") for first, pages in chunks]
        self._learned(runner.number, space, found)


def _costly(backend: StorageBackend) -> bool:
    return isinstance(backend, CostlyProbes) and backend.costly_probes
