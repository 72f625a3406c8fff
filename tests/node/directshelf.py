"""A tier for tests that reads into a device's memory too, which is the host's here."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Sequence

from lmcache_core.errors import BackendError, FrameError
from lmcache_core.frame import shape, verify
from lmcache_core.protocols import CopyBack, DirectRead, DirectWrite, ReadResult, WriteResult
from tests.node.shelf import Shelf


class DirectShelf(Shelf):
    """See the module. Until a read has ended there is garbage in memory, and afterwards if it is no hit.

    Args:
        faults: Of those of them that a read has some of: `miss`, `corrupt`, `raise`.
        probability: Of a fault, in each read.
        delays: Seconds, of which a read takes some.
    """

    def __init__(
        self, faults: Sequence[str] = (), *, probability: float = 1.0, seed: int = 0, delays: Sequence[float] = (0.0,)
    ) -> None:
        super().__init__()
        self.faults = faults
        self.probability = probability
        self.delays = delays
        self.rng = random.Random(seed)
        self.gate = asyncio.Event()
        """Reads wait for it before they write anything."""
        self.gate.set()
        self.arrived: list[int] = []
        """Addresses that reads which have begun will write to."""
        self.ended = 0
        self.readers: list[DirectShelf] = []
        """What was opened beside it, to read."""

    has_device = True

    def reader(self) -> DirectShelf:
        """Makes this a `ReadsBeside`: of what is in it, with faults by chance of its own."""
        seed = len(self.readers) + 1
        reader = type(self)(self.faults, probability=self.probability, seed=seed, delays=self.delays)
        reader.values = self.values
        self.readers.append(reader)
        return reader

    async def read_direct(self, reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
        self._call("read_direct", len(reads))
        results = []
        for read in reads:
            self.arrived.append(read.address)
            nbytes = read.pages * read.chunk.page_bytes
            ctypes.memmove(read.address, self.rng.randbytes(nbytes), nbytes)
            await self.held(len(self.arrived))
            if delay := self.rng.choice(self.delays):
                await asyncio.sleep(delay)
            ctypes.memmove(read.address, self.rng.randbytes(nbytes), nbytes)
            try:
                results.append(self._read(read, back))
            finally:
                self.ended += 1
        return results

    async def held(self, number: int) -> None:
        """What the read that is the `number`th waits for."""
        await self.gate.wait()

    def _read(self, read: DirectRead, back: CopyBack) -> ReadResult:
        chunk = read.chunk
        nbytes = read.pages * chunk.page_bytes
        fault = self.rng.choice(self.faults) if self.faults and self.rng.random() < self.probability else ""
        found = self.values.get(chunk.key)
        if fault == "raise":
            raise BackendError("the device could not be written to")
        if found is None or fault == "miss":
            return ReadResult.MISS
        form = shape(len(chunk.pages), chunk.shards, chunk.page_bytes)
        try:
            verify(memoryview(found[1]), form, chunk.key.space, chunk.parent, chunk.pages)
        except FrameError:
            fault = "corrupt"
        if fault == "corrupt":
            return ReadResult.CORRUPT
        start = form.header_bytes + read.shard * form.shard_bytes + read.first * chunk.page_bytes
        wanted = found[1][start : start + nbytes]
        ctypes.memmove(read.address, wanted, nbytes)
        seen = bytearray(nbytes)
        try:
            back(read.address, memoryview(seen))
        except Exception as error:  # it is the caller's, and may raise anything
            raise BackendError(f"the device's memory cannot be copied back: {error}") from error
        assert seen == wanted
        return ReadResult.HIT

    async def write_direct(self, writes: Sequence[DirectWrite], back: CopyBack) -> list[WriteResult]:
        raise BackendError("nobody writes like this")
