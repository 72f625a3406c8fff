"""`kill -9` while it stores, again and again on one directory: what was reported durable comes back."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Campaign, Fault, Run
from benchmarks.faults.child import Child, Job
from benchmarks.faults.engine import CHUNK_PAGES, Prompt, frame_shape, settings

__all__ = ["FAULTS", "OVERHEAD", "Ledger", "disk_usage", "hear", "judge"]

MIB = 1 << 20
SAMPLE = 150
"""Prompts that are read after each restart, besides the new ones."""
LIFE = 0.6
"""Seconds that a child lives at most once it stores."""
OVERHEAD = 2 * MIB
"""What logs, locks and descriptions may take besides the capacity."""
ROOM = 1 << 10
"""Prompts of one child."""

Pairs = list[tuple[int, int]]


@dataclass
class Ledger:
    """What children said is durable."""

    pages: dict[int, int] = field(default_factory=dict)
    """For each prompt its pages."""
    latest: list[Prompt] = field(default_factory=list)
    """What the last child stored or tried to, in order."""

    def note(self, prompt: Prompt, durable: bool) -> None:
        if durable:
            self.pages[prompt.number] = max(prompt.pages, self.pages.get(prompt.number, 0))
        self.latest.append(prompt)

    def recent(self, nbytes: int) -> Pairs:
        """The prompts of the last child that were stored last and are durable, among those that take so many bytes in
        all."""
        sizes: dict[int, int] = {}
        for prompt in self.latest:
            sizes[prompt.number] = max(nbytes_of(prompt), sizes.get(prompt.number, 0))
        found: dict[int, int] = {}
        for number in dict.fromkeys(prompt.number for prompt in reversed(self.latest)):
            nbytes -= sizes[number]
            if nbytes < 0:
                break
            if number in self.pages:
                found[number] = self.pages[number]
        return list(found.items())

    def sample(self, run: Run) -> Pairs:
        known = sorted(self.pages.items())
        return run.rng.sample(known, min(SAMPLE, len(known)))


def nbytes_of(prompt: Prompt) -> int:
    """Bytes of its frames."""
    starts = range(0, prompt.pages, CHUNK_PAGES)
    return sum(frame_shape(min(CHUNK_PAGES, prompt.pages - first)).nbytes for first in starts)


def hear(child: Child, ledger: Ledger, run: Run) -> None:
    """Take down what a child has said."""
    for line in child.said:
        match line.split():
            case [("+" | "-") as durable, number, pages]:
                ledger.note(Prompt(int(number), int(pages)), durable == "+")
                run.seen("durable" if durable == "+" else "not stored")
            case ["=", what, number]:
                run.seen(what, int(number))
            case ["!", *_]:
                run.wrong(line)
            case ["?", *_]:
                run.lost(line)
    child.said.clear()


def judge(child: Child, run: Run) -> None:
    """Wait for what a child found when it opened the cache."""
    answer = child.answer()
    for text in answer.wrong:
        run.wrong(text)
    for text in answer.lost:
        run.lost(text)
    if answer.misplaced:
        run.lost(f"files that nothing needs: {', '.join(answer.misplaced)}")
    run.seen("hits after a restart", answer.hits)


def disk_usage(path: Path) -> int:
    """Bytes that the files below a path take; others may be making and removing some."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_blocks * 512
    return total


class Kills:
    """One directory over many lives. With `pressure` its capacity makes room all the time."""

    def __init__(self, campaign: Campaign, capacity: int, pressure: bool) -> None:
        self.path = campaign.path / "kv"
        self.capacity = capacity
        self.pressure = pressure
        self.ledger = Ledger()
        self.config: dict[str, Any] = settings(self.path, capacity=capacity, cpu=MIB, segment=capacity // 16)
        self._seed = campaign.seed
        self._lives = 0
        self._spare = Child()

    def child(self, run: Run, expected: Pairs, allowed: Pairs) -> Child:
        """The next child, at work."""
        self._lives += 1
        child, self._spare = self._spare, Child()
        child.start(Job(self.config, str(self.path), self._seed, self._lives * ROOM, expected, allowed))
        return child

    def expected(self, run: Run, before: set[int], last: bool) -> Pairs:
        """What must be there after a kill: everything, or with pressure what was stored last."""
        if self.pressure:
            return self.ledger.recent(self.capacity // 2)
        known = sorted(self.ledger.pages.items())
        return known if last else [pair for pair in known if pair[0] not in before] + self.ledger.sample(run)

    def one(self, run: Run, last: bool) -> None:
        """Store, kill, perhaps kill again while the next one starts, and look what is there."""
        before = set(self.ledger.pages)
        self.ledger.latest.clear()
        with self.child(run, [], []) as child:
            judge(child, run)
            time.sleep(run.rng.random() * LIFE)
            child.kill()
            hear(child, self.ledger, run)
        expected = self.expected(run, before, last)
        for _ in range(run.rng.choice([0, 1, 2])):
            with self.child(run, expected, []) as child:
                time.sleep(run.rng.random() * 0.05)
                child.kill()
                hear(child, Ledger(), run)
                run.seen("kills at start")
        if (used := disk_usage(self.path)) > self.capacity + OVERHEAD:
            run.lost(f"{used} bytes are taken, {self.capacity} may be")
        with self.child(run, expected, self.ledger.sample(run)) as child:
            judge(child, run)
            child.wait_until_durable()
            run.recovered()
            child.kill()
            hear(child, self.ledger, run)

    def close(self) -> None:
        self._spare.kill()


def kill_again_and_again(capacity: int, pressure: bool, campaign: Campaign) -> None:
    kills = Kills(campaign, capacity, pressure)
    try:
        for run in campaign:
            with run:
                kills.one(run, last=run.number == campaign.runs - 1)
    finally:
        kills.close()


FAULTS = [
    Fault("kill -9, all durable chunks", 50, partial(kill_again_and_again, 512 * MIB, False), few=3, seconds=2),
    Fault("kill -9, while room is made", 50, partial(kill_again_and_again, 4 * MIB, True), few=3, seconds=2),
]
