"""The scheduler's side: what of a request is loaded, what is stored, and when. Knows the node and no engine.

A request's life here: its tokens are hashed when it comes. When the engine is about to schedule it, what the node has
of it is held by a lease, and kept so however often the engine asks. If it gets blocks, the workers are told to load;
if not, or when it ends, the lease ends. What a step's forward pass completes is stored by the workers right behind it,
into room that was reserved here before. All of it is called on the scheduler's own thread and waits for nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lmcache_core.client import Client, Model, Storing
from lmcache_core.connectors.vllm.counters import Counts
from lmcache_core.connectors.vllm.events import MOST_PAGES, BlockEvent, Follower, Names
from lmcache_core.connectors.vllm.offloading import Memory, Offloading, Piece, runs
from lmcache_core.connectors.vllm.options import Options, RequestOptions
from lmcache_core.connectors.vllm.plan import Blocks, Facts, Load, Report, Save, Step, Timing
from lmcache_core.connectors.vllm.requests import EngineRequest, Marks, Tracked
from lmcache_core.connectors.vllm.weighing import POOL, Weighing
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.index.boundary import stops
from lmcache_core.namespace import Namespace, new_epoch

__all__ = ["SchedulerSide"]

LOOK_AGAIN = 0.5
"""Seconds after which a request that waits is looked up anew, when nothing was found for it."""
FACTS_TIMEOUT = 20.0
"""Seconds in which workers must have said how their KV lies; afterwards nothing is loaded or stored."""


@dataclass(eq=False)
class _Saving:
    storing: Storing
    request: str
    first_page: int
    left: int
    """Ranks that have not ended it."""
    run: Sequence[Piece] = ()
    """What is stored, if late."""


class SchedulerSide:
    """See the module.

    Args:
        client: Of the node.
        options: What the user has set.
        describe: The namespace of the engine's KV, by the workers' facts. May raise `LayoutError`.
        page_tokens: Tokens of a page, a multiple of the engine's blocks.
        block_tokens: Tokens of a block, by cache group.
        ranks: Workers that load and store.
        may_wait: Whether a step may load what it needs itself: the engine has one cache group, and plans no step before
            the one in front of it has ended, so that none goes on from what was lost.
        lease_seconds: How long the node keeps what a lookup found.
        warn: Logs a line, at most one a kind and interval.
        follow: What the engine calls the pages `[first, end)` of a request, if it wants to know which blocks are where.
    """

    def __init__(
        self,
        client: Client,
        options: Options,
        describe: Callable[[Facts], Namespace],
        *,
        page_tokens: int,
        block_tokens: Sequence[int],
        ranks: int = 1,
        may_wait: bool = True,
        lease_seconds: float = 30.0,
        warn: Callable[[str, str], object] = lambda kind, text: None,
        follow: Names | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.page_tokens = page_tokens
        self.counts: Counts = Counts(float)
        """See `COUNTERS`."""
        self._options = options
        self._describe = describe
        self._page_blocks = [page_tokens // each for each in block_tokens]
        self._chunk_pages = max(1, client.chunk_tokens // page_tokens)
        self._ranks = ranks
        self._groups = len(block_tokens)
        self._may_wait = may_wait and options.sync_load > 0
        self._renew = lease_seconds / 2
        self._warn = warn
        self._clock = clock
        self._asked_at: float | None = None
        self._facts: Facts | None = None
        self._namespace: Namespace | None = None
        self._model: Model | None = None
        self._off = ""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._savings: dict[int, _Saving] = {}
        self._lost: set[int] = set()
        """Blocks that hold nonsense and that the engine may still take for what they should have been."""
        self._loaded: Counter[str] = Counter()
        self._timings: defaultdict[str, list[Timing]] = defaultdict(list)
        self._late: defaultdict[str, list[Timing]] = defaultdict(list)
        """Of loads that have not ended on all ranks."""
        self._weighing = Weighing(client, options, self.counts, page_tokens, clock)
        self._steps = 0
        """That have been planned."""
        self._foreign = 0
        """The latest of them for which something was loaded by others, if it is not known to have ended; else 0."""
        self._in_flight = 0
        """Steps with something to compute that have been planned and have not ended."""
        self._follow = follow
        self._follower: Follower | None = None
        self._offloading: Offloading | None = None

    def store_late(self, memory: Memory, step_tokens: int) -> None:
        """Store nothing before the engine is about to give its blocks to others.

        Args:
            memory: Of an engine with one cache group.
            step_tokens: Most tokens that a step computes.
        """
        self._offloading = Offloading(
            memory,
            self.counts,
            losses=self._options.lazy_losses,
            step_tokens=step_tokens,
            page_tokens=self.page_tokens,
            page_blocks=self._page_blocks[0],
            chunk_pages=self._chunk_pages,
            clock=self._clock,
        )

    # What the engine asks

    def begin(
        self,
        request: EngineRequest,
        marks: Marks | None = None,
        wanted: RequestOptions | None = None,
        *,
        usable: bool = True,
    ) -> None:
        """A request has come. It is not `usable` if its tokens don't tell its KV.

        Raises:
            ConfigError: It wants something that is not there. Nothing is loaded or stored for it.
        """
        if request.request_id not in self._requests:
            wanted = wanted or RequestOptions()
            if isinstance(self.client, DirectClient):  # a node elsewhere says so when it is asked
                self.client.check_places(wanted.tiers)
            self._requests[request.request_id] = Tracked(
                request,
                marks or Marks(),
                self.page_tokens,
                usable and wanted.load,
                usable and wanted.store,
                wanted.max_load_tokens,
                wanted.tiers,
            )

    def refused(self, request_id: str, error: ConfigError) -> None:
        """A request wants what cannot be had."""
        self.counts["refused_options", ""] += 1
        self._warn("request options", f"request {request_id}: nothing is loaded or stored for it: {error}")

    def match(self, request_id: str, local: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind the first `local`, and whether while the engine goes on with others.
        None: ask again. May be asked any number of times; what was found is kept."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.hit = local
        if tracked is None or not tracked.load or tracked.loading or self._off:
            return 0, False
        if self._model is None:
            return self._without_facts(), False
        known = tracked.hash()
        if (local + 1) >= known or not self._look(tracked, local):
            return (None if tracked.asked is not None else 0), False
        if tracked.local != local or not tracked.weighed:
            self._weighing.weigh(self._model, tracked, local, may_wait=self._may_wait)
        there = tracked.held_end * self.page_tokens
        external = min(there, known - 1 if tracked.now else known) - local
        if external <= 0:
            tracked.let_go(self.client)
            tracked.missed_at, tracked.missed_base = self._clock(), tracked.base
            return 0, False
        return external, not tracked.now

    def allocated(self, request_id: str, blocks: Sequence[Sequence[int]], external: int) -> None:
        """A request has blocks now; `external` tokens are to be loaded into them."""
        tracked = self._requests.get(request_id)
        held = None if tracked is None or tracked.loading else tracked.held
        if tracked is not None and self._offloading is not None:
            tracked.saved = 0  # what is in these blocks must be learned, whatever was in those that it had before
            hits = -(-tracked.hit // self.page_tokens)
            self._offloading.took(-(-external // self.page_tokens), hits=hits)
        if tracked is not None and not tracked.loading:
            tracked.loaded = tracked.local + external if external > 0 else 0
        if external > 0 and held is None:
            self.break_promise(request_id, blocks, external)  # of which nothing is known any more
            return
        if tracked is None or tracked.loading:
            return  # the latter: it has got more blocks, after those that are being loaded
        tracked.missed_at = None  # if it comes again, it has been computed in the meantime
        if external <= 0 or held is None:
            tracked.let_go(self.client)
            return
        first = tracked.local // self.page_tokens
        pages = -(-(tracked.local + external) // self.page_tokens)
        tracked.loading = True
        end = tracked.held_end
        if self._offloading is None:
            tracked.saved = end
        if self._follower is not None:
            self._follower.learn(tracked, pages)
        ids = self._blocks(blocks, first, pages)
        self._lost.difference_update(ids[0])  # if that fails, it is said again
        self._loads.append(
            Load(
                request_id,
                self.client.share(held) if pages == end else 0,
                first,
                pages,
                tracked.local - first * self.page_tokens,
                ids,
                tracked.now,
                tracked.patience,
                tracked.base,
            )
        )

    def break_promise(self, request_id: str, blocks: Sequence[Sequence[int]], external: int) -> None:
        """`allocated` went wrong: the engine must hear that these tokens are not there."""
        tracked = self._requests.get(request_id)
        local = 0 if tracked is None else tracked.local
        if tracked is not None:
            tracked.loading = True
        first, pages = local // self.page_tokens, -(-(local + external) // self.page_tokens)
        now = tracked is not None and tracked.now
        ids = self._blocks(blocks, first, pages)
        self._loads = [load for load in self._loads if load.request != request_id]
        self._loads.append(Load(request_id, 0, first, pages, local - first * self.page_tokens, ids, now, 0.0))

    def take_loads(self) -> list[Load]:
        """Loads that no worker has been told of yet."""
        loads, self._loads = self._loads, []
        return loads

    def step(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        *,
        foreign: bool = False,
    ) -> Step:
        """What the workers shall do in a step that computes so many tokens of these requests.

        A `foreign` one has something loaded by others, which may turn out not to be there: until that is known nothing
        is stored, behind this step or later ones. What they complete is stored afterwards."""
        self._steps += 1
        if foreign:
            self._foreign = self._steps
        save = not self._foreign
        step = Step(self.page_tokens, known=self._facts is not None, computes=bool(scheduled))
        step.number = self._steps if self._foreign else 0
        if scheduled:
            self._may_wait = self._may_wait and not self._in_flight  # whatever was said: this engine plans ahead
            self._in_flight += 1
            step.prefill_tokens, step.context_tokens = self._prefill(scheduled)
        try:
            self._plan_stores(step, scheduled, blocks_of, save=save)
        except Exception:  # a defect of ours, which the caller tells of
            self._drop(step)
            raise
        if not scheduled:
            self._pause()
        step.loads = self.take_loads()
        return step

    def _plan_stores(
        self,
        step: Step,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        *,
        save: bool,
    ) -> None:
        if self._model is not None and not self._off:
            for request_id, tokens in scheduled.items():
                tracked = self._requests.get(request_id)
                if self._lost and tracked is not None and self._goes_on_from_nonsense(tracked, tokens, blocks_of):
                    tracked.save = False
                if tracked is not None and tracked.save and save:
                    try:
                        self._plan_save(step, tracked, tokens, blocks_of)
                    except LMCacheError as error:  # a tier that isn't there, say: others go on
                        tracked.save = False
                        self._warn("store", f"KV of a request is not stored: {error}")
        if self._offloading is not None and scheduled:
            self._plan_late(step, self._offloading, scheduled, save=save)

    def _drop(self, step: Step) -> None:
        """No worker hears of the stores of a step."""
        for job in step.saves:
            self._saved(job.number, self._savings[job.number], worthless=True)

    def others_lost(self, blocks: Set[int]) -> None:
        """Blocks that should have been loaded and were not, by whomever. Those of loads of ours are told by workers."""
        if self._foreign and blocks:
            self._lost |= blocks
            if self._offloading is not None:
                self._doubt(self._offloading)

    def is_foreign(self, request_id: str, computed: int) -> bool:
        """Whether of a request that begins with so many tokens computed some are neither the engine's own nor loaded by
        us."""
        tracked = self._requests.get(request_id)
        return computed > (0 if tracked is None else max(tracked.hit, tracked.loaded))

    def report(self, report: Report) -> None:
        """Workers have told what they have done."""
        if report.ended >= self._foreign:
            self._foreign = 0
        if report.refused and not self._off:
            self.turn_off(report.refused)
        if report.facts is not None and self._facts is None and not self._off:
            self._facts = report.facts
            self._namespace = self._describe(report.facts)
            self._register()
        for timing in report.timings:
            self._timings[timing.request].append(timing)
        for timing in report.late:
            self._copied(timing)
        for tokens, context, seconds in report.computed:
            self._weighing.rates.computed(tokens, context, seconds)
        if self._offloading is not None:
            for pages, seconds in report.gathered:
                self._offloading.gathered(pages, seconds)
            if report.failed or report.lost:
                self._doubt(self._offloading)
        for number, ranks in report.saved.items():
            saving = self._savings.get(number)
            if saving is not None:
                saving.left -= ranks
                if saving.left <= 0:
                    self._saved(number, saving, worthless=number in report.unsaved)
        self._lost |= report.lost
        for request_id in report.failed:
            self._failed(request_id)
        for request_id, ranks in report.loaded.items():
            self._loaded[request_id] += ranks
            if self._loaded[request_id] >= self._ranks:
                self._ended(request_id)

    def _copied(self, timing: Timing) -> None:
        """Copies of a rank have ended, of a load that had ended for the engine before."""
        ranks = self._late[timing.request]
        ranks.append(timing)
        if len(ranks) >= self._ranks:
            self._weighing.learn(dataclasses.replace(timing, seconds=max(each.seconds for each in ranks)), {})
            del self._late[timing.request]

    def end(self, request_id: str) -> None:
        """The engine is done with a request."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.loading:
            tracked.gone = True  # its blocks are being written to; what is read is kept until that has ended
            tracked.save = False
            return
        tracked.let_go(self.client)
        del self._requests[request_id]

    def reset(self) -> None:
        """From now on nothing old is found: the weights may be others. Nothing is deleted."""
        for tracked in self._requests.values():
            tracked.load = tracked.save = False
            if not tracked.loading:
                tracked.let_go(self.client)
        if self._offloading is not None:
            self._offloading.clear()
        if self._namespace is not None:
            self._namespace = self._namespace.with_epoch(new_epoch())
            self._register()

    def _register(self) -> None:
        assert self._namespace is not None
        self._model = self.client.register(self._namespace)
        if self._follower is not None:
            self._follower.close()
        if self._follow is not None and isinstance(self.client, DirectClient):
            stored_late = 0 if self._offloading is None else self._offloading.most_pages
            self._follower = Follower(self.client, self._model, self._follow, MOST_PAGES + stored_late)

    def events(self) -> list[BlockEvent]:
        """What has come to a place or left it since this was last asked."""
        return [] if self._follower is None else self._follower.events()

    def turn_off(self, why: str) -> None:
        """Load and store nothing any more."""
        self._off = why
        self._warn("off", f"KV is neither loaded nor stored: {why}")
        for tracked in self._requests.values():
            tracked.let_go(self.client)

    def sources(self, request_id: str, external: int) -> dict[str, int]:
        """From which tiers the `external` tokens come that were promised last, for those who count them."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return {}
        slow = {tier: min(pages * self.page_tokens, external) for tier, pages in tracked.slow.items()}
        return {POOL: max(0, external - sum(slow.values())), **slow}

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing under way."""
        return not self._savings and not any(each.held or each.loading for each in self._requests.values())

    # Lookup

    def _without_facts(self) -> int | None:
        """Workers tell how their KV lies with the first step's output; until then a request waits."""
        now = self._clock()
        if self._asked_at is None:
            self._asked_at = now
        if now - self._asked_at > FACTS_TIMEOUT:
            self.turn_off("no worker has told how its KV lies")
            return 0
        return None

    def _look(self, tracked: Tracked, local: int) -> bool:
        """Hold what there is of a request. False if that is nothing, or not known yet: then something is `asked`."""
        now = self._clock()
        base = 0
        if self._offloading is not None:  # what the engine has itself need not be there
            base = local // self.page_tokens // self._chunk_pages * self._chunk_pages
        if tracked.held is not None and now - tracked.held_at < self._renew and tracked.base <= base:
            return True
        if tracked.missed_at is not None and now - tracked.missed_at < LOOK_AGAIN and tracked.missed_base <= base:
            return False
        if tracked.asked is not None and not tracked.asked.done() and now < tracked.asked_until:
            return False
        assert self._model is not None
        first = tracked.asked is None
        most = None if tracked.most_tokens is None else tracked.most_tokens // self.page_tokens
        try:
            held = self.client.hold(self._model, tracked.keys[base:most], tracked.places, counted=not tracked.counted)
        except ConfigError as error:
            tracked.load = tracked.save = False
            self.refused(tracked.request.request_id, error)
            return False
        tracked.counted = tracked.counted or held.asked is None
        tracked.let_go(self.client)
        if held.asked is not None and first:
            self.client.release(held)
            tracked.asked, tracked.asked_until = held.asked, now + self._options.lookup_timeout
            return False
        tracked.asked = None
        if not held.pages:
            self.client.release(held)
            tracked.missed_at, tracked.missed_base = now, base
            return False
        tracked.held, tracked.base, tracked.held_at, tracked.weighed = held, base, now, False
        return True

    def _prefill(self, scheduled: Mapping[str, int]) -> tuple[int, int]:
        """Tokens of prompts that a step computes, and how many are in front of them on average."""
        tokens = context = 0
        for request_id, count in scheduled.items():
            tracked = self._requests.get(request_id)
            if count > 1 and tracked is not None:
                tokens += count
                context += count * tracked.request.num_computed_tokens
        return tokens, context // tokens if tokens else 0

    def ended(self) -> None:
        """A step has ended, whose workers may have something to tell."""
        self._in_flight = max(0, self._in_flight - 1)
        self._weighing.warmed()
        if self._offloading is not None:
            self._offloading.ended()

    def _pause(self) -> None:
        """The engine computes nothing in this step: give those whom requests wait for a moment to run."""
        for tracked in self._requests.values():
            if tracked.asked is not None and not tracked.asked.done():
                _wait(tracked.asked, 0.001)
                return

    # Load

    def _failed(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.load = False  # or it would be promised and fail again
            tracked.saved = 0

    def _ended(self, request_id: str) -> None:
        del self._loaded[request_id]
        tracked = self._requests.get(request_id)
        timings = self._timings.pop(request_id, [])
        if timings:  # a hit is what all ranks have, once the last of them has it
            least = max(timings, key=lambda timing: timing.missing)
            least = dataclasses.replace(least, seconds=max(timing.seconds for timing in timings))
            self._weighing.learn(least, {} if tracked is None else tracked.slow)
        if tracked is None:
            return
        tracked.loading = False
        tracked.let_go(self.client)
        if tracked.gone:
            del self._requests[request_id]

    # Store

    def _plan_save(
        self, step: Step, tracked: Tracked, tokens: int, blocks_of: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> None:
        request = tracked.request
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        pages = known // self.page_tokens
        prompt_pages = request.num_prompt_tokens // self.page_tokens
        if pages <= tracked.saved:
            return
        if pages < prompt_pages or tracked.saved >= prompt_pages:
            pages = pages // self._chunk_pages * self._chunk_pages  # what follows in a chunk comes with a later step
        if pages > prompt_pages and not self._options.save_decode:
            pages = prompt_pages
        if pages <= tracked.saved:
            return
        tracked.hash()
        first = min(tracked.saved, pages) // self._chunk_pages * self._chunk_pages
        keys = tracked.keys[:pages]
        if len(keys) < pages:
            return
        blocks = blocks_of(request.request_id)
        if blocks is None:
            return
        if self._offloading is not None:
            if self._follower is not None:
                self._follower.learn(tracked, pages)
            ids = self._blocks(blocks, first, pages)[0]
            self._offloading.learn(tracked.keys, first, pages, ids, tracked.places)
            tracked.saved = pages
            return
        assert self._model is not None
        at = [each for each in stops(pages, self.page_tokens, self.client.retention_tokens) if each > first]
        if self._follower is not None:
            self._follower.learn(tracked, pages)
        storing = self.client.begin_store(self._model, keys, at, first, tracked.places)
        new, tracked.saved = pages - tracked.saved, pages
        if storing.dropped:  # those in front of them were counted before
            self.counts["dropped_tokens", ""] += min(storing.dropped // self._groups, new) * self.page_tokens
        if not storing.rooms:
            self.client.finish_store(storing)
            return
        number = self.client.share(storing)
        self._savings[number] = _Saving(storing, request.request_id, first, self._ranks)
        # Window groups store pages from any place of the prompt that is still in their blocks.
        start = min(room.part.first for room in storing.rooms)
        step.saves.append(Save(request.request_id, number, start, self._blocks(blocks, start, pages)))

    def _plan_late(self, step: Step, offloading: Offloading, scheduled: Mapping[str, int], *, save: bool) -> None:
        """Store what the engine may give up in the steps that follow."""
        size = self.page_tokens
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                done = tracked.request.num_computed_tokens
                offloading.took(-(-(done + tokens) // size) + -done // size)
        if self._model is None or self._off or not save:
            return
        left = deque(runs(offloading.plan(self._lost), self._chunk_pages))
        try:
            while left:
                stored = self._store_late(step, self._model, left[0])
                run = left.popleft()
                for piece in run if stored is not None else ():
                    (offloading.stored if stored else offloading.failed)(piece)
        except LMCacheError as error:  # a tier that isn't there, say
            self._warn("store", f"KV of a request is not stored: {error}")
        finally:
            for run in left:
                for piece in run:
                    offloading.failed(piece)

    def _store_late(self, step: Step, model: Model, run: Sequence[Piece]) -> bool | None:
        """Whether a run of pieces is stored already or cannot be; None if the workers store it behind this step. It
        stands for itself: what is in front of it comes later, since an engine gives up the ends of prompts first."""
        keys = [key for piece in run for key in piece.keys]
        storing = self.client.begin_store(model, keys, [len(keys)], 0, run[0].places, prompt_pages=run[-1].end)
        if not storing.rooms:
            self.client.finish_store(storing)
            return not storing.dropped
        number = self.client.share(storing)
        if not number:  # the node has just gone
            self.client.finish_store(storing)
            return False
        self._savings[number] = _Saving(storing, "", 0, self._ranks, run)
        step.saves.append(Save("", number, 0, (tuple(block for piece in run for block in piece.blocks),)))
        return None

    def _doubt(self, offloading: Offloading) -> None:
        """Something was lost that steps have gone on from."""
        offloading.doubt()
        for tracked in self._requests.values():
            tracked.saved = 0

    def _goes_on_from_nonsense(
        self, tracked: Tracked, tokens: int, blocks_of: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> bool:
        """Whether a request that is computed has a block in front that was lost and not computed since. vLLM has
        requests share blocks that one of them loads, and forgets that they were lost if that one ends early."""
        blocks = blocks_of(tracked.request.request_id)
        if blocks is None:
            return False
        size = self.page_tokens // self._page_blocks[0]
        start = tracked.request.num_computed_tokens
        if not self._lost.isdisjoint(blocks[0][: -(-start // size)]):
            return True
        self._lost.difference_update(blocks[0][start // size : -(-(start + tokens) // size)])
        return False

    def _saved(self, number: int, saving: _Saving, *, worthless: bool) -> None:
        del self._savings[number]
        finished = self.client.finish_store(saving.storing)
        self.counts["stored_tokens", ""] += finished.pages // self._groups * self.page_tokens
        if self._offloading is not None:
            rooms = sum(room.part.pages for room in saving.storing.rooms)
            good = finished.pages == rooms and not saving.storing.dropped and not worthless
            for piece in saving.run:
                (self._offloading.stored if good else self._offloading.failed)(piece)
        tracked = self._requests.get(saving.request)
        if worthless and tracked is not None:
            tracked.saved = min(tracked.saved, saving.first_page)

    def _blocks(self, blocks: Sequence[Sequence[int]], first: int, pages: int) -> Blocks:
        return tuple(
            tuple(ids[first * count : pages * count]) for ids, count in zip(blocks, self._page_blocks, strict=True)
        )


def _wait(future: Future[Any], seconds: float) -> None:
    try:
        future.exception(seconds)
    except Exception:  # noqa: BLE001  not there in time, or cancelled: whoever looks again finds out
        return
