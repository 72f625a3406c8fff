"""Seconds to the first token of a long prompt, by where its KV comes from; and what storing costs a cold prompt.

Each connector has an engine of its own, in a process of its own, that sleeps while another is asked. In each round all
answer the same new prompt, so that what the machine does meanwhile happens to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.disks import scratch
from benchmarks.harness import Buffer, seconds
from lmcache_core.client import Held
from tests.vllm.engine import Engine, Inside, prompt, transfer_config
from tests.vllm.models import make_model

__all__ = ["main"]

TOKENS = 8229
ROUNDS = 5
HITS = 5
"""Of each prompt: they take tens of milliseconds, so a few are not enough to tell some percent."""
PAIRS = 9
"""Cold prompts with and without us."""
CACHE_BYTES = "2GiB"
HIT_ROWS = {
    "ttft.native": "plain",
    "ttft.memory": "ours",
    "ttft.memory_layerwise": "layerwise",
    "ttft.memory_async": "async",
    "ttft.disk": "disk",
    "ttft.example": "example",
    "ttft.offloading": "offloading",
}
"""The engine of each row."""
OURS = {"ours", "layerwise", "async", "disk"}


def ask(inside: Inside, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    (output,) = inside.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    return output.metrics.first_token_latency, output.num_cached_tokens


def settle(inside: Inside, tokens: list[int]) -> None:
    """Let what a connector does behind an answer come to its end, and drop the engine's own cache."""
    for _ in range(3):
        ask(inside, tokens[:17])
    inside.forget()


def pool_is_there(inside: Inside) -> bool:
    """Whether the system has made all of the node's memory, which takes it a while at the start."""
    stats = inside.connector._scheduler.client.stats()
    return bool(stats.pool_usable == stats.pool_capacity)


def to_disk_only(inside: Inside, tokens: list[int]) -> int:
    """Have all of a prompt on the disk and nothing of it in host memory. Returns its bytes."""
    side: Any = inside.connector._scheduler
    assert side.client.flush(60)
    from lmcache_core.keys import page_keys

    keys = page_keys(tokens, side.page_tokens)
    held: Held = side.client.hold(side._model, keys)
    side.client.release(held)
    page_bytes = sum(group.page_bytes for group in side._namespace.groups)
    side.client.evict(side._model, keys, ["cpu"])
    assert side.client.lookup(side._model, keys, ["cpu"], quiet=True).pages == 0
    assert side.client.lookup(side._model, keys, quiet=True).pages == held.pages
    return int(held.pages * page_bytes)


def engines(stack: ExitStack, model: Path, folder: Path, only: Sequence[str]) -> Mapping[str, Engine]:
    """One of each kind; without those that are not among `only`, if there are any."""
    cache = {
        "cpu": {"capacity": CACHE_BYTES},
        "tiers": [{"backend": "disk", "path": str(folder / "kv"), "capacity": "8GiB"}],
    }
    memory = {"cpu": {"capacity": CACHE_BYTES}}
    other = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    example = other | {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    offloading = other | {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"spec_name": "HostMemory", "spec_module_path": "benchmarks.vllm.offloading"},
    }
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "ours": {"kv_transfer_config": transfer_config(memory, sync_load=1.0)},
        "layerwise": {"kv_transfer_config": transfer_config(memory, sync_load=1.0, layerwise=True)},
        "async": {"kv_transfer_config": transfer_config(memory, sync_load=0)},
        "disk": {"kv_transfer_config": transfer_config(cache)},
        "example": {"kv_transfer_config": example},
        "offloading": {"kv_transfer_config": offloading},
    }
    return {
        name: stack.enter_context(
            Engine(
                model,
                environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
                dtype="bfloat16",
                max_model_len=16384,
                max_num_batched_tokens=16384,  # ExampleConnector takes no prompt in parts
                **settings,
            )
        )
        for name, settings in kinds.items()
        if not only or name in ("plain", "ours", *only)
    }


def hit_of(row: str, name: str, engine: Engine, tokens: list[int], folder: Path) -> dict[str, float]:
    """Seconds to the first token of a prompt that this engine can have from where the row says."""
    rows: dict[str, float] = {}
    if name != "plain":
        engine.run(settle, tokens)
    if name == "disk":
        nbytes = engine.run(to_disk_only, tokens)
        rows["disk.read"] = _plain_read(folder, nbytes)
    rows[row], cached = engine.run(ask, tokens)
    assert cached > TOKENS - 256, f"{name} had {cached}"
    return rows


