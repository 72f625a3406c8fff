"""Whole nodes in virtual time: a thousand seeds find nothing, and each planted mistake within a thousand."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from lmcache_core.testing.simulation import SimulationError, run
from lmcache_core.testing.simulation.loop import Scope, VirtualLoop
from lmcache_core.testing.simulation.plants import PLANTS
from lmcache_core.testing.simulation.runner import main, run_batch
from lmcache_core.testing.simulation.trace import Trace

ROOT = Path(__file__).parents[2]
SEEDS = 1000
SOME = 100


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """All cores, or this worker's share of them, and nothing of the tests around it."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    count = max(1, len(os.sched_getaffinity(0)) // workers)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, SOME))
def test_nothing_is_wrong(pool: ProcessPoolExecutor, first: int) -> None:
    batches = [range(start, start + SOME // 4) for start in range(first, first + SOME, SOME // 4)]
    for outcomes in pool.map(run_batch, batches):
        last = outcomes[-1]
        assert not last.failure, "\n".join([*last.lines, f"seed {last.seed}: {last.failure}"])


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_found(pool: ProcessPoolExecutor, plant: str) -> None:
    for first in range(0, SEEDS, SOME):
        batches = [range(start, start + SOME // 4) for start in range(first, first + SOME, SOME // 4)]
        found = [pool.submit(run_batch, batch, plant=plant) for batch in batches]
        if any(future.result()[-1].failure for future in found):
            for future in found:
                future.cancel()  # what has not begun is for nothing
            return
    pytest.fail(f"{plant} is not found in {SEEDS} seeds")


def test_a_seed_is_the_same_in_every_process() -> None:
    traces = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "lmcache_core.testing.simulation", "--seeds", "20", "--processes", "1"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        traces.add(re.search("trace hash ([0-9a-f]{32})", done.stdout)[1])  # type: ignore[index]
    assert len(traces) == 1


def test_a_seed_that_fails_fails_again_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert main(["--trace", "0", "--plant", "no-half-open", "--steps", "20"]) == 1
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "is well again and has not been used" in told[0]
    assert "--trace 0 --steps 20 --plant no-half-open" in told[0]


def test_two_seeds_are_two_worlds() -> None:
    assert run(1, 5).digest != run(2, 5).digest


class Bench:
    """A virtual loop alone."""

    def __init__(self, seed: int = 0, *, shuffled: bool = True) -> None:
        self.seen: list[object] = []
        self.trace = Trace()
        self.loop = VirtualLoop(random.Random(seed), self.trace, shuffled=shuffled, after_each=lambda: None)


def test_an_hour_passes_at_once_and_in_order() -> None:
    bench = Bench()
    for seconds in (3600, 1, 60):
        bench.loop.call_later(seconds, bench.seen.append, seconds)
    assert not bench.loop.run_until(lambda: False, 7200)
    assert bench.seen == [1, 60, 3600]
    assert bench.loop.time() == 7200
    bench.loop.end()


def test_what_is_ready_at_once_runs_in_a_drawn_order() -> None:
    orders = set()
    for seed in range(20):
        bench = Bench(seed)
        for number in range(3):
            bench.loop.call_soon(bench.seen.append, number)
        bench.loop.run_until(lambda bench=bench: len(bench.seen) == 3, 1)  # type: ignore[misc]
        orders.add(tuple(bench.seen))
        bench.loop.end()
    assert len(orders) == 6


def test_tasks_begin_in_the_order_in_which_they_were_made() -> None:
    async def begin(bench: Bench, number: int) -> None:
        bench.seen.append(number)

    for seed in range(20):
        bench = Bench(seed)
        scope = Scope("all")
        for number in range(3):
            bench.loop.spawn(scope, begin(bench, number))
        bench.loop.run_until(lambda bench=bench: len(bench.seen) == 3, 1)  # type: ignore[misc]
        assert bench.seen == [0, 1, 2]
        bench.loop.end()


def test_nothing_of_a_scope_runs_when_it_has_ended() -> None:
    bench = Bench()
    scope = Scope("killed")

    async def work() -> None:
        try:
            await asyncio.sleep(1)
            bench.seen.append("woken")
        finally:
            bench.seen.append("ended")

    bench.loop.spawn(scope, work())
    bench.loop.call_later(0.5, setattr, scope, "alive", False)
    bench.loop.pass_time(10)
    assert bench.seen == []
    bench.loop.end()


def test_what_spins_is_told() -> None:
    bench = Bench()

    def again() -> None:
        bench.loop.call_soon(again)

    again()
    with pytest.raises(SimulationError, match="no time has passed"):
        bench.loop.pass_time(1)
    bench.loop.end()
