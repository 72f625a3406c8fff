"""Whether a tier can be used: opening its backend, noting its failures, leaving it alone and coming back to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from lmcache_core.breaker import Breaker
from lmcache_core.calls import BackendCalls
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.events import OpeningEvents
from lmcache_core.openings import Opening
from lmcache_core.protocols import CountsEvents, Describes, ReportsUsage, Scannable, Usage
from lmcache_core.ratelog import RateLog
from lmcache_core.units import format_size

OPEN_TIMEOUT = 30.0
"""Seconds that opening a backend and listing what it holds may take together."""
MANIFESTS_TIMEOUT = 5.0
CLOSE_TIMEOUT = 5.0
"""Seconds that closing it before it is opened again may take."""


class TierHealth:
    """Of one tier. Runs on the event loop.

    Args:
        number: Which tier it is.
        config: Its settings.
        backend: Its backend.
        events: Whom to tell.
        log: For faults.
        busy: Whether anything is under way that must end before the backend can be closed.
        stopped: Called when the tier cannot be used any more, and before it is listed again.
        otherwise: What happens without it, for people.
    """

    def __init__(
        self,
        number: int,
        config: TierConfig,
        backend: Opening,
        events: OpeningEvents,
        log: RateLog,
        busy: Callable[[], bool],
        stopped: Callable[[], None],
        otherwise: str = "its chunks are misses",
    ) -> None:
        self.up = False
        self.listing = False
        """It is being told what the backend holds; what it held before has been forgotten."""
        self.why = ""
        """The last failure."""
        self.quarantined = 0
        """Bytes of slots whose I/O is past its deadline."""
        self.calls = BackendCalls(backend, config.backend)
        self._number = number
        self._config = config
        self._backend = backend
        self._events = events
        self._log = log
        self._busy = busy
        self._stopped = stopped
        self._otherwise = otherwise
        self._breaker = Breaker(config.breaker.failures, config.breaker.cooldown, config.breaker.max_cooldown)
        self._recovering: asyncio.Task[None] | None = None
        self._attempt = 0
        self._last_success = -math.inf

    @property
    def session(self) -> int:
        """Another number each time that it has been opened or left alone: what was asked before tells nothing of it."""
        return self._attempt

    async def open(self) -> None:
        """Open the backend and learn what it holds. A medium that cannot be used now is tried again later.

        Raises:
            ConfigError: Its options can never work.
        """
        try:
            await self._open()
        except ConfigError:
            raise
        except (BackendError, TimeoutError) as error:
            self.failed(error, "cannot be opened")
            self.trip()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + OPEN_TIMEOUT
        self._attempt += 1
        await self.calls.bounded(self._backend.open(), OPEN_TIMEOUT)
        await self._events.reset(self._number)
        self._stopped()  # what has been put off is about what it held before
        self.listing = True
        try:
            if isinstance(self._backend, Scannable):
                await self.calls.bounded(self._scan(self._backend, self._attempt), until - loop.time())
                await self._ask_for_manifests()
        finally:
            self.listing = False
        self.up = True
        self._events.opened(self._number)

    async def _ask_for_manifests(self) -> None:
        """Learn what its chunks are of, for people: a tier that cannot tell is used all the same."""
        if not isinstance(self._backend, Describes):
            return
        try:
            found = await self.calls.bounded(self._backend.manifests(), MANIFESTS_TIMEOUT)
            if not isinstance(found, dict) or not all(isinstance(each, bytes) for each in found.values()):
                raise BackendError(f"backend {self._config.backend} says {found!r:.60}")
            self._events.described(found)
        except (BackendError, ConfigError, TimeoutError) as error:
            self._log.warning("manifests", "tier %s cannot tell its models: %s", self._config.name, _why(error))

    async def _scan(self, backend: Scannable, attempt: int) -> None:
        async for batch in backend.scan():
            if attempt != self._attempt or self.up:
                return  # it was given up, and what it tells is old
            self._events.scanned(self._number, batch)

    async def close(self, seconds: float) -> None:
        """Close the backend, in at most so many seconds, for good."""
        self.stop()
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.wait([self._recovering], timeout=seconds)
        try:
            await self.calls.bounded(self._backend.close(), seconds)
        except (BackendError, ConfigError, TimeoutError) as error:
            self._log.warning("close", "tier %s: could not be closed: %s", self._config.name, _why(error))

    def stop(self) -> None:
        """Use the tier no more."""
        self.up = False
        self._attempt += 1
        self._stopped()

    def succeeded(self) -> None:
        """Note a success of the backend."""
        self._breaker.succeeded()
        self._last_success = asyncio.get_running_loop().time()

    def failed(self, error: Exception, what: str) -> None:
        """Note a failure of the backend; enough of them in a row open the breaker. What was given up because it is open
        is no reason of its own."""
        if self._breaker.open:
            return
        self._note(error, what)
        if self._breaker.failed():
            self._down()

    def timed_out(self, what: str, limit: float) -> None:
        """Something has not ended in `limit` seconds. If nothing else has succeeded in this time either the breaker
        opens at once: others would wait as long."""
        self._note(TimeoutError(), what)
        still = self._last_success < asyncio.get_running_loop().time() - limit
        if self._breaker.trip() if still else self._breaker.failed():
            self._down()

    def _note(self, error: Exception, what: str) -> None:
        self.why = _why(error)
        self._log.warning(what, "tier %s %s: %s", self._config.name, what, self.why)

    def quarantine(self, nbytes: int) -> None:
        """Slots of so many bytes are in use past their deadline; too many of them open the breaker."""
        self.quarantined += nbytes
        if self.quarantined > self._config.quarantine:
            self.why = f"{format_size(self.quarantined)} of I/O are past their deadline and have not ended"
            self.trip()

    def release(self, nbytes: int) -> None:
        """Slots of so many bytes that were in quarantine are in use no more."""
        self.quarantined -= nbytes

    def trip(self) -> None:
        """Open the breaker at once."""
        if self._breaker.trip():
            self._down()

    def _down(self) -> None:
        self._log.warning(
            "down", "tier %s is left alone until it can be opened again; %s", self._config.name, self._otherwise
        )
        self._events.lost(self._number)
        self.stop()
        self.calls.abort()  # or it would be waited for to the end before the backend is opened again
        self._recovering = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        while self._breaker.open:
            await asyncio.sleep(self._breaker.next_probe())
            if self.quarantined or self.calls.hanging or self._busy():
                continue  # what hangs there must end before the backend can be closed
            try:
                await self.calls.bounded(self._backend.close(), CLOSE_TIMEOUT)
                await self._open()
            except (BackendError, ConfigError, TimeoutError) as error:
                self.why = _why(error)
                self._log.warning("recover", "tier %s is still down: %s", self._config.name, self.why)
            else:
                self._breaker.close()
                self._log.info("tier %s is back", self._config.name)

    def usage(self) -> Usage | None:
        """What the backend holds, if it tells."""
        if not self.up or not isinstance(self._backend, ReportsUsage):
            return None
        try:
            usage = self._backend.usage()
            if usage.capacity is not None and usage.capacity < 0:
                raise ValueError(f"a capacity of {usage.capacity}")
            return usage
        except Exception as error:  # noqa: BLE001 a plugin may raise anything: that must not stop the node's clock
            self._log.warning("usage", "tier %s cannot tell its usage: %s", self._config.name, error)
            return None

    def counters(self) -> Mapping[str, int]:
        """What the backend counts, if it does."""
        if not isinstance(self._backend, CountsEvents):
            return {}
        try:
            return self._backend.counters()
        except Exception as error:  # noqa: BLE001 a plugin may raise anything: that must not hide other figures
            self._log.warning("counters", "tier %s cannot tell its counters: %s", self._config.name, error)
            return {}


def _why(error: Exception) -> str:
    return str(error) or ("it took too long" if isinstance(error, TimeoutError) else type(error).__name__)
