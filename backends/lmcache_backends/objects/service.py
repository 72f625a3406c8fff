"""A service that obstore talks to by itself: the client for it, and what to tell of its faults."""

from __future__ import annotations

import importlib

from lmcache_backends.objects.client import Client
from lmcache_backends.objects.faults import NO_CREDENTIALS, Dialect, Fault, lacks, told
from lmcache_backends.objects.options import ObjectOptions, authority
from lmcache_backends.objects.reach import unreachable
from lmcache_backends.objects.tally import Tally
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.iothreads import IoThreads

__all__ = ["ObstoreService"]


class ObstoreService:
    """Of one opening. A module `rust` of the backend makes the client.

    Args:
        options: Of the place.
        url: Of the server.
        dialect: What it calls things.
    """

    bulk = False

    def __init__(self, options: ObjectOptions, url: str, dialect: Dialect) -> None:
        self._options = options
        self._url = url
        self._dialect = dialect
        self._ca: str | None = None
        self.place = f"{options.holder} {options.place_name()} at {url}"

    async def connect(self, threads: IoThreads, tally: Tally) -> Client:
        options, door = self._options, self._options.door
        if options.ca_file:
            self._ca = await threads.run(authority, door, options.ca_file)
        try:
            module = await threads.run(importlib.import_module, f"lmcache_backends.{door}.rust")
        except ImportError as error:
            raise lacks(door, "obstore", error) from error
        client: Client = await threads.run(module.make, options, tally, self._ca)
        return client

    async def why(self, fault: Fault, threads: IoThreads) -> BackendError | ConfigError:
        options = self._options
        silent = fault.status is None and fault.code != NO_CREDENTIALS
        if silent or (fault.status == 400 and not fault.code):
            limit, verify = options.connect_timeout, options.verify
            return await threads.run(unreachable, options.door, self._url, limit, self._ca, fault, verify=verify)
        return told(fault, self._dialect, self.place, "", opening=True)

    def told(self, fault: Fault) -> BackendError | ConfigError:
        return told(fault, self._dialect, self.place, "")
