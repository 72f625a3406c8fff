"""Measure the tiers that hosts share, each beside the limit of its medium and beside other clients, in one run.

    python -m benchmarks.remote [--quick] [--only NAME ...] [--out bench-remote.json]

Rows `redis.get.8` are ours in GB/s, for values of 8 MiB, with what plain sockets or files reach as the limit; rows
`peer.*` are other clients in the same run, with ours as what they are compared with; `.cpu` are CPU seconds per GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness import FULL, QUICK, Row, Scale
from benchmarks.remote import nfs, redis, s3

BAR = 0.9
"""What part of the limit ours should reach; of S3, what part of the fastest other client."""
SUITES: dict[Callable[[Scale], Iterator[Row]], Sequence[str]] = {
    redis.redis_rows: redis.ROWS,
    s3.s3_rows: s3.ROWS,
    nfs.nfs_rows: nfs.ROWS,
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the figures are less certain")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="tiers whose names start like this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--lmcache-python", type=Path, metavar="PYTHON", help="an interpreter that has LMCache")
    given = parser.parse_args()
    scale = dataclasses.replace(QUICK if given.quick else FULL, lmcache_python=given.lmcache_python)
    machine = {
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}",
        "cpus": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "program": " ".join(sys.argv[1:]) or "all rows",
    }
    print(", ".join(machine.values()), flush=True)
    print(f"{'':44s}{'value':>9s}  {'unit':9s}{'beside':>9s}{'ratio':>7s}")
    rows: list[Row] = []
    for suite, names in SUITES.items():
        if not given.only or any(name.startswith(start) for name in names for start in given.only):
            for row in suite(scale):
                rows.append(row)
                print(line(row), flush=True)
    short = [row.name for row in rows if falls_short(row, rows)]
    print(f"short of {BAR}: {', '.join(short)}" if short else f"all reach {BAR} of what they are compared with")
    if given.out:
        result = {"machine": machine, "rows": [row._asdict() for row in rows], "short": short}
        given.out.write_text(json.dumps(result, indent=2) + "\n")


def falls_short(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row of ours is too far from what it is compared with."""
    if row.ratio is None or row.name.startswith("peer."):
        return False
    if row.name.startswith("s3."):
        return any(each.ratio is not None and each.ratio > 1 / BAR for each in rows if f"peer.{row.name}." in each.name)
    return row.ratio < BAR


def line(row: Row) -> str:
    beside = "" if row.limit is None else f"{row.limit:.3f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"{row.name:44s}{row.value:9.3f}  {row.unit:9s}{beside:>9s}{ratio:>7s}".rstrip()


if __name__ == "__main__":
    main()
