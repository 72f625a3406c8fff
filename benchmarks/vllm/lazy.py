"""What storing late is worth: prompt tokens that are computed, with `lazy_offload` and without, by the size of host
memory.

    python -m benchmarks.vllm.lazy

vLLM's own scheduler around a model that is arithmetic: nothing is timed, what is counted is the same on any machine. 90
prompts of 320 tokens, each asked again at random with a few tokens behind it, by an engine that keeps 6,400 tokens.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.engine import prompt
from tests.vllm.models import make_model
from tests.vllm.scheduled import BLOCK, Scheduled

__all__ = ["main"]

PROMPTS = 90
LENGTH = 320
BLOCKS = 400
TURNS = 400
CHUNK = 64
FRAME = 8192
"""Bytes of a chunk in the pool."""


def computed(model: Path, chunks: int, *, lazy: bool, skewed: bool) -> float:
    """The share of prompt tokens that were computed, once the first half has been asked.

    Args:
        model: A checkpoint, for its configuration.
        chunks: That host memory has room for.
        lazy: Whether KV is stored late.
        skewed: Whether few prompts are asked often, else all as often.
    """
    chance = random.Random(5)
    cache = {"cpu": {"capacity": chunks * FRAME}, "chunk_tokens": CHUNK, "page_tokens": BLOCK}
    engine: Any = Scheduled(model, cache, lazy_offload=lazy, blocks=BLOCKS, sync_load=0.025)
    prompts = [prompt(9000 + number, LENGTH) for number in range(PROMPTS)]
    asked = done = 0
    compute = engine._compute

    def counting(name: str, count: int, planned: Any) -> list[int]:
        nonlocal done
        if count > 1 and int(name) >= TURNS // 2:
            done += count
        found: list[int] = compute(name, count, planned)
        return found

    engine._compute = counting
    try:
        for turn in range(TURNS):
            number = int(chance.paretovariate(0.6)) - 1 if skewed else chance.randrange(PROMPTS)
            tokens = prompts[number % PROMPTS] + prompt(turn, 12)
            engine._requests[str(turn)] = engine.ask(str(turn), tokens, 4)
            asked += len(tokens) if turn >= TURNS // 2 else 0
            engine.run()
    finally:
        engine.close()
    return done / asked


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "model", 0)
        print(f"the engine keeps {BLOCKS * BLOCK:,} tokens, the prompts have {PROMPTS * LENGTH:,}")
        for skewed in (False, True):
            print("few prompts are asked often" if skewed else "all prompts are asked as often")
            for chunks in (128, 192, 256, 384):
                at_once, late = (computed(model, chunks, lazy=lazy, skewed=skewed) for lazy in (False, True))
                room = f"{chunks * CHUNK:,} tokens in host memory"
                print(f"  {room}: computed {at_once:.1%} stored at once, {late:.1%} late", flush=True)


if __name__ == "__main__":
    main()
