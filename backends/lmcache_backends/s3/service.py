"""A bucket of S3: the client for it, and what to tell of its faults."""

from __future__ import annotations

import importlib
import os

from lmcache_backends.objects.client import Client
from lmcache_backends.objects.faults import Fault
from lmcache_backends.objects.options import authority
from lmcache_backends.objects.reach import unreachable
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3.errors import lacks, told
from lmcache_backends.s3.identity import Identity
from lmcache_backends.s3.options import S3Options
from lmcache_backends.s3.regions import region_of
from lmcache_backends.s3.target import Target
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.iothreads import IoThreads

__all__ = ["S3Service"]


class S3Service:
    """Of one opening."""

    bulk = True

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._target: Target | None = None
        self._ca: str | None = None
        self.place = f"bucket {options.place_name()}"
        self._objects = ""

    async def connect(self, threads: IoThreads, tally: Tally) -> Client:
        options = self._options
        if options.ca_file:
            self._ca = await threads.run(authority, options.door, options.ca_file)
        identity = Identity(options, threads)
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        self._target = target = Target.of(options, options.region or await identity.region(), endpoint)
        self.place, self._objects = target.place, target.objects
        await identity.keys()
        name, library = ("aws", "aioboto3") if options.is_express() else ("rust", "obstore")
        try:
            module = await threads.run(importlib.import_module, f"lmcache_backends.s3.{name}")
        except ImportError as error:
            raise lacks(library, error) from error
        if options.is_express():
            making = await threads.run(module.prepare, options, target, identity)
            aws: Client = await module.make(options, target, making, threads, tally)
            return aws
        rust: Client = await threads.run(module.make, options, target, identity, tally, self._ca)
        return rust

    async def why(self, fault: Fault, threads: IoThreads) -> BackendError | ConfigError:
        options, target, ca = self._options, self._target, self._ca
        limit, verify = options.connect_timeout, options.verify
        if target is not None and (fault.status is None or (fault.status == 400 and not fault.code)):
            return await threads.run(unreachable, options.door, target.url, limit, ca, fault, verify=verify)
        if target is not None and fault.elsewhere and not fault.region:
            region = await threads.run(region_of, target.url, target.bucket, limit, ca, verify=verify)
            fault = Fault(fault.code, fault.status, region)
        return told(fault, self.place, self._objects, opening=True)

    def told(self, fault: Fault) -> BackendError | ConfigError:
        return told(fault, self.place, self._objects)
