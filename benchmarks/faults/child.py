"""A process that stores without end and says what is durable, so that it can be killed at any moment.

    python -m benchmarks.faults.child

Reads lines, each a `Job` as JSON. With the first it opens the cache; each one it answers with a line of JSON that says
whether it found what the job expects. From the first answer on it stores until it dies, and writes a line for each
thing that happens: `+ number pages` for what is durable from now on, `- number pages` for what could not be stored
(a part of it may have been), `! text` for what is wrong, `? text` for what is lost, `= text number` for what
happened so often besides.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.faults.campaign import Report, Run
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace
from benchmarks.faults.processes import Aloud, Talking, say
from lmcache_backends.disk import log
from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache

__all__ = ["Answer", "Child", "Job"]

THREADS = 3
RECENT = 12
"""Prompts that a thread goes on to use."""


class Job(msgspec.Struct):
    """What a child is to do."""

    config: dict[str, Any]
    path: str
    seed: int
    first: int
    """Number of its first prompt; others have none behind it."""
    expected: list[tuple[int, int]]
    """Prompts that must come back: number and pages."""
    allowed: list[tuple[int, int]]
    """Prompts that may."""
    pause: float = 0.0
    """Seconds between two stores of a thread."""
    hold: bool = False
    """Store nothing between this answer and the next."""
    alone: bool = True
    """Nobody else uses the path, so that all files can be accounted for."""


class Answer(msgspec.Struct):
    """What a child found when it had opened the cache."""

    hits: int
    lost: list[str]
    wrong: list[str]
    misplaced: list[str]
    """Files that nothing needs."""


class Child(Talking):
    """The process, from outside. It waits for its job from the start, so that it is there at once when needed."""

    def __init__(self) -> None:
        super().__init__("-m", "benchmarks.faults.child")

    def start(self, job: Job) -> None:
        self.tell(msgspec.json.encode(job))

    def answer(self) -> Answer:
        """What it found. Raises as `hear_until` does."""
        return msgspec.json.decode(self.said.pop(self.hear_until("{")), type=Answer)

    def wait_until_durable(self) -> None:
        """Raises as `hear_until` does, if nothing becomes durable."""
        self.hear_until("+")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.kill()


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    log._FLOOR = 16 << 10  # rewrite the log often
    aloud = Aloud(Report("child"), 0, job.seed, Path(job.path))
    with Cache.open(job.config, namespace()) as cache:
        cache.flush(10)
        misplaced = [str(file) for file in files_nothing_needs(Path(job.path))] if job.alone else []
        say(msgspec.json.encode(check(cache, job, misplaced)).decode())
        turns = [threading.Lock() for _ in range(THREADS)]
        for thread, turn in enumerate(turns):
            threading.Thread(target=work, args=(Engine(cache, aloud), job, thread, turn), daemon=True).start()
        held = False
        for line in sys.stdin:
            asked = msgspec.json.decode(line, type=Job)
            for turn in turns * (not held):
                turn.acquire()
            say(msgspec.json.encode(check(cache, asked, [])).decode())
            held = asked.hold
            for turn in turns * (not held):
                turn.release()
        os._exit(0)  # the parent has gone


def check(cache: Cache, job: Job, misplaced: list[str]) -> Answer:
    report = Report("child")
    engine = Engine(cache, Run(report, 0, job.seed, Path(job.path)))
    hits = 0
    for prompt in [Prompt(*pair) for pair in job.expected]:
        hits += engine.expect(prompt)
    for prompt in [Prompt(*pair) for pair in job.allowed]:
        hits += engine.retrieve(prompt) > 0
    wrong = [note for note in report.notes if "wrong: " in note]
    return Answer(hits, [note for note in report.notes if note not in wrong], wrong, misplaced)


def files_nothing_needs(path: Path) -> list[Path]:
    """Below a cache that is open in this process only and has nothing to do."""
    needed = {entry.file for entry in inspect_path(path).entries()}
    needed |= {path / "node.lock", *path.glob("manifests/*.json"), *path.glob("*/lock"), *path.glob("*/log")}
    return sorted(file for file in path.rglob("*") if file.is_file() and file not in needed)


def work(engine: Engine, job: Job, thread: int, turn: threading.Lock) -> None:
    """Conversations: prompts that grow, are used again, and end somewhere inside of a chunk."""
    rng = random.Random(f"{job.seed} {job.first} {thread}")
    number = job.first + thread
    recent: deque[Prompt] = deque(maxlen=RECENT)
    counted = {"compactions": 0, "evicted": 0}
    for round_ in range(1 << 30):
        time.sleep(job.pause)
        if not recent or rng.random() < 0.5:
            prompt = Prompt(number, rng.randint(1, 3 * CHUNK_PAGES))
            number += THREADS
        else:
            prompt = rng.choice(recent)
            prompt = prompt._replace(pages=prompt.pages + rng.randint(0, CHUNK_PAGES))
        with turn:
            use(rng, engine, prompt, recent)
        if round_ % 50 == 49 and not thread:
            totals = {"compactions": engine.tier().counters["compactions"], "evicted": engine.count("evicted_chunks")}
            for name, total in totals.items():
                say(f"= {name} {total - counted[name]}")
            counted = totals


def use(rng: random.Random, engine: Engine, prompt: Prompt, recent: deque[Prompt]) -> None:
    if engine.stored(prompt, 30.0):
        say(f"+ {prompt.number} {prompt.pages}")
        recent.append(prompt)
    else:
        say(f"- {prompt.number} {prompt.pages}")
    if rng.random() < 0.2 and recent:
        again = rng.choice(recent)
        if rng.random() < 0.5:
            engine.cache.evict(again.tokens, ["cpu"])
        engine.retrieve(again)


if __name__ == "__main__":
    main()
