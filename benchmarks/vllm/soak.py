"""Conversations of many turns on a real vLLM, with requests that are aborted beside them: nothing grows, and what must
hit hits.

vLLM's own prefix cache is off, so that every hit is the node's. All conversations begin with the same text. What a turn
finds is worked out beside it from what came before: whole pages of prompts, whole chunks of answers. Requests that are
aborted are of other texts, since how much of them is stored is anybody's guess.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.vllm.engine import Engine, Inside, prompt, transfer_config
from tests.vllm.models import VOCABULARY, make_model

__all__ = ["Soaked", "main", "soak"]

CONVERSATIONS = 6
SHARED_TOKENS = 700
TURNS = 8
ANSWER = 24
ABORTED = 3
"""Requests beside each turn that are aborted at a random step."""
GROWTH = 24 << 20
"""Bytes by which the process may grow after its first rounds: Python's and torch's own fragments."""


class Soaked(NamedTuple):
    """What came of it."""

    rounds: int
    prompt_tokens: int
    hit_tokens: int
    expected_tokens: int
    aborted: int
    grown: int
    """Bytes of resident memory that is the process's own, since the first rounds."""
    left: dict[str, int]
    """What is still held afterwards."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.hit_tokens == self.expected_tokens and self.grown < GROWTH and not any(self.left.values())


class _Known:
    """Texts of which the cache has the KV, as prefixes of whole pages."""

    def __init__(self, page: int, chunk: int) -> None:
        self._page = page
        self._chunk = chunk
        self._prefixes: set[tuple[int, ...]] = set()

    def hit(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that are found; at least one is computed."""
        end = len(tokens) // self._page * self._page
        while end and tuple(tokens[:end]) not in self._prefixes:
            end -= self._page
        return min(end, len(tokens) - 1)

    def answered(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        """A prompt was computed, and all of its answer but the last token."""
        computed = [*tokens, *answer][:-1]
        ends = {*range(self._page, len(tokens) + 1, self._page)}
        whole = len(computed) // self._chunk * self._chunk
        ends |= {*range(self._page, whole + 1, self._page)}
        self._prefixes |= {tuple(computed[:end]) for end in ends}


def _rounds(inside: Inside, seconds: float, seed: int) -> Soaked:
    """Run rounds of conversations for so long, in the engine's process."""
    side: Any = inside.connector._scheduler
    chosen = random.Random(seed)
    shared = prompt(seed, SHARED_TOKENS)
    known = _Known(side.page_tokens, side.client.chunk_tokens)
    started, rounds, asked, hits, expected, aborted = time.monotonic(), 0, 0, 0, 0, 0
    process, own = psutil.Process(), 0
    while rounds < 3 or time.monotonic() - started < seconds:
        texts = [[*shared, *_words(chosen, 50)] for _ in range(CONVERSATIONS)]
        for _ in range(TURNS):
            # One after another at first, so that what they share is there for all of them.
            turns = [texts[:1], texts[1:]]
            for together in turns:
                wanted = [known.hit(text) for text in together]
                outputs, gone = _answer(inside, together, chosen)
                aborted += gone
                for text, output, want in zip(together, outputs, wanted, strict=True):
                    answer = list(output.outputs[0].token_ids)
                    known.answered(text, answer)
                    asked, hits, expected = asked + len(text), hits + output.num_cached_tokens, expected + want
                    text += [*answer, *_words(chosen, chosen.randrange(10, 200))]
        rounds += 1
        if rounds == 2:
            own = process.memory_full_info().uss
    inside.generate([_words(chosen, 20)])
    grown = process.memory_full_info().uss - own
    return Soaked(rounds, asked, hits, expected, aborted, grown, inside.settled())


def _words(chosen: random.Random, count: int) -> list[int]:
    return [chosen.randrange(3, VOCABULARY) for _ in range(count)]


def _answer(inside: Inside, prompts: Sequence[Sequence[int]], chosen: random.Random) -> tuple[list[Any], int]:
    """Answers to prompts that are asked together, with others beside them that are aborted."""
    from vllm import SamplingParams

    engine = inside.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    names = [f"{chosen.getrandbits(64):x}" for _ in prompts]
    for name, tokens in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(tokens)}, sampling)
    doomed = {}
    for _ in range(ABORTED):
        name = f"{chosen.getrandbits(64):x}"
        engine.add_request(name, {"prompt_token_ids": _words(chosen, chosen.randrange(10, 1500))}, sampling)
        doomed[name] = chosen.randrange(0, ANSWER)
    done: dict[str, Any] = {}
    steps = gone = 0
    while engine.has_unfinished_requests():
        for name in [name for name, step in doomed.items() if step <= steps]:
            del doomed[name]
            gone += 1
            engine.abort_request([name])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        steps += 1
    return [done[name] for name in names], gone


def soak(model: Path, folder: Path, seconds: float, seed: int = 1) -> Soaked:
    """Run conversations for so long, in an engine of their own."""
    cache = {
        "cpu": {"capacity": "1GiB"},
        "tiers": [{"backend": "disk", "path": str(folder / "kv"), "capacity": "4GiB"}],
    }
    with Engine(model, kv_transfer_config=transfer_config(cache), enable_prefix_caching=False) as engine:
        return engine.run(_rounds, seconds, seed)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; the default is 10 minutes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmcache-soak-") as directory:
        folder = Path(directory)
        soaked = soak(make_model("llama", folder / "model"), folder, given.seconds, given.seed)
    rate = soaked.hit_tokens / soaked.prompt_tokens
    print(
        f"{soaked.rounds} rounds, {soaked.prompt_tokens} tokens asked, {soaked.aborted} requests aborted\n"
        f"hits {soaked.hit_tokens}, expected {soaked.expected_tokens}: a rate of {rate:.4f}\n"
        f"memory grown by {soaked.grown / (1 << 20):.1f} MiB; left: {soaked.left}"
    )
    sys.exit(0 if soaked.good else 1)


if __name__ == "__main__":
    main()
