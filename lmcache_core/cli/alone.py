"""A tier by itself, without a node: its backend opened, each verb bounded, and chunks of a space that nobody reads."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from lmcache_core import frame
from lmcache_core.calls import BackendCalls
from lmcache_core.cli.disk_cache import can_be_inspected, look
from lmcache_core.cli.ending import terminable
from lmcache_core.config import Config, TierConfig
from lmcache_core.config.fields import secrets_of
from lmcache_core.config.masking import mask
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import Chunk, ChunkKey, Listed, Lists, ReadResult, StorageBackend, WriteResult

__all__ = [
    "SPACE",
    "Alone",
    "Pattern",
    "beside",
    "buffer",
    "owner_of",
    "percentile",
    "shown_time",
    "the_tier",
    "together",
    "told_by_loggers",
]

T = TypeVar("T")

SPACE = hashlib.sha256(b"lmcache-core: probe chunks of its tools").digest()
"""Space of the chunks that tools write to measure a tier: no namespace has it, so no engine ever reads one."""
CLOSE_TIMEOUT = 5.0


def buffer(nbytes: int) -> memoryview:
    """Memory as the node's pool has it, which starts at a page."""
    return memoryview(mmap.mmap(-1, nbytes))


class Pattern:
    """Random bytes in the form of a chunk, to be stored under many keys."""

    def __init__(self, nbytes: int) -> None:
        self._form = frame.shape(1, 1, nbytes - frame.ALIGN)
        self._first = buffer(nbytes)
        self._first[frame.ALIGN :] = os.urandom(nbytes - frame.ALIGN)
        self.seal(self._first)

    @property
    def nbytes(self) -> int:
        """Of each chunk."""
        return self._form.nbytes

    def memory(self) -> memoryview:
        """Memory of its own that has the bytes."""
        made = buffer(self.nbytes)
        made[:] = self._first
        return made

    def seal(self, memory: memoryview) -> Chunk:
        """What `memory` holds as a chunk that is like no other: reads it once."""
        page = secrets.token_bytes(32)
        frame.seal(memory, self._form, SPACE, b"", (page,))
        return Chunk(ChunkKey(SPACE, page), memory.toreadonly(), (page,), b"")

    def chunk(self, memory: memoryview) -> Chunk:
        """The bytes in `memory`, as they are, under a key that was never there before: costs nothing."""
        page = secrets.token_bytes(32)
        return Chunk(ChunkKey(SPACE, page), memory.toreadonly(), (page,), b"")


class Alone:
    """One tier's backend. Every verb ends within `limit` seconds; what does not is left behind.

    All verbs raise `BackendError` or `ConfigError` with one line that has no secrets in it.
    """

    def __init__(self, tier: TierConfig, limit: float, options: Any = None) -> None:
        self.tier = tier
        self.limit = limit
        self._secrets = secrets_of(tier.options) if isinstance(tier.options, msgspec.Struct) else []
        self.backend: StorageBackend = load_backend(tier.backend).create(tier.options if options is None else options)
        self._calls = BackendCalls(self.backend, tier.backend)

    async def bounded(self, what: str, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Await a verb. `what` says in an error what it was.

        Raises:
            BackendError: It failed, or took too long.
            ConfigError: The options can never work.
        """
        limit = self.limit if limit is None else limit
        try:
            return await self._calls.bounded(work, limit)
        except TimeoutError:
            raise BackendError(f"{what} took more than {limit:g} s; it is frozen, or far too slow") from None
        except (BackendError, ConfigError) as error:
            kind = ConfigError if isinstance(error, ConfigError) else BackendError
            raise kind(self.masked(str(error))) from None

    def masked(self, text: str) -> str:
        """`text` as it may be shown."""
        return "; ".join(mask(text, self._secrets).splitlines())

    async def open(self) -> None:
        """See `StorageBackend.open`."""
        await self.bounded("opening it", self.backend.open())

    async def close(self) -> None:
        """Close it, within some seconds."""
        with suppress(BackendError, ConfigError):
            await self.bounded("closing it", self.backend.close(), CLOSE_TIMEOUT)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.contains`."""
        held = await self.bounded("looking up", self.backend.contains(keys))
        return self._whole(held, len(keys))

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """See `StorageBackend.read`."""
        return self._whole(await self.bounded("reading", self.backend.read(keys, into)), len(keys))

    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        """See `Lists`, of which the backend must be one. Each batch has the time of a verb."""
        assert isinstance(self.backend, Lists)
        batches = self.backend.listing()
        while (batch := await self.bounded("listing", _next(batches))) is not None:
            yield batch

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        """See `StorageBackend.write`."""
        return self._whole(await self.bounded("writing", self.backend.write(chunks)), len(chunks))

    async def delete(self, keys: Collection[ChunkKey]) -> None:
        """See `StorageBackend.delete`."""
        if keys:
            await self.bounded("deleting", self.backend.delete(list(keys)))

    async def settled(self, seconds: float) -> None:
        """Wait until nothing is under way that was given up, in at most so many seconds: what was being written lands
        after a delete else."""
        until = asyncio.get_running_loop().time() + seconds
        while self._calls.hanging and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.02)

    def _whole(self, results: list[T], count: int) -> list[T]:
        if not isinstance(results, list | tuple) or len(results) != count:
            raise BackendError(f"backend {self.tier.backend} says {results!r:.60} for {count} keys")
        return results


