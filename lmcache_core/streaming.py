"""What a transfer can do that copies beside the engine: on streams of the device, layer by layer.

An engine submits work to a stream of its device and goes on; so does such a transfer, on streams of its own. Nobody
waits for the device but who asks for the bytes: streams wait for each other by events.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, runtime_checkable

from lmcache_core.protocols import KVView

__all__ = ["Copying", "DeviceRoom", "DeviceRooms", "Layer", "LayerLoad", "LayerStore", "StreamingTransfer"]


class Layer(NamedTuple):
    """A layer of an engine: number `layer` of those of cache group `group`."""

    group: int
    layer: int


class Copying(NamedTuple):
    """Pages of one request and cache group, and the bytes that they go to or come from, as for `KVView.gather`."""

    group: int
    view: KVView
    """Of what the same transfer has registered. Its blocks may be -1: nothing is loaded to those."""
    first_page: int
    pages: int
    buffer: memoryview


class LayerLoad(Protocol):
    """Copies to the engine that are under way, layer by layer."""

    @property
    def done(self) -> Future[None]:
        """Done when all copies have ended, or failed. Until then the buffers are being read."""
        ...

    def wait(self, layer: Layer) -> bool:
        """Have what the engine submits next wait for a layer. The caller waits until the copy has been submitted, not
        until it has ended. False if it could not be: the layer is not there, and the engine does not wait."""
        ...

    def settle(self) -> None:
        """Have what the engine submits next wait for all of it, so that it may do what it likes to the pages."""
        ...

    def close(self) -> None:
        """Nobody asks for layers any more. Copies go on."""
        ...


class LayerStore(Protocol):
    """Copies from the engine that are under way, each layer as soon as the engine has computed it."""

    def computed(self, layer: Layer) -> None:
        """The engine has submitted what computes this layer: copy it when that has ended."""
        ...

    def end(self) -> Future[None]:
        """The engine has submitted all layers. The future is done when all copies have ended, or failed: until then
        the buffers are being written, whoever has given up on them."""
        ...

    def free(self) -> None:
        """Have what the engine submits next wait until the pages have been read, so that it may overwrite them."""
        ...

    def close(self) -> None:
        """Nobody asks any more. Copies go on."""
        ...


class DeviceRoom(Protocol):
    """Memory of the device that bytes are read into which are copied to the engine from there."""

    @property
    def address(self) -> int:
        """As the device knows it."""
        ...

    @property
    def memory(self) -> memoryview:
        """The same as a buffer of copies. It is never looked at on the host, which may not be able to."""
        ...

    def close(self) -> None:
        """Give it back. Nothing reads or writes it any more.

        Raises:
            LMCacheError: The device failed.
        """
        ...


@runtime_checkable
class DeviceRooms(Protocol):
    """What a transfer has beside that whose device other than it can write to. From any thread."""

    def room(self, nbytes: int) -> DeviceRoom:
        """Memory of the device.

        Raises:
            LMCacheError: There is not so much.
        """
        ...

    def copy_back(self, address: int, into: memoryview) -> None:
        """Copy the device's memory to the host's, and wait for that.

        Raises:
            LMCacheError: The device failed.
        """
        ...


@runtime_checkable
class StreamingTransfer(Protocol):
    """What such a transfer has beside `register`. From any thread but `close`."""

    def pin(self, memory: memoryview) -> None:
        """Have the device copy from and to this memory of the host by itself, from some time on; it works, slower,
        before. It stays so until `close`."""
        ...

    def load(self, copies: Sequence[Copying], order: Sequence[Layer] = ()) -> LayerLoad:
        """Copy to the engine, after all that it has submitted. Layers come in this order; without one all of them come
        together, as the end of the whole."""
        ...

    def store(self, copies: Sequence[Copying]) -> LayerStore:
        """Copy from the engine, each layer when it is `computed`, or all at the end."""
        ...

    def moment(self) -> Future[float]:
        """When the device comes to here in what the engine submits, by `time.perf_counter`. Moments come in their
        order."""
        ...

    def close(self) -> None:
        """Wait for what is under way, and let go of the device."""
        ...
