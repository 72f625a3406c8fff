"""Transfers for an engine whose KV is on one of NVIDIA's GPUs: see `streams` and `cudadevice`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError, PluginError, TransferError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import Transfer
from lmcache_core.units import ByteSize, format_size
from lmcache_cuda.compiling import compile_kernels
from lmcache_cuda.device import Device
from lmcache_cuda.driver import Driver
from lmcache_cuda.errors import CudaError, UnavailableError
from lmcache_transfer.cudadevice import CudaDevice
from lmcache_transfer.streamed import StreamedTransfer, StreamOptions

__all__ = ["CudaOptions", "lmcache_create_transfer", "open_device"]

log = logging.getLogger(__name__)


class CudaOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the transfer `cuda`. A field's docstring is its documentation everywhere."""

    device: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of the GPU; by default the one that torch is on."""
    max_blocks: Annotated[int, msgspec.Meta(ge=1)] = 8
    """Multiprocessors that kernels which gather and scatter take at most; the others are the engine's."""
    direct: ByteSize = 256 << 10
    """KV that lies in runs of so many bytes is copied as it lies, without a kernel; 0 for never."""


@hookimpl
def lmcache_create_transfer(options: Mapping[str, Any]) -> Transfer:
    """Called once for each engine."""
    try:
        read = convert(dict(options), CudaOptions)
    except ConfigError as error:
        raise ConfigError(f"transfer cuda: {error}") from error
    read.check()
    device = open_device(read)
    log.info(
        "KV on GPU %d (%s) is copied on streams of its own, by kernels on at most %d multiprocessors; up to %s of its "
        "memory are for KV on its way",
        device.number,
        device.name,
        read.max_blocks,
        format_size(4 * read.staging),
    )
    return StreamedTransfer(device, read)


def open_device(options: CudaOptions) -> CudaDevice:
    """The GPU that the options name, with its kernels.

    Raises:
        PluginError: The driver or the compiler is missing, or too old; the message says how to get it.
        TransferError: The GPU can't be used.
    """
    number = _current() if options.device is None else options.device
    try:
        driver = Driver()
        device = Device(driver, number)
        cubin = compile_kernels(device.capability, driver=driver.version)
        return CudaDevice(device, cubin, number=number, max_blocks=options.max_blocks, direct=options.direct)
    except UnavailableError as error:
        raise PluginError(f"the transfer 'cuda' cannot be used: {error}") from error
    except CudaError as error:
        raise TransferError(f"the transfer 'cuda' cannot use GPU {number}: {error}") from error


def _current() -> int:
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0
