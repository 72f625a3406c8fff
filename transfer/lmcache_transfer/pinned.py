"""Memory of the host that a device copies from and to by itself: pinned in pieces, on a thread, as that takes long.

Pinning a GiB takes about half a second, more where it has to be faulted in first, and a pool may have hundreds. Until
a piece is pinned copies of it work too; the driver makes them wait. No copy crosses from one piece to another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lmcache_core.errors import LMCacheError
from lmcache_cuda.errors import CudaError
from lmcache_transfer.device import Device, Piece

__all__ = ["PIECE", "PinnedMemory"]

log = logging.getLogger(__name__)

PIECE = 1 << 30
"""Bytes pinned at a time."""


class _Area:
    def __init__(self, address: int, memory: memoryview) -> None:
        self.address = address
        self.memory = memory
        """Held on to, as a driver would copy from what was there if something else came to be there."""
        self.pinned: list[int] = []
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None


class PinnedMemory:
    """What was asked to be pinned for one device: one area at a time, and those that it has replaced until they are let
    go of."""

    def __init__(self, device: Device, *, piece: int = PIECE) -> None:
        self._device = device
        self._piece = piece
        self._areas: dict[int, _Area] = {}
        self._replaced: list[_Area] = []

    def pin(self, address: int, memory: memoryview) -> None:
        """Pin what lies at an address, on a thread. Once is enough. What was pinned before is replaced."""
        if address in self._areas or not memory.nbytes:
            return
        self._replaced += [area for area in self._areas.values() if area not in self._replaced]
        area = _Area(address, memory)
        self._areas = {**self._areas, address: area}  # as a whole, for those who read it
        area.thread = threading.Thread(target=self._pin, args=(area,), name="lmcache-pin", daemon=True)
        area.thread.start()

    def _pin(self, area: _Area) -> None:
        nbytes = area.memory.nbytes
        with self._device.entered():
            for start in range(0, nbytes, self._piece):
                if area.stop.is_set():
                    return
                try:
                    self._device.pin(area.address + start, min(self._piece, nbytes - start))
                except (CudaError, LMCacheError) as error:
                    log.warning(
                        "%d of %d bytes of the host pool are pinned, copies to and from the others are slower: %s",
                        start,
                        nbytes,
                        error,
                    )
                    return
                area.pinned.append(area.address + start)
        log.debug("all %d bytes of the host pool are pinned", nbytes)

    def replaced(self) -> list[_Area]:
        """What has been replaced, each once. It is to be let go of when nothing of it is being copied any more."""
        found, self._replaced = self._replaced, []
        return found

    def let_go(self, areas: Sequence[_Area]) -> None:
        """Unpin these."""
        for area in areas:
            area.stop.set()
            if area.thread is not None:
                area.thread.join()
        with self._device.entered():
            for area in areas:
                for address in area.pinned:
                    self._device.unpin(address)
                area.pinned.clear()
        gone = {area.address for area in areas}
        self._areas = {address: area for address, area in self._areas.items() if address not in gone}

    def split(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Cut copies so that none crosses from one piece to another."""
        if not self._areas:
            return pieces
        return [cut for piece in pieces for cut in self._cut(piece)]

    def _cut(self, piece: Piece) -> Sequence[Piece]:
        for start, area in self._areas.items():
            for host in (piece.target, piece.source):
                if start <= host < start + area.memory.nbytes:
                    first = (host - start) // self._piece
                    if first != (host - start + piece.nbytes - 1) // self._piece:
                        return self._halves(piece, start + (first + 1) * self._piece - host)
        return [piece]

    def _halves(self, piece: Piece, nbytes: int) -> Sequence[Piece]:
        rest = Piece(piece.target + nbytes, piece.source + nbytes, piece.nbytes - nbytes)
        return [piece._replace(nbytes=nbytes), *self._cut(rest)]

    def close(self) -> None:
        """Unpin all of it; nothing of it is being copied any more."""
        self._replaced.clear()
        self.let_go(list(self._areas.values()))
