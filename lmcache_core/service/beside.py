"""A node's tiers, opened in another process of its host too: to read to that process's devices, past host memory.

What is read is checked as in the node's own process, and what cannot be read is had from the node. So an opening that
fails, or a tier that fails here alone, costs speed and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

import msgspec

from lmcache_core.client import DirectReading, PastHost
from lmcache_core.config import TierConfig, convert
from lmcache_core.directreads import DirectReads
from lmcache_core.errors import BackendError, ClosedError, LMCacheError, PluginError
from lmcache_core.health import CLOSE_TIMEOUT, TierHealth
from lmcache_core.index.decisions import Load, Write
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
    WriteResult,
)
from lmcache_core.ratelog import LogWriter, RateLog

__all__ = ["TierReaders"]

log = logging.getLogger(__name__)


class _Untold:
    """`TierEvents` that nobody wants to know."""

    def loaded(self, load: Load, result: ReadResult | None, seconds: float) -> None: ...

    def measured(self, number: int, nbytes: int, seconds: float) -> None: ...

    def patience(self, number: int, nbytes: int) -> float | None: ...

    def overdue(self, load: Load) -> bool:
        return False

    def dropped(self, load: Load) -> None: ...

    def gave_up(self, load: Load) -> None: ...

    def wrote(self, write: Write, result: WriteResult | None, seconds: float) -> None: ...

    def late_write(self, write: Write) -> None: ...

    def counted(self, number: int, counts: Mapping[str, float]) -> None: ...

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


class _Alone:
    """A backend of which nothing else is asked, whatever it can."""

    def __init__(self, backend: Opening) -> None:
        self.open = backend.open
        self.close = backend.close


class _Reader:
    """One tier. Runs on the event loop."""

    def __init__(self, number: int, config: TierConfig, log: RateLog) -> None:
        self._number = number
        self._config = config
        self._log = log
        self._health: TierHealth | None = None
        self.direct: DirectReads | None = None

    async def open(self) -> None:
        """Never raises: it is of no use then."""
        config = self._config
        try:
            backend = await asyncio.to_thread(make_reader, config)  # modules may have to be imported
            events = _Untold()
            self._health = TierHealth(
                self._number, config, _Alone(backend), events, self._log, self._is_busy, lambda: None
            )
            self.direct = DirectReads(self._number, config, backend, self._health, events, lambda: None)
            await self._health.open()
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            self._log.warning("beside", "tier %s is not read past host memory in this process: %s", config.name, error)

    def _is_busy(self) -> bool:
        return self.direct is not None and self.direct.busy

    async def close(self) -> None:
        if self.direct is not None:
            self.direct.cancel()
        if self._health is not None:
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
        self._told: bytes | None = None
        self._opening = False
        self._readers: dict[int, _Reader] = {}
        self._changing = asyncio.Lock()

    def use(self, tiers: bytes) -> None:
        """Have the tiers that a node has told, and no others. They are opened beside the caller."""
        if tiers != self._told:
            self._told = tiers
            self._opening = True
            with contextlib.suppress(ClosedError):
                self._loop.start(self._use(tiers))

    async def _use(self, tiers: bytes) -> None:
        async with self._changing:
            try:
                await self._open(tiers)
            finally:
                self._opening = tiers != self._told

    async def _open(self, tiers: bytes) -> None:
        before, self._readers = self._readers, {}
        await self._close(before)
        try:
            told = msgspec.msgpack.decode(tiers, type=list[tuple[int, TierConfig]])
        except (msgspec.MsgspecError, LMCacheError) as error:
            self._log.warning("beside", "what the node says of its tiers cannot be understood: %s", error)
            return
        readers = {number: _Reader(number, config, self._log) for number, config in told}
        self._readers = readers
        await asyncio.gather(*(reader.open() for reader in readers.values()))

    async def _close(self, readers: Mapping[int, _Reader]) -> None:
        await asyncio.gather(*(reader.close() for reader in readers.values()), return_exceptions=True)

    @property
    def possible(self) -> bool:
        """Whether any of them can be read, or may be soon."""
        return self._opening or any(self.can_read(number) for number in list(self._readers))

    def can_read(self, number: int) -> bool:
        """Whether a tier can be read now."""
        reader = self._readers.get(number)
        return reader is not None and reader.direct is not None and reader.direct.possible

    def read(self, found: PastHost, address: int, back: CopyBack) -> DirectReading:
        """See `ReadsPastHost.read_past_host`."""
        ended: Future[list[ReadResult]] = Future()
        ended.set_running_or_notify_cancel()
        reader = self._readers.get(found.number)
        read = DirectRead(found.chunk, found.shard, 0, found.pages, address)
        if reader is None or reader.direct is None:
            ended.set_exception(BackendError(f"tier {found.tier} is not read past host memory any more"))
            answered: Future[bool] = Future()
            answered.set_result(True)
            return DirectReading(answered, ended)
        return DirectReading(self._loop.start(reader.direct.read(read, back, ended)), ended)

    def close(self) -> None:
        """Let go of the tiers. What is being read goes on until it has ended. Idempotent."""
        readers, self._readers = self._readers, {}
        with contextlib.suppress(ClosedError, TimeoutError):
            self._loop.run(self._close(readers), 2 * CLOSE_TIMEOUT)
        self._loop.stop()
        self._writer.close()
