"""How fast this is on this machine, beside what the machine can do: `make bench`.

    python -m benchmarks.run [--quick] [--only NAME]... [--out bench.json] [--directory DIR] [--lmcache-python PYTHON]

Each figure stands beside a limit that was measured in the same run, one right after the other and in turns, so that a
busy machine slows both. `ratio` is the median over rounds of one by the other (so it need not be `value / limit`, which
are medians themselves), and higher is better: where `limit` is the most that `value` may be, it is `limit / value`.
See docs/performance.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.calls import lookups_beside_a_busy_thread, overhead
from benchmarks.coding import ROWS as CODING_ROWS
from benchmarks.coding import coding
from benchmarks.disks import ROWS as DISK_ROWS
from benchmarks.disks import disk
from benchmarks.harness import FULL, QUICK, Row, Scale
from benchmarks.hashing import hashing
from benchmarks.memory import beside_a_busy_thread, quiet
from benchmarks.nodes import ROWS as NODE_ROWS
from benchmarks.nodes import node
from benchmarks.peers.lmcache import ROWS as LMCACHE_ROWS
from benchmarks.peers.lmcache import lmcache
from benchmarks.starts import imports, restart

__all__ = ["BARS", "measure"]

BARS = {
    "keys.list": 0.9,
    "keys.array": 0.9,
    "store.cpu.16": 0.75,
    "retrieve.cpu.16": 0.75,
    "store.cpu.64": 0.85,
    "retrieve.cpu.64": 0.85,
    "store.busy": 0.25,
    "retrieve.busy": 0.25,
    "overhead.lookup": 1.0,
    "overhead.store": 1.0,
    "overhead.retrieve": 1.0,
    "lookup.busy_p99_us": 1.0,
    "disk.write": 0.9,
    "disk.read": 0.9,
    "restart.first_hit_s": 1.0,
    "import_s": 1.0,
    "node.lookup.16": 1.0,
    "node.lookup.512": 1.0,
    "node.store.16": 0.7,
    "node.retrieve.16": 0.7,
    "node.store.64": 0.7,
    "node.retrieve.64": 0.7,
    "coding.encrypt.32": 0.25,
    "coding.decrypt.32": 0.25,
}
"""The ratio that a row should reach at least."""

NOTES = {
    "store.busy": "memcpy was measured without the busy thread",
    "retrieve.busy": "memcpy was measured without the busy thread",
    "overhead.store": "a chunk, evicting another",
    "disk.write": "O_DIRECT on both sides",
    "disk.read": "O_DIRECT on both sides",
    "disk.write.slots": "O_DIRECT on both sides; from the host pool",
    "disk.prefetch": "O_DIRECT on both sides; to the host pool",
    "lookup.busy_without_pause_p99_us": "the interpreter takes the GIL away in some calls",
    "node.lookup.16.lmcache": "hashing included",
    "node.lookup.512.lmcache": "hashing included",
    "node.retrieve.lmcache": "without the lookup that it needs",
}

SUITES: dict[Callable[[Scale], Iterator[Row]], Sequence[str]] = {
    imports: ["import_s", "import_s.cache"],
    hashing: ["keys.list", "keys.array"],
    overhead: [f"overhead.{verb}{hashed}" for hashed in ("", ".hashed") for verb in ("lookup", "store", "retrieve")],
    lookups_beside_a_busy_thread: [
        "lookup.busy_p99_us",
        "lookup.busy_median_us",
        "lookup.busy_without_pause_p99_us",
    ],
    quiet: ["store.cpu.16", "retrieve.cpu.16", "store.cpu.64", "retrieve.cpu.64"],
    beside_a_busy_thread: ["store.busy", "retrieve.busy"],
    coding: CODING_ROWS,
    disk: DISK_ROWS,
    restart: ["restart.first_hit_s"],
    node: NODE_ROWS,
    lmcache: LMCACHE_ROWS,
}
"""What is measured together, and the rows it gives."""


def measure(scale: Scale, only: Sequence[str] = ()) -> Iterator[Row]:
    """Rows whose names start with one of `only`; all if it is empty."""
    for suite, names in SUITES.items():
        if any(_wanted(name, only) for name in names):
            yield from (row for row in suite(scale) if _wanted(row.name, only))


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(name.startswith(start) for start in only)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the figures are less certain")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows whose names start like this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="a directory on the disk to measure")
    parser.add_argument(
        "--lmcache-python", type=Path, metavar="PYTHON", help="an interpreter that has LMCache: measure its server too"
    )
    given = parser.parse_args()
    wanted = [name for names in SUITES.values() for name in names if _wanted(name, given.only)]
    if not wanted:
        parser.error(f"no row starts with {' or '.join(given.only)}")
    if given.lmcache_python is None and set(wanted) <= set(LMCACHE_ROWS):
        parser.error(f"{' and '.join(wanted)}: only with --lmcache-python")
    if given.lmcache_python is not None and shutil.which(given.lmcache_python) is None:
        parser.error(f"--lmcache-python: {given.lmcache_python} is no program")
    machine = _machine()
    print(", ".join(f"{value}" for value in machine.values()), flush=True)
    print(f"{'':34s}{'value':>10s}  {'unit':8s}{'limit':>10s}{'ratio':>8s}{'bar':>7s}")
    rows = []
    places = {"directory": given.directory, "lmcache_python": given.lmcache_python}
    for row in measure(dataclasses.replace(QUICK if given.quick else FULL, **places), given.only):
        rows.append(row)
        print(_line(row), flush=True)
    short = [row.name for row in rows if _is_short(row)]
    print(f"short of their bars: {', '.join(short)}" if short else "all reach their bars")
    if given.out:
        result = {"machine": machine, "rows": [row._asdict() for row in rows], "short": short}
        given.out.write_text(json.dumps(result, indent=2) + "\n")


def _is_short(row: Row) -> bool:
    return row.ratio is not None and row.ratio < BARS.get(row.name, 0.0)


def _line(row: Row) -> str:
    limit = "" if row.limit is None else f"{row.limit:.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    bar = f"{BARS[row.name]:.2f}" if row.name in BARS else ""
    figures = f"{row.name:34s}{row.value:10.4g}  {row.unit:8s}{limit:>10s}{ratio:>8s}{bar:>7s}"
    remarks = [*["short"] * _is_short(row), *([NOTES[row.name]] if row.name in NOTES else [])]
    return f"{figures}  {'; '.join(remarks)}".rstrip()


def _machine() -> dict[str, str]:
    return {
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}",
        "cpus": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "program": " ".join(sys.argv[1:]) or "all rows",
    }


if __name__ == "__main__":
    main()
