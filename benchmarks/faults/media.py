"""A disk that is full, gone, read-only or broken for a while: the engine goes on, and the tier comes back by itself."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from benchmarks.faults.campaign import Campaign, Fault, Run, until
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace, settings
from benchmarks.faults.mounts import LoopMount, Tmpfs
from benchmarks.faults.mounts import run as command
from lmcache_core import Cache

__all__ = ["FAULTS"]

MIB = 1 << 20
ROUNDS = 40
"""Prompts that the engine stores and asks for while the fault lasts."""
BACK = 15.0
"""Seconds within which a tier must be back when the cause is gone."""


class Medium(Protocol):
    """Where the tier lies, and what is done to it."""

    path: Path
    keeps: bool
    """Whether what was stored must be there afterwards."""
    at_start: bool
    """Whether the cache is opened while the fault lasts."""
    fsync: bool

    def breaks(self) -> None: ...

    def heals(self) -> None: ...


class Full:
    """Others have filled the file system. What is new takes the place of what is old."""

    keeps = at_start = fsync = False

    def __init__(self, disk: Tmpfs) -> None:
        self.path = disk.where / "kv"
        self.breaks = disk.fill
        self.heals = disk.free


class Removed:
    """The directory has been removed."""

    keeps = at_start = fsync = False

    def __init__(self, path: Path) -> None:
        self.path = path / "kv"

    def breaks(self) -> None:
        # The tier may be making files there meanwhile; in the end it makes the directory anew.
        shutil.rmtree(self.path, ignore_errors=True)

    def heals(self) -> None: ...


class Moved:
    """The directory is elsewhere for a while, and a file is in its place."""

    keeps, at_start, fsync = True, False, False

    def __init__(self, path: Path) -> None:
        self.path = path / "kv"
        self._elsewhere = path / "elsewhere"

    def breaks(self) -> None:
        self.path.rename(self._elsewhere)
        self.path.write_text("in the way")

    def heals(self) -> None:
        self.path.unlink()
        self._elsewhere.rename(self.path)


class ReadOnly:
    """A read-only mount: over a directory in use, where open files stay writable, or before the start."""

    keeps, fsync = True, False

    def __init__(self, path: Path, at_start: bool) -> None:
        self.path = path / "kv"
        self.at_start = at_start

    def breaks(self) -> None:
        self.path.mkdir(exist_ok=True)
        command("mount", "--bind", self.path, self.path)
        command("mount", "-o", "remount,bind,ro", self.path)

    def heals(self) -> None:
        command("umount", "--lazy", self.path)


class Dead:
    """The file system has failed and answers everything with EIO, until it is mounted again."""

    keeps, at_start, fsync = True, False, True

    def __init__(self, disk: LoopMount) -> None:
        self.path = disk.where / "kv"
        self._disk = disk
        self.breaks = disk.cut_power

    def heals(self) -> None:
        self._disk.umount()
        self._disk.mount()


class Failing:
    """Calls of the operating system fail with EIO: all of them, or some. What could not be read is given up."""

    at_start = fsync = False

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path / "kv"
        self._rng = run.rng
        self._names = run.rng.choice(
            [["pwritev"], ["pwrite"], ["pwritev", "pwrite"], ["preadv"], ["preadv", "pwritev"]]
        )
        self.keeps = "preadv" not in self._names
        self._share = run.rng.choice([0.3, 1.0])
        self._patches: list[Any] = []

    def breaks(self) -> None:
        for name in self._names:
            patch = mock.patch.object(os, name, self._failing(getattr(os, name)))
            patch.start()
            self._patches.append(patch)

    def _failing(self, call: Callable[..., int]) -> Callable[..., int]:
        def fails(*args: Any) -> int:
            if self._rng.random() < self._share:
                raise OSError(errno.EIO, "Input/output error")
            return call(*args)

        return fails

    def heals(self) -> None:
        for patch in self._patches:
            patch.stop()


@contextmanager
def full(run: Run) -> Iterator[Medium]:
    with Tmpfs(run.path, 8 * MIB) as disk:
        yield Full(disk)


@contextmanager
def removed(run: Run) -> Iterator[Medium]:
    yield Removed(run.path)


@contextmanager
def moved(run: Run) -> Iterator[Medium]:
    yield Moved(run.path)


@contextmanager
def read_only(run: Run) -> Iterator[Medium]:
    yield ReadOnly(run.path, at_start=run.number % 2 == 1)


@contextmanager
def dead(run: Run) -> Iterator[Medium]:
    with LoopMount(run.path) as disk:
        yield Dead(disk)


@contextmanager
def failing(run: Run) -> Iterator[Medium]:
    medium = Failing(run.path, run)
    try:
        yield medium
    finally:
        medium.heals()


def break_medium(make: Callable[[Run], Any], campaign: Campaign) -> None:
    for run in campaign:
        with run, make(run) as medium:
            _break_once(medium, run)


def _break_once(medium: Medium, run: Run) -> None:
    config = settings(medium.path, capacity=6 * MIB, segment="64KiB", fsync=medium.fsync)
    before = [Prompt(number, 1 + run.rng.randrange(3 * CHUNK_PAGES)) for number in range(20)]
    if medium.at_start:
        with Cache.open(config, namespace()) as cache:
            engine = Engine(cache, run)
            run.seen("durable before", sum([engine.stored(prompt) for prompt in before]))
        medium.breaks()
    with Cache.open(config, namespace()) as cache:
        engine = Engine(cache, run)
        if not medium.at_start:
            run.seen("durable before", sum([engine.stored(prompt) for prompt in before]))
            medium.breaks()
        _go_on(engine, run, before)
        run.seen("failed writes", engine.count("failed_writes"))
        run.seen("dropped", engine.count("dropped_chunks"))
        run.seen("breakers opened", engine.count("opened_breakers"))
        medium.heals()
        if _comes_back(engine, run):
            run.recovered()
        if medium.keeps:
            cache.clear(["cpu"])
            run.seen("hits after", sum([engine.expect(prompt) for prompt in before]))


def _go_on(engine: Engine, run: Run, before: list[Prompt]) -> None:
    """An engine at work. Nothing may raise, and nothing waits for the disk longer than a read may take."""
    for number in range(1000, 1000 + ROUNDS):
        prompt = Prompt(number, 1 + number % (3 * CHUNK_PAGES))
        result = engine.store(prompt)
        if result is not None and run.rng.random() < 0.3:
            result.wait(0.5)
        engine.lookup(prompt)
        if engine.retrieve(prompt) < prompt.pages and engine.lookup(prompt) == prompt.pages:
            run.note(f"{prompt} was promised and did not come")
        engine.retrieve(run.rng.choice(before), timeout=1.0)
        if run.rng.random() < 0.2:
            engine.cache.clear(["cpu"])


def _comes_back(engine: Engine, run: Run) -> bool:
    """Store until it is durable again, as an engine at work would."""
    started = time.monotonic()
    number = 2000

    def durable() -> bool:
        nonlocal number
        number += 1
        return engine.tier().up and engine.stored(Prompt(number, 2 * CHUNK_PAGES))

    if not until(durable, BACK, pause=0.02):
        run.note(f"still down after {BACK:g} s: {engine.tier()}")
        return False
    run.seen("milliseconds until back", round(1000 * (time.monotonic() - started)))
    return engine.serves(Prompt(number, 2 * CHUNK_PAGES))


MOUNTS = ("mount", "umount")
XFS = ("mkfs.xfs", "xfs_io", *MOUNTS)

FAULTS = [
    Fault("disk full", 10, partial(break_medium, full), few=2, programs=MOUNTS, root=True, seconds=1),
    Fault("directory removed", 10, partial(break_medium, removed), few=2, seconds=1),
    Fault("directory moved away", 10, partial(break_medium, moved), few=2, seconds=1),
    Fault("mounted read-only", 10, partial(break_medium, read_only), few=2, programs=MOUNTS, root=True, seconds=1),
    Fault("file system fails", 10, partial(break_medium, dead), few=2, programs=XFS, root=True, seconds=2),
    Fault("I/O errors", 20, partial(break_medium, failing), few=6, seconds=1),
]
