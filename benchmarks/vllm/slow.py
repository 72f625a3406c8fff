"""A tier that is slower than computing: what requests pay for it whose KV lies there, beside an engine without us.

Each prompt is known to the disk alone, and the disk takes seconds for each chunk. An engine with the cache and one
without it are asked the same, in pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.disks import scratch
from benchmarks.vllm.ttft import ask, settle, to_disk_only
from lmcache_core.wrappers import Slow
from tests.vllm.engine import Engine, Inside, prompt, transfer_config
from tests.vllm.models import make_model

__all__ = ["main"]

TOKENS = 4133
PAIRS = 12
DELAY = 2.0
"""Seconds for each read."""


def slow_down(inside: Inside, seconds: float) -> None:
    """Have each read of the tiers take so long."""
    node: Any = inside.connector._scheduler.client.node
    for runner in node.runners:
        if not isinstance(runner.backend, Slow):
            runner.backend = Slow(runner.backend, verbs=("read",))
        runner.backend.delay = seconds


def decided(inside: Inside) -> dict[str, float]:
    """What the connector has counted."""
    return {" ".join(name).strip(): count for name, count in inside.connector._scheduler.counts.items()}


def measure(model: Path, folder: Path, delay: float) -> dict[str, Any]:
    """Seconds to the first token with and without the cache, for each pair."""
    cache = {
        "cpu": {"capacity": "2GiB"},
        "tiers": [{"backend": "disk", "path": str(folder / f"kv {delay}"), "capacity": "8GiB", "read_timeout": "30s"}],
    }
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 16384, "max_num_batched_tokens": 4096}
    took: dict[str, list[float]] = {"plain": [], "ours": []}
    with (
        Engine(model, kv_transfer_config=transfer_config(cache), **settings) as ours,
        Engine(model, **settings) as plain,
    ):
        engines = {"plain": plain, "ours": ours}
        prompts = [prompt(100 + number, TOKENS) for number in range(PAIRS)]
        for engine in engines.values():
            engine.run(ask, prompt(1, TOKENS))  # the first prompt is slower than all others
        for tokens in prompts:
            ours.run(ask, tokens)
            ours.run(settle, tokens)
            ours.run(to_disk_only, tokens)
        ours.run(slow_down, delay)
        for number, tokens in enumerate(prompts):
            for name in ("plain", "ours") if number % 2 else ("ours", "plain"):
                took[name].append(engines[name].run(ask, tokens)[0])
        counts = ours.run(decided)
        ours.run(slow_down, 0.0)
    if delay and not any(counts.get(name) for name in ("declined_tokens disk", "failed_tokens")):
        raise SystemExit(f"the tier was not slow: nothing was declined or given up ({counts})")
    means = {name: statistics.fmean(values) for name, values in took.items()}
    return {"seconds": took, "mean": means, "ratio": means["ours"] / means["plain"], "decided": counts}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="a directory on the disk to use")
    given = parser.parse_args()
    results = {}
    with scratch(given.directory) as folder:
        model = make_model("llama", folder / "model")
        for delay in (DELAY, 0.0):
            result = results[f"{delay:g} s a read"] = measure(model, folder, delay)
            print(
                f"{delay:g} s a read: mean {result['mean']['ours'] * 1e3:.1f} ms with, "
                f"{result['mean']['plain'] * 1e3:.1f} ms without: {result['ratio']:.3f}; {result['decided']}",
                flush=True,
            )
            print("  with   ", " ".join(f"{each * 1e3:.0f}" for each in result["seconds"]["ours"]))
            print("  without", " ".join(f"{each * 1e3:.0f}" for each in result["seconds"]["plain"]))
    if given.out:
        given.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
