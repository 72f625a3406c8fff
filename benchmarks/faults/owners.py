"""Two processes on one path, one of them killed at a random moment: the other goes on, and the cap is for both."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from benchmarks.faults.campaign import Campaign, Fault, Run
from benchmarks.faults.child import Child, Job
from benchmarks.faults.crash import OVERHEAD, Ledger, disk_usage, hear, judge
from benchmarks.faults.engine import settings

__all__ = ["FAULTS"]

MIB = 1 << 20
LIFE = 0.8
ROOM = 1 << 14
LOOKS = 5


class Pair:
    """Two processes and what each of them has said."""

    def __init__(self, campaign: Campaign, capacity: int, pressure: bool, stack: ExitStack) -> None:
        self.path = campaign.path / "kv"
        self.capacity = capacity
        self.pressure = pressure
        self.config: dict[str, Any] = settings(self.path, capacity=capacity, cpu=MIB, segment=capacity // 32)
        self.ledgers = [Ledger(), Ledger()]
        self._seed = campaign.seed
        self._lives = 0
        self._stack = stack
        self.children = [stack.enter_context(Child()), stack.enter_context(Child())]
        self._spare = stack.enter_context(Child())

    def start(self, one: int, run: Run) -> None:
        """Let a process work; what it stored in its last life must be there, unless room was needed for others."""
        ledger = self.ledgers[one]
        expected = [] if self.pressure else ledger.recent(self.capacity)[:200] + ledger.sample(run)
        allowed = ledger.sample(run) if self.pressure else []
        pause = 0.0 if self.pressure else 0.02
        self._lives += 1
        child = self.children[one]
        where = (self.config, str(self.path), self._seed, self._lives * ROOM)
        child.start(Job(*where, expected, allowed, pause, alone=False))
        judge(child, run)
        ledger.latest.clear()

    def look(self, one: int, run: Run) -> None:
        """Whether a process that works still finds what it stored."""
        child, ledger = self.children[one], self.ledgers[one]
        nothing = (self.config, str(self.path), self._seed, 0)
        child.start(Job(*nothing, [], [], hold=True))
        judge(child, run)
        hear(child, ledger, run)
        held = self.held(child) if self.pressure else 4 * self.capacity
        # Who has just come has little room until the other one has given some back, and goes round and round in it.
        expected = ledger.recent(held // 4)[:100] if held > self.capacity // 4 else []
        child.start(Job(*nothing, expected, []))
        judge(child, run)
        if (used := disk_usage(self.path)) > self.capacity + 2 * OVERHEAD:
            run.lost(f"{used} bytes are taken, {self.capacity} may be")

    def held(self, child: Child) -> int:
        """Bytes that a process has taken: of what it stored last, a quarter of that must be there."""
        total = 0
        for lock in self.path.glob("*/lock"):
            with suppress(FileNotFoundError):  # it is being given back
                if lock.read_text().startswith(f"{child.process.pid}-"):
                    total += sum(segment.stat().st_size for segment in lock.parent.glob("segment-*"))
        return total

    def replace(self, one: int, run: Run) -> None:
        """Kill a process and let another one take its place."""
        self.children[one].kill()
        hear(self.children[one], self.ledgers[one], run)
        self.children[one], self._spare = self._spare, self._stack.enter_context(Child())


def kill_one_of_two(capacity: int, pressure: bool, campaign: Campaign) -> None:
    with ExitStack() as stack:
        pair = Pair(campaign, capacity, pressure, stack)
        first = True
        for run in campaign:
            with run:
                if first:
                    pair.start(0, run)
                    pair.start(1, run)
                    first = False
                killed = run.rng.randrange(2)
                time.sleep(run.rng.random() * LIFE)
                pair.replace(killed, run)
                for _ in range(LOOKS):
                    pair.look(1 - killed, run)
                    time.sleep(run.rng.random() * 0.1)
                pair.start(killed, run)
                pair.children[killed].wait_until_durable()
                pair.children[1 - killed].wait_until_durable()
                for one in (0, 1):
                    pair.look(one, run)
                run.recovered()


FAULTS = [
    Fault("two processes, one killed", 10, partial(kill_one_of_two, 4096 * MIB, False), few=2, seconds=3),
    Fault("two processes, while room is made", 10, partial(kill_one_of_two, 8 * MIB, True), few=2, seconds=3),
]
