"""Many seeds, on all cores; and one seed to be looked at."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from lmcache_core.testing.simulation.plants import PLANTS, planted
from lmcache_core.testing.simulation.world import STEPS, Outcome, run

__all__ = ["main", "run_batch", "run_many"]

BATCH = 20
"""Seeds that a process runs in one go."""


def run_batch(seeds: Sequence[int], steps: int = STEPS, plant: str | None = None) -> list[Outcome]:
    """Run some seeds in this process, up to the first that fails."""
    outcomes = []
    with planted(plant):
        for seed in seeds:
            outcomes.append(run(seed, steps))
            if outcomes[-1].failure:
                break
    return outcomes


def run_many(
    seeds: Sequence[int], steps: int = STEPS, plant: str | None = None, processes: int | None = None
) -> Iterator[Outcome]:
    """Run seeds in several processes; outcomes come in the order of the seeds, and end with the first that fails."""
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    work = partial(run_batch, steps=steps, plant=plant)
    context = multiprocessing.get_context("spawn")  # nothing of this process is theirs
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), mp_context=context) as pool:
        try:
            for outcomes in pool.map(work, batches):
                for outcome in outcomes:
                    yield outcome
                    if outcome.failure:
                        return
        finally:
            pool.shutdown(cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 1 if a seed has failed."""
    options = _parser().parse_args(arguments)
    if options.trace is not None:
        return _show(options.trace, options.steps, options.plant)
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    all_of_them = hashlib.blake2b(digest_size=16)
    count = callbacks = 0
    virtual = 0.0
    for outcome in run_many(seeds, options.steps, options.plant, options.processes):
        count += 1
        callbacks += outcome.callbacks
        virtual += outcome.seconds
        all_of_them.update(outcome.digest.encode())
        if outcome.failure:
            _tell(outcome, options.steps, options.plant)
            print(f"found after {count} seeds")
            return 1
        if count % 200 == 0:
            print(f"{count} of {len(seeds)} seeds, {count / (time.monotonic() - began):.0f} a second", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{count} seeds from {options.first} in {seconds:.0f} s: {count / seconds:.0f} a second, "
        f"{callbacks} callbacks, {virtual / 3600:.1f} virtual hours\n"
        f"trace hash {all_of_them.hexdigest()}; nothing wrong"
    )
    return 0


def _show(seed: int, steps: int, plant: str | None) -> int:
    with planted(plant):
        outcome = run(seed, steps, keep_all=True)
    _tell(outcome, steps, plant)
    return 1 if outcome.failure else 0


def _tell(outcome: Outcome, steps: int, plant: str | None) -> None:
    print("\n".join(outcome.lines))
    print(f"seed {outcome.seed}: {outcome.failure or 'nothing wrong'}")
    print(f"trace hash {outcome.digest}, {outcome.callbacks} callbacks, {outcome.seconds:.1f} virtual seconds")
    if outcome.failure:
        again = f"{sys.executable} -m lmcache_core.testing.simulation --trace {outcome.seed} --steps {steps}"
        print(f"again: {again}" + (f" --plant {plant}" if plant else ""))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lmcache_core.testing.simulation",
        description="Whole nodes in virtual time, with faults drawn by a seed.",
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="operations of engines in each (%(default)s)")
    parser.add_argument("--processes", type=int, help="at once (one a core)")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a mistake to plant into the product first")
    parser.add_argument("--trace", type=int, metavar="SEED", help="run this one and print all that happens")
    return parser
