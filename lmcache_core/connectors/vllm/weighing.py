"""What of a hit is loaded: no more than what pays, for no longer than it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from lmcache_core.client import Client, Held, Model
from lmcache_core.connectors.vllm.counters import Counts
from lmcache_core.connectors.vllm.options import Options
from lmcache_core.connectors.vllm.plan import Timing
from lmcache_core.connectors.vllm.rates import Rates
from lmcache_core.connectors.vllm.requests import Tracked

__all__ = ["POOL", "Weighing"]

FIRST_COPY = 2e9
"""Bytes a second that are assumed of copies until some have been measured."""
POOL = "cpu"
PATIENCE = 0.3
"""Part of the time that computing would take, for which a tier of unknown speed may be waited for."""


class Weighing:
    """See the module.

    Args:
        client: Of the node.
        options: What the user has set.
        counts: Where to count what was decided and what came of it.
        page_tokens: Tokens of a page.
        clock: In seconds.
    """

    def __init__(
        self, client: Client, options: Options, counts: Counts, page_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.rates = Rates()
        self._client = client
        self._options = options
        self._counts = counts
        self._page_tokens = page_tokens
        self._clock = clock
        self._warming: Future[int] | None = None
        """Chunks that are being brought to host memory for nobody who waits."""
        self._warming_bytes = 0
        self._warming_since = 0.0
        self._warming_tier = ""

    def weigh(self, model: Model, tracked: Tracked, local: int, *, may_wait: bool) -> None:
        """Decide how much of what is held is loaded, and how long that may take: no more than what pays."""
        held = tracked.held
        assert held is not None
        tracked.local, tracked.weighed = local, True
        first, base, end = local // self._page_tokens, tracked.base, tracked.held_end
        page_bytes = sum(group.page_bytes for group in model.namespace.groups)
        in_pool = base + self._pages_in_pool(held)
        tracked.now = may_wait and in_pool >= end and self._soon(end - first, page_bytes)
        tracked.patience = self._options.load_timeout
        tracked.slow = {}
        if max(first, in_pool) >= end:
            return
        tiers = self._client.lookup(model, tracked.keys[base:end], tracked.places, quiet=True).tiers
        slow = {tier: pages for tier, pages in tiers.items() if tier != POOL}
        # Of what is on slow tiers the engine may have a part itself.
        begin = max(first, in_pool)
        part = min(1.0, (end - begin) / max(1, sum(slow.values())))
        tracked.slow = {tier: int(pages * part) for tier, pages in slow.items()}
        compute = self.rates.prefill_seconds(begin * self._page_tokens, end * self._page_tokens)
        if compute is None:
            return
        nbytes = {tier: pages * page_bytes for tier, pages in tracked.slow.items()}
        load = self.rates.load_seconds(nbytes)
        if load is None:
            load = self._as_node_tells(nbytes)
        if load is None:
            tracked.patience = min(tracked.patience, PATIENCE * compute)
        elif load < compute:
            tracked.patience = min(tracked.patience, compute)
        else:
            if not tracked.declined:  # however often it is asked for
                declined = (end - begin) * self._page_tokens
                self._counts["declined_tokens", _most(nbytes)] += declined
            tracked.declined = True
            self._warm(model, tracked, end, nbytes)
            tracked.let_go(self._client)
            if in_pool > first and len(model.namespace.groups) == 1:
                tracked.slow = {}
                less = self._client.hold(model, tracked.keys[base:in_pool], tracked.places)
                tracked.held, tracked.held_at, tracked.weighed = less, self._clock(), True
                there = self._pages_in_pool(less) >= less.pages
                tracked.now = may_wait and there and self._soon(tracked.held_end - first, page_bytes)

    def _as_node_tells(self, nbytes: Mapping[str, int]) -> float | None:
        """What loading so many bytes takes, where of some tiers this engine knows nothing yet and the node does: other
        engines, or this one before it was started again, have read from them. Copying is not in it."""
        told = {tier.name: tier for tier in self._client.stats().tiers}
        seconds = 0.0
        for name, count in nbytes.items():
            mine = self.rates.load_seconds({name: count})
            tier = told.get(name)
            if mine is not None:
                seconds += mine
            elif tier is None or tier.read_latency is None:
                return None
            else:
                seconds += tier.read_latency + count / (tier.read_bandwidth or math.inf)
        return seconds

    def _soon(self, pages: int, page_bytes: int) -> bool:
        """Whether so many pages are copied within the time that a step may take for it."""
        return pages * page_bytes <= self._options.sync_load * (self.rates.bytes_a_second(POOL) or FIRST_COPY)

    def _pages_in_pool(self, held: Held) -> int:
        """Pages of a lease from its start on that can be copied at once; of several groups, all or none."""
        number = 0
        while number < len(held.parts):
            granted = self._client.grant(held, number, 0)
            ready = 0
            for grant in granted:
                if grant.source is None:
                    break
                ready += 1
            number += ready
            if not ready or ready < len(granted):
                break
        if number == len(held.parts):
            return held.pages
        return held.parts[number].first if len({part.group for part in held.parts}) == 1 else 0

    def _warm(self, model: Model, tracked: Tracked, pages: int, nbytes: Mapping[str, int]) -> None:
        """Bring what is too slow to be waited for to host memory, for those who come later: one prompt at a time."""
        if self._warming is not None and not self._warming.done():
            return
        self._warming_since = self._clock()
        self._warming_bytes = sum(nbytes.values())
        self._warming_tier = _most(nbytes)
        self._warming = self._client.prefetch(model, tracked.keys[tracked.base : pages], tracked.places, POOL)

    def warmed(self) -> None:
        """Learn from what has been brought to host memory meanwhile."""
        warming = self._warming
        if warming is not None and warming.done():
            self._warming = None
            if not warming.cancelled() and warming.exception() is None and warming.result():
                self.rates.loaded(self._warming_tier, self._warming_bytes, self._clock() - self._warming_since)

    def learn(self, timing: Timing, expected: Mapping[str, int]) -> None:
        """How fast a tier is, from a load of which so much was expected from tiers that are not host memory."""
        for tier, pages in timing.pages:
            self._counts["loaded_tokens", tier] += pages * self._page_tokens
        self._counts["load_seconds", ""] += timing.seconds
        self._counts["failed_tokens", ""] += timing.missing * self._page_tokens
        there = (timing.first_page + sum(pages for _, pages in timing.pages)) * self._page_tokens
        self._counts["saved_seconds", ""] += (
            self.rates.prefill_seconds(timing.first_page * self._page_tokens, there) or 0.0
        )
        page_bytes = timing.page_bytes
        slow = {tier: pages * page_bytes for tier, pages in timing.pages if tier != POOL}
        from_pool = sum(pages * page_bytes for tier, pages in timing.pages if tier == POOL)
        if timing.missing:
            # Nothing more came in that time: had it been a little more, that would be its speed.
            tier = _most(slow or expected)
            if tier:
                self.rates.loaded(tier, slow.get(tier, 0) + page_bytes, timing.seconds)
        elif not slow:
            self.rates.loaded(POOL, from_pool, timing.seconds)
        elif timing.alone:
            copying = from_pool / (self.rates.bytes_a_second(POOL) or FIRST_COPY)
            self.rates.loaded(_most(slow), sum(slow.values()), max(timing.seconds - copying, 1e-6))


def _most(amounts: Mapping[str, int]) -> str:
    """The tier with most; none if there is none."""
    return max(amounts, key=lambda tier: amounts[tier], default="")