def measure(model: Path, folder: Path, say: Callable[[str], None], only: Sequence[str] = ()) -> dict[str, list[float]]:
    """Seconds by row."""
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        running = engines(stack, model, folder, only)
        for name in running.keys() & OURS:
            while not running[name].run(pool_is_there):
                time.sleep(0.1)
        say("engines are up")
        for number in range(PAIRS + 1):
            tokens = prompt(number, TOKENS)
            warm = number == 0
            # Turns change, so that neither is always first.
            pair = ("plain", "ours") if number % 2 else ("ours", "plain")
            cold = {name: running[name].run(ask, tokens)[0] for name in pair}
            if not warm:
                took.setdefault("ttft.cold", []).append(cold["plain"])
                took.setdefault("cold.overhead", []).append(cold["ours"] / cold["plain"] - 1)
            if number > ROUNDS:
                continue
            for name, engine in running.items():
                if name not in ("plain", "ours"):
                    first, _ = engine.run(ask, tokens)
                    if name == "layerwise" and not warm:
                        took.setdefault("cold.overhead_layerwise", []).append(first / cold["plain"] - 1)
            rows: dict[str, list[float]] = {}
            for hit in range(HITS):
                for row, name in list(HIT_ROWS.items())[:: 1 if hit % 2 else -1]:
                    if name in running:
                        for each, value in hit_of(row, name, running[name], tokens, folder).items():
                            rows.setdefault(each, []).append(value)
            if not warm:
                for row, values in rows.items():
                    took.setdefault(row, []).extend(values)
            medians = {row: statistics.median(values) for row, values in rows.items()}
            say(f"round {number}: " + ", ".join(f"{row} {value * 1e3:.1f} ms" for row, value in medians.items()))
        for engine in running.values():
            engine.run(settle, tokens)
    return took


def _plain_read(folder: Path, nbytes: int) -> float:
    """Seconds that a plain file of that size takes to be read past the page cache."""
    piece = 8 << 20
    size = -(-nbytes // piece) * piece
    memory = Buffer(size, shared=True)
    path = folder / "plain"
    if not path.exists() or path.stat().st_size != size:
        with open(path, "wb") as file:
            file.write(memory.memory)
            os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:

        def read() -> None:
            for at in range(0, size, piece):
                os.preadv(descriptor, [memory.memory[at : at + piece]], at)

        return seconds(read)
    finally:
        os.close(descriptor)


def limits_of(median: Mapping[str, float]) -> Mapping[str, float]:
    """The most that each row may be, by what else has been measured."""
    others = [median[row] for row in ("ttft.example", "ttft.offloading") if row in median]
    limits = {
        "cold.overhead": 0.05,
        "cold.overhead_layerwise": 0.05,
        "ttft.memory_layerwise": 1.1 * median["ttft.memory"],
    }
    limits["ttft.memory"] = min(1.3 * median["ttft.native"] + 0.010, *(each + 0.003 for each in others), float("inf"))
    if "ttft.offloading" in median:
        limits["ttft.memory_async"] = median["ttft.offloading"] + 0.003
    if "disk.read" in median:
        limits["ttft.disk"] = 1.5 * (median["ttft.memory"] + median["disk.read"])
    return limits


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="a directory on the disk to measure")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="these alone: layerwise, async, disk, example, offloading"
    )
    given = parser.parse_args()
    with scratch(given.directory) as folder:
        started = time.monotonic()
        model = make_model("llama", folder / "model")
        took = measure(model, folder, lambda text: print(text, file=sys.stderr, flush=True), given.only)
    print(f"load {os.getloadavg()[0]:.1f}, {time.monotonic() - started:.0f} s")
    median = {row: statistics.median(values) for row, values in took.items()}
    limits = limits_of(median)
    rows = []
    for row, value in median.items():
        limit = limits.get(row)
        ratio = None if limit is None or value <= 0 else limit / value
        unit = "fraction" if row.startswith("cold.") else "s"
        rows.append({"name": row, "value": value, "unit": unit, "limit": limit, "ratio": ratio})
        short = limit is not None and value > limit
        print(f"{row:20s} {value:9.4f} {unit:8s} {'' if limit is None else f'{limit:9.4f}'} {'short' if short else ''}")
    if given.out:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
