"""Everything that only a GPU can tell, in minutes: `make gpu-check`.

    python -m benchmarks.gpu [--device N] [--out gpu-check.json]

First what must hold: kernels against numpy on random layouts, copies beside an engine that computes on. Then what it
measures: latency and bandwidth of copies, the share of the link's rate, launches, kernels by multiprocessors, ways to
copy by the length of runs, and a prompt of 8,192 tokens in the shape of Llama-3-8B, stored and loaded whole and layer
by layer. Last, where KvikIO is installed, chunks between a drive and the GPU past host memory. Exits with 1 if anything
does not hold, with 2 if there is no GPU that can be used.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import checking, measuring, storage
from benchmarks.gpu.gpu import Gpu, line_rate, opened
from benchmarks.harness import Row
from lmcache_cuda.errors import CudaError

__all__ = ["carry_out", "main"]


def carry_out(gpu: Gpu, *, cases: int = 200, seeds: int = 50, scale: measuring.Scale | None = None) -> list[Row]:
    """Check, then measure. Prints as it goes.

    Raises:
        AssertionError: Something does not hold.
        CudaError: The GPU failed.
    """
    scale = scale or measuring.Scale()
    device = gpu.device
    version = ".".join(map(str, device.driver.version))
    print(
        f"{device.name}, sm_{device.capability[0]}{device.capability[1]}, {device.multiprocessors} multiprocessors, "
        f"driver for CUDA {version}; kernels compiled or found in {gpu.compiled:.2f} s"
    )
    started = time.perf_counter()
    launches = checking.check_kernels(gpu, cases)
    print(f"kernels: {launches} launches on random layouts, all bytes right ({time.perf_counter() - started:.1f} s)")
    started = time.perf_counter()
    compared = checking.check_pipeline(gpu, seeds)
    print(f"transfer: {compared} stores and loads beside an engine, all right ({time.perf_counter() - started:.1f} s)")
    line = line_rate(gpu.number)
    rows: list[Row] = []
    for found in (
        measuring.copies(gpu, scale, line),
        measuring.kernels(gpu, scale),
        measuring.runs(gpu, scale),
        measuring.prompt(gpu, scale),
    ):
        for row in found:
            rows.append(row)
            beside = "" if row.limit is None else f"  of {row.limit:9.2f}  {row.ratio:5.2f}"
            print(f"{row.name:32s} {row.value:10.2f} {row.unit:5s}{beside}", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    given = parser.parse_args(arguments)
    machine: dict[str, Any] = {"python": platform.python_version()}
    try:
        with opened(given.device) as gpu:
            machine["gpu"] = gpu.device.name
            rows = carry_out(gpu)
        rows += storage.carry_out("libcuda.so.1")
    except CudaError as error:
        print(f"no GPU can be checked: {error}", file=sys.stderr)
        return 2
    except AssertionError as wrong:
        print(f"WRONG: {wrong}", file=sys.stderr)
        return 1
    if given.out:
        given.out.write_text(json.dumps({"machine": machine, "rows": [row._asdict() for row in rows]}, indent=2) + "\n")
    return 0
