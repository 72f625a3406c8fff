"""The backend: files as on a shared file system, and payloads that go past host memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from lmcache_backends.gds.direct import DirectFiles, Scratch, check_read, check_write
from lmcache_backends.gds.library import Way, claims, library, way_of
from lmcache_backends.gds.moving import CuFiles, PayloadFirst
from lmcache_backends.gds.options import GdsOptions
from lmcache_backends.gds.tally import Tally
from lmcache_backends.nfs.backend import FilesBackend
from lmcache_backends.nfs.chunks import ChunkFiles
from lmcache_backends.nfs.moving import Mover, PlainMover
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import CopyBack, DirectRead, DirectWrite, ReadResult, WriteResult

__all__ = ["GdsBackend"]

_log = logging.getLogger(__name__)


class GdsBackend(FilesBackend):
    """Chunks as files of a directory. Not `Abortable`: neither KvikIO nor a file system takes back what is begun."""

    def __init__(self, options: GdsOptions, *, reads_only: bool = False) -> None:
        self._direct_tally = Tally()
        super().__init__(options, self._mover, self._direct_tally, reads_only=reads_only)
        self._gds = options
        self._kvikio: Any = None
        self._files: CuFiles | None = None
        self._scratch = Scratch()
        self._way = Way(False, False, "")
        self._told: list[str] = []
        self._payload_first = options.trust and not options.fsync  # else a file is whole before it has its name
        self._changing = asyncio.Lock()
        self._turns = asyncio.Semaphore(1)
        """Reads to a device: where they hang, half of the threads are left for reads to the host."""

    async def open(self) -> None:
        self._turns = asyncio.Semaphore(max(1, self._gds.threads // 2))
        async with self._changing:
            try:
                await super().open()
            except BaseException:  # a cancelled opening too must let go of what it has
                self._let_go()
                raise

    def _mover(self) -> Mover:
        """On a thread, at each opening."""
        kvikio = self._kvikio = library()
        otherwise = claims.claim(kvikio, self, self._gds)
        self._way = way = way_of(kvikio, self._gds.compat)
        if self._gds.compat == "never" and not way.cufile:
            raise ConfigError(f"gds: compat: never, but {way.why}; or write compat: auto")
        mode = "cuFile" if way.cufile else "compatibility mode"
        self._tell(([f"{mode}: {way.why}"] if way.why else []) + (otherwise if way.device else []))
        self._files = CuFiles(kvikio) if way.device else None
        mover = self._files if self._files and self._gds.host_memory == "kvikio" else PlainMover()
        return PayloadFirst(mover) if self._payload_first else mover

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            if line not in self._told:
                _log.warning("gds: %s: %s", self._gds.directory(), line)
        self._told = lines

    async def close(self) -> None:
        async with self._changing:
            try:
                await super().close()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        if self._kvikio is not None:
            claims.release(self._kvikio, self)

    def _direct(self, chunks: ChunkFiles) -> DirectFiles:
        if self._files is None:
            raise BackendError(f"gds: {self._gds.directory()}: {self._way.why}; until then read through host memory")
        trust, first = self._gds.trust, self._payload_first
        return DirectFiles(chunks, self._files, self._direct_tally, self._scratch, trust=trust, payload_first=first)

    def reader(self) -> GdsBackend:
        """Makes this a `ReadsBeside`."""
        return GdsBackend(self._gds, reads_only=True)

    @property
    def has_device(self) -> bool:
        return self._files is not None

    async def read_direct(self, reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
        """Makes this a `DeviceDirect`."""
        for read in reads:
            check_read(read)
        session, turns = self._sessions.current, self._turns
        direct = self._direct(session.chunks)

        async def one(read: DirectRead) -> ReadResult:
            async with turns:
                (result,) = await session.each(direct.read, [(read, back)])
            return result

        # All have ended when this does, however it ends: they use the caller's memory.
        results = await asyncio.gather(*map(one, reads), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, ReadResult)]

    async def write_direct(self, writes: Sequence[DirectWrite], back: CopyBack) -> list[WriteResult]:
        for write in writes:
            check_write(write)
        session = self._sessions.current
        direct = self._direct(session.chunks)
        batches = [list(writes)]
        if len({write.chunk.key for write in writes}) < len(writes):  # in turn: the last of a key is to stay
            batches = [[write] for write in writes]
        results = []
        for batch in batches:
            results += await session.each(direct.write, [(write, back) for write in batch])
        stored = [w.chunk for w, result in zip(writes, results, strict=True) if result is WriteResult.STORED]
        self._note_use([chunk.key for chunk in stored])
        session.wrote(sum(len(chunk.pages) * chunk.shards * chunk.page_bytes for chunk in stored))
        return results
