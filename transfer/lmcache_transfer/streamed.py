"""Transfers by the stream thread: what an engine whose KV is on a device gets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_core.errors import ConfigError, LayoutError, UsageError
from lmcache_core.streaming import Copying, Layer
from lmcache_core.units import ByteSize
from lmcache_transfer.device import Device, Kernels, Part
from lmcache_transfer.paged import Layer as LayerTensors
from lmcache_transfer.paged import Layout, PagedLayout
from lmcache_transfer.pinned import PinnedMemory
from lmcache_transfer.pipeline import Move, way_of
from lmcache_transfer.rooms import Room, Rooms
from lmcache_transfer.streams import Load, Store, StreamThread

__all__ = ["StreamOptions", "StreamedKV", "StreamedTransfer", "StreamedView"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of transfers that have streams. A field's docstring is its documentation everywhere."""

    staging: ByteSize = 32 << 20
    """Memory of the device for a layer on its way; there are four such buffers."""

    def check(self) -> None:
        """See that they can be used.

        Raises:
            ConfigError: They can't.
        """
        if not 1 << 16 <= self.staging <= 1 << 34:
            raise ConfigError(
                f"transfer: staging: {self.staging} bytes are none for a layer on its way; write 64KiB to 16GiB"
            )


class StreamedTransfer:
    """Satisfies `Transfer`, `StreamingTransfer` and `DeviceRooms`.

    Args:
        device: On which the engine's tensors are. Closed with this.
        options: See `StreamOptions`.
    """

    def __init__(self, device: Device, options: StreamOptions) -> None:
        self._device = device
        self._pinned = PinnedMemory(device)
        self._rooms = Rooms(device)
        self._kernels: list[Kernels] = []
        self._closed = False
        self._staging = options.staging
        self.thread = StreamThread(device, staging=options.staging, split=self._pinned.split)

    def register(
        self,
        layers: Sequence[LayerTensors],
        *,
        dims: str,
        page_tokens: int,
        block_tokens: int | None = None,
        layout: Layout = "native",
    ) -> StreamedKV:
        """See `PagedLayout`."""
        kv = StreamedKV(
            self,
            layers,
            dims=dims,
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            layout=layout,
            device=self._device.kind,
        )
        if way_of(self._device, kv) == "staged" and kv.page_layer_bytes > self._staging:
            raise LayoutError(
                f"a page of {page_tokens} tokens takes {kv.page_layer_bytes} bytes of a layer, a staging buffer has "
                f"{self._staging}; make `staging` larger"
            )
        with self._device.entered():
            kv.kernels = self._device.kernels(kv)
        self._kernels.append(kv.kernels)
        return kv

    def pin(self, memory: memoryview) -> None:
        """See `StreamingTransfer`."""
        # What an earlier call has replaced is in no copy that is still to come.
        if replaced := self._pinned.replaced():
            out, into = self.store([]), self.load([])
            for under_way in (out, into):
                under_way.close()
            out.done.add_done_callback(lambda _: into.done.add_done_callback(lambda _: self._pinned.let_go(replaced)))
        self._pinned.pin(_address(memory), memory)

    def load(self, copies: Sequence[Copying], order: Sequence[Layer] = ()) -> Load:
        """See `StreamingTransfer`.

        Raises:
            LayoutError: Pages are not in their view, or a buffer is not of their size.
            ClosedError: The transfer has been closed.
        """
        return self.thread.load(self._jobs(copies, loading=True), order)

    def store(self, copies: Sequence[Copying]) -> Store:
        """See `StreamingTransfer`; raises as `load` does."""
        return self.thread.store(self._jobs(copies, loading=False))

    def moment(self) -> Future[float]:
        """See `StreamingTransfer`."""
        return self.thread.moment()

    def room(self, nbytes: int) -> Room:
        """See `DeviceRooms`."""
        return self._rooms.room(nbytes)

    def copy_back(self, address: int, into: memoryview) -> None:
        """See `DeviceRooms`."""
        self._rooms.copy_back(address, into)

    def _jobs(self, copies: Sequence[Copying], *, loading: bool) -> list[tuple[int, Move]]:
        """A move for each request and group, of its parts one behind another."""
        together: dict[tuple[int, int], list[Copying]] = {}
        for copying in copies:
            view = copying.view
            if not isinstance(view, StreamedView) or view.kv.transfer is not self:
                raise UsageError("a view of another transfer; ask the one that has registered this engine's KV")
            view.check(copying, loading=loading)
            if copying.pages:
                together.setdefault((copying.group, id(view)), []).append(copying)
        moves: list[tuple[int, Move]] = []
        for (group, _), parts in together.items():
            view = parts[0].view
            assert isinstance(view, StreamedView)
            moves.append((group, view.move(parts)))
        return moves

    def close(self) -> None:
        """See `StreamingTransfer`."""
        if self._closed:
            return
        self._closed = True
        self.thread.close()
        self._rooms.close()
        with self._device.entered():
            for kernels in self._kernels:
                kernels.close()
        self._pinned.close()
        self._device.close()


class StreamedKV(PagedLayout):
    """The KV of one cache group of an engine, copied by the stream thread. Satisfies `RegisteredKV`."""

    kernels: Kernels

    def __init__(self, transfer: StreamedTransfer, layers: Sequence[LayerTensors], **where: Any) -> None:
        super().__init__(layers, **where)
        self.transfer = transfer

    def view(self, block_ids: ArrayLike) -> StreamedView:
        """See the KV of one request, whose block table is `block_ids`. Nothing is loaded to blocks that are -1.

        Raises:
            LayoutError: There is no such block.
        """
        return StreamedView(self, self.units_of(block_ids, gaps=True).astype(np.int64))

    def view_all(self) -> StreamedView:
        """See all blocks in order, for a cache that holds one request."""
        return self.view(np.arange(self.blocks))


class StreamedView:
    """KV of one request in one cache group. Satisfies `KVView`, and waits then; the group is 0."""

    def __init__(self, kv: StreamedKV, units: NDArray[np.int64]) -> None:
        self.kv = kv
        self._units = units
        self.pages = len(units)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        store = self.kv.transfer.store([Copying(group, self, first_page, pages, into)])
        store.close()
        store.done.result()

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        load = self.kv.transfer.load([Copying(group, self, first_page, pages, source)])
        load.close()
        load.done.result()

    def check(self, copying: Copying, *, loading: bool) -> None:
        """See that something can be copied.

        Raises:
            LayoutError: It can't.
        """
        self.kv.check_buffer(copying.first_page, copying.pages, self.pages, copying.buffer)
        if loading and not self.kv.writable:
            raise LayoutError("cannot scatter to tensors that are read-only")
        if loading:
            return
        if copying.buffer.readonly:
            raise LayoutError("cannot gather into a buffer that is read-only")
        if (self._units[copying.first_page : copying.first_page + copying.pages] < 0).any():
            raise LayoutError("pages of blocks that are not there cannot be stored")

    def move(self, copies: Sequence[Copying]) -> Move:
        """Copy these together."""
        units = np.concatenate([self._units[each.first_page : each.first_page + each.pages] for each in copies])
        parts = [Part(each.pages, _address(each.buffer)) for each in copies]
        return Move(self.kv, self.kv.kernels, units, parts, owners=copies)


def _address(memory: memoryview) -> int:
    """Where memory lies that may be read-only."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
