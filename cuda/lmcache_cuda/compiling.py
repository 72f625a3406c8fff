"""The kernels for one kind of GPU, compiled once a machine.

device = Device(Driver(), 0)
cubin = compile_kernels(device.capability, driver=device.driver.version)
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from lmcache_cuda.cubins import CubinCache, default_directory
from lmcache_cuda.nvrtc import find_compiler

__all__ = ["compile_kernels", "kernel_source"]

OPTIONS = ("--std=c++17",)
_NAME = "kernels.cu"


def kernel_source() -> str:
    return importlib.resources.files(__package__).joinpath(_NAME).read_text(encoding="utf-8")


def compile_kernels(
    capability: tuple[int, int], *, driver: tuple[int, int] | None = None, cache: Path | None = None
) -> bytes:
    """The cubin for GPUs of that compute capability, from `cache` (by default the user's own) or compiled.

    `driver` is the version of CUDA that the driver is for, where there is one: see `find_compiler`.

    Raises:
        UnavailableError: There is no compiler that can; the message says what to install.
        CompileError: It failed.
    """
    compiler, target = find_compiler(capability, driver=driver)
    source = kernel_source()
    kept = CubinCache(cache or default_directory())
    parts = (source, *OPTIONS, f"nvrtc {compiler.version[0]}.{compiler.version[1]}")
    cubin = kept.get(target, parts)
    if cubin is None:
        cubin = compiler.compile(source, _NAME, target, OPTIONS)
        kept.put(target, parts, cubin)
    return cubin
