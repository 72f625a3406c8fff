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


class PinnedMemory:
    """All that was asked to be pinned for one device."""

    def __init__(self, device: Device, *, piece: int = PIECE) -> None:
        self._device = device
        self._piece = piece
        self._areas: dict[int, memoryview] = {}
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def pin(self, address: int, memory: memoryview) -> None:
        """Pin what lies at an address, on a thread. Once is enough. It is held on to, as a driver would copy from what
        was there if something else came to be there."""
        nbytes = memory.nbytes
        if address in self._areas or not nbytes:
            return
        self._areas = {**self._areas, address: memory}  # as a whole, for those who read it
        thread = threading.Thread(target=self._pin, args=(address, nbytes), name="lmcache-pin", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pin(self, address: int, nbytes: int) -> None:
        with self._device.entered():
            for start in range(0, nbytes, self._piece):
                if self._stop.is_set():
                    return
                try:
                    self._device.pin(address + start, min(self._piece, nbytes - start))
                except (CudaError, LMCacheError) as error:
                    log.warning(
                        "%d of %d bytes of the host pool are pinned, copies to and from the others are slower: %s",
                        start,
                        nbytes,
                        error,
                    )
                    return
                self._pinned.append(address + start)

    def split(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Cut copies so that none crosses from one piece to another."""
        if not self._areas:
            return pieces
        return [cut for piece in pieces for cut in self._cut(piece)]

    def _cut(self, piece: Piece) -> Sequence[Piece]:
        for area, memory in self._areas.items():
            for host in (piece.target, piece.source):
                if area <= host < area + memory.nbytes:
                    first = (host - area) // self._piece
                    if first != (host - area + piece.nbytes - 1) // self._piece:
                        return self._halves(piece, area + (first + 1) * self._piece - host)
        return [piece]

    def _halves(self, piece: Piece, nbytes: int) -> Sequence[Piece]:
        rest = Piece(piece.target + nbytes, piece.source + nbytes, piece.nbytes - nbytes)
        return [piece._replace(nbytes=nbytes), *self._cut(rest)]

    def close(self) -> None:
        """Unpin all of it; nothing of it is being copied any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        with self._device.entered():
            for address in self._pinned:
                self._device.unpin(address)
        self._pinned.clear()
        self._areas = {}
