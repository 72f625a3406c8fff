"""The driver's interface (libcuda), by ctypes: every call that is used here, checked.

Nothing is loaded before a `Driver` is made, nothing is built, and no version of torch or of CUDA's runtime is asked
for: the driver is on every machine that has a GPU to use, and its interface stays.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from lmcache_cuda.errors import DriverError, UnavailableError

__all__ = ["NOT_READY", "Attributes", "Driver"]

LIBRARY = "libcuda.so.1"
OLDEST = (12, 0)
NOT_READY = 600
_BATCHES_SINCE = (12, 8)

_int, _size, _address, _handle = POINTER(c_int), POINTER(c_size_t), c_uint64, c_void_p
_made = POINTER(c_void_p)

CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_int,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, _made, c_int, c_uint64, _int),
    "cuDeviceGetCount": (_int,),
    "cuDeviceGet": (_int, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_made, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuModuleLoadData": (_made, c_char_p),
    "cuModuleUnload": (_handle,),
    "cuModuleGetFunction": (_made, _handle, c_char_p),
    "cuStreamCreateWithPriority": (_made, c_uint, c_int),
    "cuStreamDestroy_v2": (_handle,),
    "cuStreamSynchronize": (_handle,),
    "cuCtxGetStreamPriorityRange": (_int, _int),
    "cuEventCreate": (_made, c_uint),
    "cuEventDestroy_v2": (_handle,),
    "cuEventSynchronize": (_handle,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (_address,),
    "cuMemcpyAsync": (_address, _address, c_size_t, _handle),
    "cuMemHostRegister_v2": (_address, c_size_t, c_uint),
    "cuMemHostUnregister": (_address,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), _address, c_uint),
}
"""Calls that may wait let go of the GIL. Copies do: those of memory that is not registered wait for the device."""

BRIEF_CALLS: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (_made,),
    "cuLaunchKernel": (_handle, *[c_uint] * 7, _handle, POINTER(c_void_p), POINTER(c_void_p)),
    "cuStreamQuery": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, c_uint),
    "cuEventRecord": (_handle, _handle),
    "cuEventQuery": (_handle,),
}
"""Calls of microseconds keep the GIL: beside a busy Python thread, getting it back can take 5 ms. They wait for the
device only where very much is queued already, so whoever calls bounds what it queues."""

_LOST = "nothing in this process can use the GPU any more: end it"
ADVICE = {
    2: "leave the engine less memory, or this layer smaller buffers",
    34: "this libcuda is the stub for building: install the driver, or take the stub from LD_LIBRARY_PATH",
    46: "another process has the device for itself (nvidia-smi -c)",
    100: "no GPU can be used: see nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus",
    101: "see nvidia-smi and CUDA_VISIBLE_DEVICES for the devices that there are",
    200: "the compiled kernels are damaged: delete their cache",
    209: "the kernels were compiled for another kind of GPU",
    222: "the kernels were compiled by a newer CUDA than the driver is for: update the driver",
    700: _LOST,
    712: "this memory is registered already",
    713: "this memory is not registered",
    719: _LOST,
    800: "the process may not; pinning is limited by ulimit -l",
    803: "the driver was updated while in use, or parts of two versions are installed: reboot, or install one of them",
    804: "CUDA's forward compatibility is not for this GPU: take cuda-compat from LD_LIBRARY_PATH",
}


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_order", c_int),
        ("source_kind", c_int),
        ("source_place", c_int),
        ("target_kind", c_int),
        ("target_place", c_int),
        ("flags", c_uint),
    )


_BATCH = ctypes.CFUNCTYPE(
    c_int,
    *[POINTER(c_uint64)] * 2,
    _size,
    c_size_t,
    POINTER(Attributes),
    _size,
    c_size_t,
    _size,
    c_void_p,
)


class Driver:
    """The driver of this machine, initialised.

    Raises:
        UnavailableError: There is none, or it is too old.
        DriverError: It cannot be initialised.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        try:
            waiting, brief = ctypes.CDLL(library), ctypes.PyDLL(library)
        except OSError as failure:
            raise UnavailableError(
                f"NVIDIA's driver is not on this machine ({failure}); install it, or start the container with --gpus"
            ) from failure
        self._functions: dict[str, Any] = {}
        lacking = []
        for calls, loaded in ((CALLS, waiting), (BRIEF_CALLS, brief)):
            for name, types in calls.items():
                function = getattr(loaded, name, None)
                if function is None:
                    lacking.append(name)
                    continue
                function.argtypes, function.restype = types, c_int
                self._functions[name] = function
        if lacking:
            raise self._too_old(f"has no {lacking[0]}")
        version = c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)
        """The version of CUDA that it is for."""
        if self.version < OLDEST:
            raise self._too_old(f"is for CUDA {self.version[0]}.{self.version[1]}")
        self.call("cuInit", 0)
        self.batch = self._batch()
        """`cuMemcpyBatchAsync`, where the driver has it."""

    def _too_old(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"NVIDIA's driver {self._library} {what}; one for CUDA {OLDEST[0]}.{OLDEST[1]} or later is needed: "
            "update the driver to 525 or later"
        )

    def _batch(self) -> Any | None:
        # Its arguments have changed since, so it is asked for as it was when it came.
        if self.version < _BATCHES_SINCE:
            return None
        found, state = c_void_p(), c_int()
        version = _BATCHES_SINCE[0] * 1000 + _BATCHES_SINCE[1] * 10
        code = self._functions["cuGetProcAddress_v2"](
            b"cuMemcpyBatchAsync", ctypes.byref(found), version, 0, ctypes.byref(state)
        )
        return _BATCH(found.value) if code == 0 and found.value else None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DriverError: It failed.
        """
        self.check(name, self._functions[name](*arguments))

    def ready(self, name: str, *arguments: Any) -> bool:
        """Call a function that asks whether something has happened.

        Raises:
            DriverError: It failed, or what it asks about has.
        """
        code = self._functions[name](*arguments)
        if code == NOT_READY:
            return False
        self.check(name, code)
        return True

    def check(self, what: str, code: int) -> None:
        """See that a call has worked.

        Raises:
            DriverError: It has not.
        """
        if code == 0:
            return
        name, text = c_char_p(), c_char_p()
        self._functions["cuGetErrorName"](code, ctypes.byref(name))
        self._functions["cuGetErrorString"](code, ctypes.byref(text))
        known = (name.value or b"an error that this driver does not know").decode(errors="replace")
        said = f": {text.value.decode(errors='replace')}" if text.value else ""
        advice = f"; {ADVICE[code]}" if code in ADVICE else ""
        raise DriverError(f"{what} failed with {known} ({code}){said}{advice}", code)
