"""The kernels on one device, behind typed functions."""

from __future__ import annotations

from lmcache_cuda.device import Device, Module, Stream
from lmcache_cuda.errors import GeometryError
from lmcache_cuda.geometry import WIDTHS, Call

__all__ = ["Kernels"]

THREADS = 512
WARPS = THREADS // 32


class Kernels:
    """Gather and scatter, loaded from what `compile_kernels` returns.

    Raises:
        DriverError: The device does not take them.
    """

    def __init__(self, device: Device, cubin: bytes) -> None:
        self._module = Module(device, cubin)
        names = [(verb, width) for verb in ("gather", "scatter") for width in WIDTHS]
        self._functions = {key: self._module.function(f"kv_{key[0]}_{key[1]}") for key in names}

    def gather(self, call: Call, stream: Stream, *, max_blocks: int) -> None:
        """Copy from the engine's memory to a chunk, with so many blocks of threads at most: on so many multiprocessors
        at most, the others are left to the engine."""
        self._launch("gather", call, stream, max_blocks)

    def scatter(self, call: Call, stream: Stream, *, max_blocks: int) -> None:
        """Copy from a chunk to the engine's memory."""
        self._launch("scatter", call, stream, max_blocks)

    def _launch(self, verb: str, call: Call, stream: Stream, max_blocks: int) -> None:
        if max_blocks < 1:
            raise GeometryError(f"at most {max_blocks} blocks for a kernel; one is needed")
        grid = min(max_blocks, -(-call.warps // WARPS))
        stream.launch(self._functions[verb, call.width], grid, THREADS, call.copy)

    def close(self) -> None:
        self._module.close()
