"""One opening of the backend: a client of the store, and threads for it.

The client may not be called before it is set up nor after it is closed: the process would end. So it is closed by the
last call that uses it. A call that hangs costs its thread.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lmcache_backends.mooncake.errors import failed, lacks
from lmcache_backends.mooncake.objects import Objects
from lmcache_backends.mooncake.options import MooncakeOptions
from lmcache_backends.mooncake.tally import Tally
from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.iocalls import IoCalls
from lmcache_core.openings import to_the_end

__all__ = ["Session"]

R = TypeVar("R")

_LAST_CALLS = 2.0
"""Seconds that `close` waits for calls that are under way before it leaves the client to the last of them."""
_BUFFER = 16 << 20
"""Bytes that the client takes for copies; nothing here needs any."""


class Session:
    """All methods run on the event loop, but for those that say so."""

    def __init__(self, options: MooncakeOptions, tally: Tally) -> None:
        self._options = options
        self._tally = tally
        self._calls = IoCalls("mooncake", options.threads, self._leave)
        self._store: Any = None
        self._objects: Objects | None = None

    @property
    def objects(self) -> Objects:
        """The chunks there."""
        if self._objects is None:
            raise ClosedError("mooncake: the backend is not open")
        return self._objects

    async def open(self) -> None:
        try:
            await self._calls.submit(self._open)
        except BaseException:  # a cancelled opening too must let go of what it has
            await to_the_end(self.close())
            raise

    def _open(self) -> None:
        """On a thread."""
        options = self._options
        try:
            library = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise lacks(error) from error
        self._look_for_master()
        store = library.MooncakeDistributedStore()
        code = store.setup(
            options.host,
            options.metadata,
            options.segment,
            _BUFFER,
            options.protocol,
            options.devices,
            options.master,
        )
        if code:
            raise failed(code, options.master, f"joining the store as {options.host} with metadata {options.metadata}")
        self._store = store
        config = library.ReplicateConfig()
        config.replica_num = options.replicas
        self._objects = Objects(store, config, options, self._tally)

    def _look_for_master(self) -> None:
        """The library would try for a minute and a half."""
        host, port = self._options.address()
        where = f"mooncake: {self._options.master}"
        try:
            socket.create_connection((host, port), self._options.connect_timeout).close()
        except socket.gaierror:
            raise BackendError(f"{where}: there is no host {host}; correct master, or the network's names") from None
        except TimeoutError:
            limit = f"{self._options.connect_timeout:g} s"
            raise BackendError(f"{where}: no connection within {limit}; look at firewalls, or correct master") from None
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            advice = "start mooncake_master, or correct master; the tier tries again by itself"
            raise BackendError(f"{where}: {why}; {advice}") from None

    async def each(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R]:
        """See `IoCalls`."""
        return await self._calls.each(fn, calls)

    async def close(self) -> None:
        await self._calls.close(_LAST_CALLS)

    def _leave(self) -> None:
        """On a thread."""
        store, self._store, self._objects = self._store, None, None
        if store is not None:
            store.close()
