"""A node's tiers, opened in another process of its host too: to read to that process's devices, past host memory.

What is read is checked as in the node's own process, and what cannot be read is had from the node. So an opening that
fails, or a tier that fails here alone, costs speed and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

import msgspec

from lmcache_core.client import DirectReading, PastHost
from lmcache_core.config import TierConfig, convert
from lmcache_core.directreads import DirectReads
from lmcache_core.errors import BackendError, ClosedError, LMCacheError, PluginError
from lmcache_core.health import CLOSE_TIMEOUT, OPEN_TIMEOUT, TierHealth
from lmcache_core.iothreads import IoThreads
from lmcache_core.loop import LoopThread
from lmcache_core.openings import Opening
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import (
    CopyBack,
    DeviceDirect,
    DirectRead,
    ReadResult,
    ReadsBeside,
    Stored,
)
from lmcache_core.ratelog import LogWriter, RateLog

__all__ = ["TierReaders"]

log = logging.getLogger(__name__)

MOST_MISSES = 8
PAUSE = 60.0
"""Seconds for which a tier is left to its node where so many chunks in a row were missing."""


class _Untold:
    """`OpeningEvents` that nobody wants to know."""

    def measured(self, number: int, nbytes: int, seconds: float) -> None: ...

    def opened(self, number: int) -> None: ...

    def lost(self, number: int) -> None: ...

    async def reset(self, number: int) -> None: ...

    def scanned(self, number: int, batch: Sequence[Stored]) -> None: ...

    def described(self, manifests: Mapping[bytes, bytes]) -> None: ...


class _DirectReader(Opening, DeviceDirect, Protocol):
    pass


def make_reader(config: TierConfig) -> _DirectReader:
    """A backend, not open yet, that reads what a node keeps on a tier.

    Raises:
        PluginError: It is not installed here, or is another one than the node's.
        ConfigError: It does not take these options.
    """
    plugin = load_backend(config.backend)
    backend = plugin.create(convert(config.options, plugin.options_type))
    reader: Any = backend.reader() if isinstance(backend, ReadsBeside) else None
    if not isinstance(reader, DeviceDirect):
        raise PluginError(
            f"backend {config.backend!r} does not read beside the node; install what the node's process has here too"
        )
    return cast(_DirectReader, reader)


def _made(config: TierConfig) -> _DirectReader:
    """As `make_reader`. Raises `LMCacheError` alone."""
    try:
        return make_reader(config)
    except LMCacheError:
        raise
    except BaseException as error:  # it must not end the event loop
        raise PluginError(f"backend {config.backend!r} raised {type(error).__name__}: {error}") from error


class _Alone:
    """A backend of which nothing else is asked, whatever it can."""

    def __init__(self, backend: Opening) -> None:
        self.open = backend.open
        self.close = backend.close


class _Reader:
    """One tier. Runs on the event loop, but for what is asked of it: `opening` and `direct`."""

    def __init__(self, number: int, config: TierConfig, log: RateLog) -> None:
        self._number = number
        self._config = config
        self._log = log
        self._health: TierHealth | None = None
        self._direct: DirectReads | None = None
        self._misses = 0
        """Chunks in a row that the node has told of and that were not there."""
        self._again = 0.0
        """When it may be asked again after too many of these."""
        self._opened = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        """Never raises: it is of no use then."""
        config = self._config
        # Modules may have to be imported. Nothing joins these threads: what hangs there holds up no exit.
        threads = IoThreads(f"lmcache-open-{config.name}", 1)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                backend = await threads.run(_made, config)
            told = msgspec.structs.replace(config, name=f"{config.name}, read beside its node,")
            events = _Untold()
            self._health = health = TierHealth(
                self._number,
                told,
                _Alone(backend),
                events,
                self._log,
                self._is_busy,
                lambda: None,
                otherwise="its node reads it to host memory",
            )
            self._direct = DirectReads(self._number, told, backend, health, events, lambda: None)
            await health.open()
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            why = f"it could not be made in {OPEN_TIMEOUT:g} s" if isinstance(error, TimeoutError) else error
            self._log.warning(
                f"beside {config.name}", "tier %s is not read past host memory in this process: %s", config.name, why
            )
        finally:
            threads.close()

    def _is_busy(self) -> bool:
        return self._direct is not None and self._direct.busy

    @property
    def opening(self) -> bool:
        """Whether it is not known yet if it can be used."""
        return not self._opened.done()

    @property
    def direct(self) -> DirectReads | None:
        """What reads it, if it can be read now."""
        direct = self._direct
        usable = direct is not None and direct.possible and time.monotonic() >= self._again
        return direct if usable else None

    def ended(self, results: Future[list[ReadResult]]) -> None:
        """A read has ended."""
        if results.exception() is not None:
            return
        self._misses = self._misses + 1 if results.result() == [ReadResult.MISS] else 0
        if self._misses >= MOST_MISSES:
            self._misses = 0
            self._again = time.monotonic() + PAUSE
            self._log.warning(
                f"beside {self._config.name}",
                "tier %s: %d chunks in a row that its node has there are not there for this process; see that both "
                "have the same directory or server; for %g s the node reads them",
                self._config.name,
                MOST_MISSES,
                PAUSE,
            )

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.cancel()
        self._opened.cancel()
        await asyncio.wait([self._opened])
        if self._health is not None:
            await self._health.calls.rest(CLOSE_TIMEOUT)  # an opening that does not heed it
            await self._health.close(CLOSE_TIMEOUT)


class TierReaders:
    """The tiers of one node that can be read like this. All methods may be called from any thread.

    Args:
        log_interval: Seconds between two log lines of one kind.
    """

    def __init__(self, log_interval: float) -> None:
        self._writer = LogWriter()
        self._log = RateLog(log, log_interval, writer=self._writer)
        self._loop = LoopThread("lmcache-readers")
        self._lock = threading.Lock()
        self._closed = False
        self._told: bytes | None = None
        self._uses = 0
        """Changes that are still to be made."""
        self._readers: dict[int, _Reader] = {}
        self._changing = asyncio.Lock()

    def use(self, tiers: bytes) -> None:
        """Have the tiers that a node has told, and no others. They are opened beside the caller."""
        with self._lock:
            if self._closed or tiers == self._told:
                return
            self._told = tiers
            self._uses += 1
        with contextlib.suppress(ClosedError):
            self._loop.start(self._use(tiers))

    async def _use(self, tiers: bytes) -> None:
        async with self._changing:
            await self._close_all()
            if not self._closed:
                self._readers = self._opened(tiers)
        with self._lock:
            self._uses -= 1

    def _opened(self, tiers: bytes) -> dict[int, _Reader]:
        try:
            told = msgspec.msgpack.decode(tiers, type=list[tuple[int, TierConfig]])
        except (msgspec.MsgspecError, LMCacheError) as error:
            self._log.warning("beside", "what the node says of its tiers cannot be understood: %s", error)
            return {}
        return {number: _Reader(number, config, self._log) for number, config in told}

    async def _close_all(self) -> None:
        readers, self._readers = self._readers, {}
        await asyncio.gather(*(reader.close() for reader in readers.values()), return_exceptions=True)

    @property
    def opening(self) -> bool:
        """Whether it is not known of all tiers yet if they can be read."""
        alive = self._loop.thread.is_alive()
        return alive and (self._uses > 0 or any(reader.opening for reader in list(self._readers.values())))

    @property
    def possible(self) -> bool:
        """Whether any of them can be read, or may be soon."""
        return self.opening or any(self.can_read(number) for number in list(self._readers))

    def can_read(self, number: int) -> bool:
        """Whether a tier can be read now."""
        reader = self._readers.get(number)
        return reader is not None and reader.direct is not None and self._loop.thread.is_alive()

    def read(self, found: PastHost, address: int, back: CopyBack) -> DirectReading:
        """See `ReadsPastHost.read_past_host`.

        Raises:
            BackendError: The tier is not read here any more.
            ClosedError: All have been closed.
        """
        reader = self._readers.get(found.number)
        direct = None if reader is None else reader.direct
        if reader is None or direct is None:
            raise BackendError(f"tier {found.tier} is not read past host memory any more")
        ended: Future[list[ReadResult]] = Future()
        ended.set_running_or_notify_cancel()
        ended.add_done_callback(reader.ended)
        read = DirectRead(found.chunk, found.shard, 0, found.pages, address)
        return DirectReading(self._loop.start(direct.read(read, back, ended)), ended)

    def close(self) -> None:
        """Let go of the tiers. What is being read goes on until it has ended. Idempotent: others than the first caller
        wait for nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(LMCacheError, TimeoutError):
            self._loop.run(self._end(), 4 * CLOSE_TIMEOUT)
        self._loop.stop()
        self._writer.close()

    async def _end(self) -> None:
        async with self._changing:  # a change that is under way ends first
            await self._close_all()
