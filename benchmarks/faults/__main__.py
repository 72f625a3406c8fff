"""`python -m benchmarks.faults`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.faults import crash, frames, logs, media, owners, power, remote, service, stress
from benchmarks.faults.campaign import Campaign, Fault, Report

FAULTS: list[Fault] = [
    *frames.FAULTS,
    *logs.FAULTS,
    *crash.FAULTS,
    *owners.FAULTS,
    *power.FAULTS,
    *media.FAULTS,
    *service.FAULTS,
    *remote.FAULTS,
    *stress.FAULTS,
]

ROOT = Path(__file__).parents[2]
SHOWN = 20


def main() -> int:
    given = arguments()
    console = Console()
    chosen = [fault for fault in FAULTS if not given.only or any(name in fault.name for name in given.only)]
    if not chosen:
        console.print(f"no fault is called {', '.join(given.only)}; there are: {'; '.join(f.name for f in FAULTS)}")
        return 2
    logging.getLogger("lmcache_core").setLevel(logging.CRITICAL)  # faults are logged, and here there are many
    console.print(f"seed {given.seed}; repeat with: python -m benchmarks.faults --seed {given.seed} --only '...'")
    reports: list[Report] = []
    skipped: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for fault in chosen:
            if reason := fault.missing():
                skipped.append(f"skipped: {fault.name}: {reason}")
                continue
            runs = max(1, round(fault.runs * given.scale))
            reports.append(inject(fault, runs, given.seed, progress))
            if not console.is_terminal:
                console.print(" ".join(f"{name}={value}" for name, value in reports[-1].row().items()))
    console.print(table(reports))
    for line in skipped:
        console.print(line)
    for note in [note for report in reports for note in report.notes][:SHOWN]:
        console.print(note, markup=False, highlight=False)
    given.out.write_text(json.dumps([report.row() for report in reports], indent=2) + "\n")
    return 0 if all(report.good for report in reports) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description="Fault injection.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only faults whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the runs of a full size; default: 1")
    parser.add_argument("--seed", type=int, default=1, help="where and how faults strike; default: 1")
    parser.add_argument("--out", type=Path, default=ROOT / "faults.json", help="default: faults.json of the repository")
    return parser.parse_args()


def inject(fault: Fault, runs: int, seed: int, progress: Progress) -> Report:
    task = progress.add_task(fault.name, total=runs)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as path:
        campaign = Campaign(fault.name, runs, seed, Path(path), lambda: progress.advance(task))
        fault.inject(campaign)
    return campaign.report


def table(reports: list[Report]) -> Table:
    made = Table("fault", "runs", "wrong", "lost", "recovered", "seen")
    for report in reports:
        seen = ", ".join(f"{name}: {number}" for name, number in report.seen.items())
        style = "" if report.good else "red"
        figures = ", ".join(f"{name} {value:.3g}" for name, value in report.figures.items())
        counts = (report.fault, report.runs, report.wrong, report.lost, report.recovered)
        made.add_row(*map(str, counts), "; ".join(filter(None, (seen, figures))), style=style)
    for column in made.columns[1:5]:
        column.justify = "right"
    return made


if __name__ == "__main__":
    sys.exit(main())