async def _next(batches: AsyncIterator[Sequence[Listed]]) -> Sequence[Listed] | None:
    return await anext(batches, None)


def the_tier(config: Config, name: str, file: str) -> TierConfig:
    """The tier of that name.

    Raises:
        ConfigError: There is none.
    """
    for tier in config.tiers:
        if tier.name == name:
            return tier
    names = ", ".join(tier.name for tier in config.tiers) or "none"
    raise ConfigError(f"there is no tier {name!r}; {file} has {names}")


def owner_of(tier: TierConfig) -> str | None:
    """The process that has a tier open whose capacity owners share; None if there is none."""
    if not can_be_inspected(tier.backend):
        return None
    for path in map(Path, tier.options.paths()):
        with suppress(LMCacheError):
            if os.path.isdir(path):  # not Path.is_dir, which raises where this user may not look: opening says more
                for shard in look(path).shards:
                    if shard.locked:
                        return shard.owner.partition("-")[0] or "unknown"
    return None


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Of values in order, the least that so many percent of them do not exceed."""
    return sorted_values[max(0, -(-int(len(sorted_values) * percent) // 100) - 1)]


def shown_time(seconds: float) -> str:
    """Seconds as people read them: `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        with suppress(Exception):  # a plugin's record may not be one
            self.texts.append(record.getMessage())


@contextmanager
def told_by_loggers() -> Iterator[list[str]]:
    """What the product's loggers warn of meanwhile, in place of standard error."""
    handler = _Records()
    loggers = [logging.getLogger(name) for name in ("lmcache_core", "lmcache_backends")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.texts
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do all at once; the first that fails, or being cancelled, ends all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Outcome(NamedTuple):
    value: Any
    error: BaseException | None


def beside(work: Callable[[], Coroutine[Any, Any, T]], *, most: float | None = None, grace: float = 10.0) -> T:
    """What a coroutine returns that runs on an event loop of its own thread. Ctrl-C and SIGTERM cancel it, give it
    `grace` seconds to clean up, and end the command then; a thread that hangs is left behind.

    Raises:
        TimeoutError: It has not ended within `most` seconds.
    """
    loop = asyncio.new_event_loop()
    outcome: list[_Outcome] = []
    ended = threading.Event()
    started: list[asyncio.Task[T]] = []

    async def main() -> T:
        started.append(asyncio.current_task())  # type: ignore[arg-type]
        return await work()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            outcome.append(_Outcome(loop.run_until_complete(main()), None))
        except BaseException as error:  # noqa: BLE001  it is the caller's, whatever it is
            outcome.append(_Outcome(None, error))
        finally:
            _close(loop)
            ended.set()

    def cancel() -> None:
        for task in started:
            task.cancel()

    thread = threading.Thread(target=run, name="lmcache-tool", daemon=True)
    with terminable():
        thread.start()
        try:
            if not ended.wait(most):
                raise TimeoutError
        except BaseException:  # Ctrl-C too: what was begun is ended first
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(cancel)
            ended.wait(grace)
            raise
    ((value, error),) = outcome
    if error is not None:
        raise error
    done: T = value
    return done


_left: list[tuple[asyncio.AbstractEventLoop, Collection[asyncio.Task[Any]]]] = []


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close it, unless calls that hang may still come back to it: then it stays as long as the process."""
    if left := asyncio.all_tasks(loop):
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # at exit, where nobody wants to know
        _left.append((loop, left))
    else:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
