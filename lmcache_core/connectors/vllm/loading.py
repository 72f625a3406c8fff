"""One load of a worker, which goes on over as many steps of the engine as it takes."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_core import operations
from lmcache_core.client import Client, Held
from lmcache_core.connectors.vllm.enginekv import EngineKV
from lmcache_core.connectors.vllm.plan import Load, Timing
from lmcache_core.errors import LMCacheError

__all__ = ["Loading"]


class Loading:
    """A load under way: goes on when it is run, as long as it may.

    Args:
        job: What is to be loaded.
        client: Of the node, if it is there.
        kv: The engine's.
        warn: Logs a line, at most one a kind and interval.
        clock: In seconds.
        counts: Whether the node shall count it: of all ranks one.
    """

    def __init__(
        self,
        job: Load,
        client: Client | None,
        kv: EngineKV | None,
        warn: Callable[[str, str], object],
        clock: Callable[[], float],
        *,
        counts: bool,
    ) -> None:
        self.job = job
        self.pages = 0
        """What is there, in pages from the prompt's start."""
        self.done = False
        self.alone = True
        """The engine has computed nothing meanwhile."""
        self._tiers: dict[str, int] = {}
        self._ended_at = 0.0
        self._client = client
        self._kv = kv
        self._warn = warn
        self._clock = clock
        self._counts = counts
        self._held: Held | None = None
        self._operation: operations.Operation[operations.Loaded] | None = None
        self._step: operations.Step | None = None
        self._started_at = self._clock()
        self._until = self._started_at + job.seconds

    @property
    def failed(self) -> bool:
        return self.done and self.pages < self.job.pages

    def run(self, until: float | None) -> bool:
        """Copy until a time, or to the end if there is none. Returns whether it has ended."""
        try:
            if self._operation is None:
                self._begin()
            while not self.done:
                if isinstance(self._step, operations.Copy):
                    self._step.move()
                    self._send(False)
                elif self._step is not None and self._step.future.done():
                    future = self._step.future
                    # Cancelled, or failed: the node is being closed.
                    self._send(not future.cancelled() and future.exception() is None and future.result())
                elif self._clock() >= self._until:
                    self._warn("slow", "a load took longer than it may; what was missing is computed")
                    self._send(False)  # what has come is there
                elif until is None:
                    self.wait(self._until - self._clock())
                    continue
                else:
                    break
                if until is not None and self._clock() >= until:
                    break
        except LMCacheError as error:
            self._warn("load", f"KV of a request could not be loaded: {error}")
            self.fail()
        return self.done

    def wait(self, seconds: float) -> None:
        """Wait for the tier whose turn it is."""
        if isinstance(self._step, operations.Wait):
            try:
                self._step.future.result(max(0.0, seconds))
            except Exception:  # noqa: BLE001  whatever it is, whoever looks at it next finds out
                return

    def fail(self) -> None:
        """Give it up."""
        if self._operation is not None:
            self._operation.close()
        self._end()

    def _begin(self) -> None:
        job = self.job
        client, kv = self._client, self._kv
        self._held = held = None if client is None or not job.number else client.join_hold(job.number)
        if client is None or kv is None or held is None or held.pages != job.pages - job.base:
            self._end()
            return
        self._operation = self._operate(client, kv, held)
        self._next(lambda operation: next(operation))

    def _operate(self, client: Client, kv: EngineKV, held: Held) -> operations.Operation[operations.Loaded]:
        job = self.job
        view = kv.view(job.first_page - job.base, job.blocks, job.skip_tokens)
        return operations.load(client, held, view, job.first_page - job.base)

    def _send(self, answer: bool) -> None:
        self._next(lambda operation: operation.send(answer))

    def _next(self, go: Callable[[operations.Operation[operations.Loaded]], operations.Step]) -> None:
        assert self._operation is not None
        try:
            self._step = go(self._operation)
        except StopIteration as end:
            loaded: operations.Loaded = end.value
            self.pages = self.job.base + loaded.pages
            self._tiers = loaded.tiers
            if self._counts and self._kv is not None and self._client is not None:
                operations.count_loaded(self._client, loaded, self._kv.page_tokens)
            self._end()

    def lacking(self) -> set[int]:
        """Blocks of the only cache group that should be filled and are not."""
        job = self.job
        (ids,) = job.blocks
        if self._kv is None or not self._kv.page_tokens:
            return set(ids)
        size = self._kv.groups[0].block_tokens
        there = max(0, self.pages - job.first_page) * (self._kv.page_tokens // size)
        return set(ids[max(there, job.skip_tokens // size) :])

    def timing(self) -> Timing | None:
        """How it went on this rank."""
        if self._kv is None:
            return None
        job = self.job
        seconds = self._ended_at - self._started_at
        missing = max(0, job.pages - max(self.pages, job.first_page))
        return Timing(
            job.request,
            job.first_page,
            tuple(self._tiers.items()),
            self._kv.page_bytes,
            seconds,
            self.alone,
            missing,
        )

    def _end(self) -> None:
        self.done = True
        self._ended_at = self._clock()
        self._step = None
        client, held = self._client, self._held
        self._held = None
        if client is not None and held is not None:
            self._release(client, held)

    def _release(self, client: Client, held: Held) -> None:
        client.release(held)
