"""The kernels, built for the host, and how they are checked. As a program: check libraries."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lmcache_cuda.geometry import Call
from tests.cuda.engines import Case, case

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "cuda/lmcache_cuda/kernels.cu"
COMPILER = shutil.which("g++")
WITHOUT_COMPILER = "g++ is missing: the kernels are not built for the host"
GRIDS = [(1, 32), (3, 64), (2, 128), (7, 1024)]


def build(library: Path, *options: str, source: str | None = None, also: Iterable[Path] = ()) -> None:
    """Build `source`, or the kernels as they are, into `library`."""
    assert COMPILER is not None, WITHOUT_COMPILER
    unit = library.with_suffix(".cc")
    parts = [HERE / "shim.h", SOURCE, HERE / "launchers.h", *also]
    unit.write_text("\n".join(source if part is SOURCE and source else f'#include "{part}"' for part in parts) + "\n")
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    made = subprocess.run(
        [COMPILER, "-std=c++17", "-O1", *warnings, *options, "-shared", "-fPIC", "-o", str(library), str(unit)],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr


class HostKernels:
    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.argument_bytes: int = self._library.kv_copy_bytes()
        self._library.kv_field.restype = ctypes.c_char_p

    @property
    def argument_fields(self) -> dict[str, int]:
        """Where each field of the argument lies for the compiler."""
        offset = ctypes.c_uint()
        fields: dict[str, int] = {}
        while (name := self._library.kv_field(len(fields), ctypes.byref(offset))) is not None:
            fields[name.decode()] = offset.value
        return fields

    def launch(self, direction: str, call: Call, grid: int, block: int) -> None:
        getattr(self._library, f"walk_kv_{direction}_{call.width}")(grid, block, ctypes.byref(call.copy))


def check(kernels: HostKernels, one: Case, grid: tuple[int, int]) -> int:
    """Gather and scatter, each compared byte by byte, memory and chunk alike. Returns the width of an access."""
    table = np.zeros(len(one.planes), np.uint64)
    call = one.call(table)
    for direction in ("gather", "scatter"):
        chunk, memory = one.expected(gather=direction == "gather")
        kernels.launch(direction, call, *grid)
        where = f"{direction}, grid {grid}, width {call.width}, {one.name}"
        np.testing.assert_array_equal(one.chunk, chunk, err_msg=f"chunk after {where}")
        for place, expected in zip(one.memory, memory, strict=True):
            np.testing.assert_array_equal(place, expected, err_msg=f"memory after {where}")
        # Other bytes for the way back, or a scatter that does nothing would pass.
        one.chunk[:] = one.chunk[::-1] ^ 0x5A
    return call.width


def verdict(library: Path, cases: list[Case]) -> int:
    """How a process of its own ends that checks a library: a mistake in it may run for ever, or end the process. What
    it says goes to a file beside the library."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.dup2(os.open(library.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        signal.alarm(60)
        kernels = HostKernels(library)
        for place, one in enumerate(cases):
            check(kernels, one, GRIDS[place % len(GRIDS)])
        code = 0
    except Exception:  # noqa: BLE001 - whatever it is, it goes to whoever reads the file
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    drawn = [case(seed) for seed in range(int(sys.argv[1]))]
    print(json.dumps([verdict(Path(library), drawn) for library in sys.argv[2:]]))
