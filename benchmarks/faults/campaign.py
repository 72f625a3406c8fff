"""Runs of one fault: seeds, and what came out of them."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Campaign", "Fault", "Report", "Run", "until"]

STUCK = 300.0
"""Seconds without an end after which a run counts as a deadlock: all stacks are printed and the process ends."""


@dataclass
class Report:
    """Outcome of the runs of one fault."""

    fault: str
    runs: int = 0
    wrong: int = 0
    """Runs in which a byte differed, or something that was damaged was served."""
    lost: int = 0
    """Runs in which a call raised or was late, or something durable was gone, or a promise about files was broken."""
    recovered: int = 0
    """Runs after which the cache served again."""
    notes: list[str] = field(default_factory=list)
    """What went wrong, in words."""
    seen: Counter[str] = field(default_factory=Counter)
    """What happened besides, to show that something did."""
    figures: dict[str, float] = field(default_factory=dict)
    """What was measured: the largest of all runs."""

    @property
    def good(self) -> bool:
        return not self.wrong and not self.lost and self.recovered == self.runs

    def row(self) -> dict[str, Any]:
        """For `faults.json`."""
        counts = {name: getattr(self, name) for name in ("fault", "runs", "wrong", "lost", "recovered")}
        return counts | {name: round(value, 3) for name, value in self.figures.items()}


class Run:
    """One run. What happens inside of `with run:` is its; what it raises makes it lost."""

    def __init__(self, report: Report, number: int, seed: int, path: Path) -> None:
        self.number = number
        self.path = path
        """An empty directory of its own."""
        self.rng = random.Random(f"{seed} {report.fault} {number}")
        self.is_wrong = self.is_lost = self.is_recovered = False
        self._report = report

    def wrong(self, what: str) -> None:
        """A byte differed."""
        self.is_wrong = True
        self.note(f"wrong: {what}")

    def lost(self, what: str) -> None:
        """A promise was broken in another way."""
        self.is_lost = True
        self.note(f"lost: {what}")

    def recovered(self) -> None:
        """The cache serves again."""
        self.is_recovered = True

    def seen(self, what: str, number: int = 1) -> None:
        """Count something that happened."""
        self._report.seen[what] += number

    def figure(self, name: str, value: float) -> None:
        """Something that was measured."""
        self._report.figures[name] = max(value, self._report.figures.get(name, value))

    def note(self, text: str) -> None:
        """Say why something is as it is."""
        self._report.notes.append(f"{self._report.fault}, run {self.number}: {text}")

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            frame = traceback.extract_tb(trace)[-1]
            self.lost(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")
        report = self._report
        report.runs += 1
        report.wrong += self.is_wrong
        report.lost += self.is_lost
        report.recovered += self.is_recovered
        return isinstance(error, Exception)


@dataclass
class Campaign:
    """All runs of one fault. Iterate over it, and enter each run."""

    fault: str
    runs: int
    seed: int
    path: Path
    """An empty directory for all runs."""
    advance: Callable[[], None] = lambda: None
    """Called after each run."""

    def __post_init__(self) -> None:
        self.report = Report(self.fault)

    def __iter__(self) -> Iterator[Run]:
        for number in range(self.runs):
            path = self.path / f"run-{number}"
            path.mkdir()
            if "pytest" not in sys.modules:  # which has a watchdog of its own
                faulthandler.dump_traceback_later(STUCK, exit=True)
            yield Run(self.report, number, self.seed, path)
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(path, ignore_errors=True)
            self.advance()


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and how often it is injected at full size."""

    name: str
    runs: int
    inject: Callable[[Campaign], None]
    few: int
    """Runs that are enough for a test suite."""
    programs: tuple[str, ...] = ()
    """What must be installed."""
    root: bool = False
    """Whether it mounts."""
    seconds: float = 0.2
    """What a run takes, about."""

    def missing(self) -> str:
        """Why it cannot be injected here; empty if it can."""
        if self.root and os.geteuid():
            return "root is missing: this fault mounts"
        lacking = [name for name in self.programs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
        return f"{', '.join(lacking)} is not installed" if lacking else ""


def until(condition: Callable[[], object], seconds: float, pause: float = 0.005) -> bool:
    """Wait for something outside this process or thread; False if it has not come in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
