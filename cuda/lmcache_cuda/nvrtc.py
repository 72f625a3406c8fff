"""NVRTC, the compiler that NVIDIA ships as a library: finding it, and turning source into a cubin.

It needs neither a GPU nor a driver, and compiles for GPUs that are not there. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_cuda.errors import CompileError, UnavailableError

__all__ = ["INSTALL", "Nvrtc", "candidates", "find_compiler", "target_of"]

INSTALL = "pip install 'lmcache-core[cuda]'"
OLDEST = (12, 0)
MAX_CUBIN = 16 << 20
MAX_LOG = 1 << 20
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")


class Nvrtc:
    """One compiler.

    Raises:
        UnavailableError: It cannot be loaded.
    """

    def __init__(self, library: str) -> None:
        self.path = library
        try:
            self._library = ctypes.CDLL(library)
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
            # That of CUDA 13's wheel does not look beside itself for its other half; one that is loaded it finds.
            builtins = Path(library).with_name(f"libnvrtc-builtins.so.{major.value}.{minor.value}")
            self._builtins = ctypes.CDLL(str(builtins)) if os.sep in library and builtins.exists() else None
        except (OSError, AttributeError) as failure:
            raise UnavailableError(f"the compiler {library} cannot be loaded: {failure}") from failure
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """What it compiles for, as 10 * major + minor."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        if not 0 < count.value < 1000:
            raise CompileError(f"{self.path} says that it compiles for {count.value} architectures")
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        return sorted(known)

    def compile(self, source: str, name: str, target: str, options: Sequence[str] = ()) -> bytes:
        """Compile for one architecture, such as 'sm_90', to a cubin.

        Raises:
            CompileError: The source or an option is wrong, or this compiler does not know the architecture.
        """
        program = ctypes.c_void_p()
        text = source.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name.encode(), 0, None, None)
        try:
            flags = [f"--gpu-architecture={target}".encode(), *(option.encode() for option in options)]
            code = self._library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            if code:
                log = self._fetch(program, "nvrtcGetProgramLog", MAX_LOG).rstrip(b"\0").decode(errors="replace")
                raise CompileError(f"{name} does not compile for {target} with {self}: {log.strip() or code}")
            return self._fetch(program, "nvrtcGetCUBIN", MAX_CUBIN)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str, limit: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        if size.value > limit:
            raise CompileError(f"{what} of {self} is {size.value} B; at most {limit} are taken")
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(what, program, buffer)
        return buffer.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise CompileError(f"{name} of {self.path} failed with {code}: {(describe(code) or b'?').decode()}")

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"


def candidates() -> Iterator[str]:
    """Where a compiler may be: in wheels of NVIDIA, in a CUDA toolkit, where the loader looks. Newest first."""
    found: list[tuple[int, str]] = []
    spec = importlib.util.find_spec("nvidia")  # a namespace, so nothing is imported by this
    roots = (spec.submodule_search_locations or ()) if spec else ()
    places = [place for root in roots for place in Path(root).glob("*/lib")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            places.append(Path(root) / "lib64")
    places.append(Path("/usr/local/cuda/lib64"))
    for place in places:
        for file in sorted(place.glob("libnvrtc.so.*")):
            if match := _LIBRARY.fullmatch(file.name):
                found.append((int(match[1]), str(file)))
    yield from (path for _, path in sorted(found, key=lambda each: -each[0]))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")


def find_compiler(capability: tuple[int, int], *, driver: tuple[int, int] | None = None) -> tuple[Nvrtc, str]:
    """Find a compiler for GPUs of that compute capability, and the architecture to compile for.

    With `driver`, the CUDA version that the driver is for, a compiler of a later major version is passed over: the
    driver would not load what it makes.

    Raises:
        UnavailableError: There is none; the message says what was tried, and what to install.
    """
    tried = []
    for path in candidates():
        try:
            compiler = Nvrtc(path)
        except UnavailableError:
            if os.sep in path:
                tried.append(f"{path} cannot be loaded")
            continue
        if compiler.version < OLDEST:
            tried.append(f"{compiler} is older than {OLDEST[0]}.{OLDEST[1]}")
        elif driver and compiler.version[0] > driver[0]:
            tried.append(f"{compiler} is too new for a driver for CUDA {driver[0]}.{driver[1]}")
        elif (target := target_of(capability, compiler.architectures())) is None:
            tried.append(f"{compiler} does not know GPUs of compute capability {capability[0]}.{capability[1]}")
        else:
            return compiler, target
    raise UnavailableError(
        f"no compiler for GPUs of compute capability {capability[0]}.{capability[1]}: "
        f"{'; '.join(tried) or 'NVRTC is not on this machine'}; install one with {INSTALL}"
    )


def target_of(capability: tuple[int, int], known: Sequence[int]) -> str | None:
    """The architecture to compile for: the GPU's own, else the nearest that it runs, of the same major number."""
    major, minor = capability
    fitting = [number for number in known if number // 10 == major and number % 10 <= minor]
    return f"sm_{max(fitting)}" if fitting else None
