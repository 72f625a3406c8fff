"""Conversations of many turns on a real vLLM, with requests that are aborted beside them: nothing grows, and what must
hit hits.

vLLM's own prefix cache is off, so that every hit is the node's. All conversations begin with the same text. What a turn
finds is worked out beside it from what came before: whole pages of prompts, whole chunks of answers. Requests that are
aborted are of other texts, since how much of them is stored is anybody's guess.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.engine import Engine, Inside, prompt, transfer_config
from tests.vllm.models import VOCABULARY, make_model

__all__ = ["Soaked", "main", "soak"]

CONVERSATIONS = 6
SHARED_TOKENS = 700
TURNS = 8
ANSWER = 24
ABORTED = 3
"""Requests beside each turn that are aborted at a random step."""
LARGE = 256 << 20
"""Bytes of mappings that are somebody's whole cache."""
FIRST_ROUNDS = 2
GROWTH = 24 << 20
"""Bytes by which an engine with us may grow more than one without, after the first rounds."""


class Soaked(NamedTuple):
    """What came of it."""

    rounds: int
    prompt_tokens: int
    hit_tokens: int
    expected_tokens: int
    aborted: int
    grown: int
    """Bytes of the process's own memory, since the first rounds. vLLM's grows by itself, some MiB a round."""
    left: dict[str, int]
    """What is still held afterwards."""

    @property
    def good(self) -> bool:
        """Whether what must hit has hit, and nothing is left."""
        return self.hit_tokens == self.expected_tokens and not any(self.left.values())


class _Known:
    """Texts of which the cache has the KV, as prefixes of whole pages, each by a digest of its own."""

    def __init__(self, page: int, chunk: int) -> None:
        self._page = page
        self._chunk = chunk
        self._prefixes: set[bytes] = set()

    def hit(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that are found; at least one is computed."""
        known = list(itertools.takewhile(self._prefixes.__contains__, self._digests(tokens)))
        return min(len(known) * self._page, len(tokens) - 1)

    def answered(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        """A prompt was computed, and all of its answer but the last token."""
        computed = [*tokens, *answer][:-1]
        whole = max(len(tokens), len(computed) // self._chunk * self._chunk)
        self._prefixes.update(self._digests(computed[:whole]))

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Of the prefixes that end with a page."""
        digest = hashlib.sha256()
        for end in range(self._page, len(tokens) + 1, self._page):
            digest.update(array.array("I", tokens[end - self._page : end]))
            yield digest.digest()


def _rounds(inside: Inside, seconds: float, rounds: int, seed: int) -> Soaked:
    """Run so many rounds of conversations, or for so long, in the engine's process."""
    side: Any = None if inside.connector is None else inside.connector._scheduler
    known = None if side is None else _Known(side.page_tokens, side.client.chunk_tokens)
    chosen = random.Random(seed)
    shared = prompt(seed, SHARED_TOKENS)
    started, ran, asked, hits, expected, aborted, own = time.monotonic(), 0, 0, 0, 0, 0, 0
    while ran < rounds or time.monotonic() - started < seconds:
        texts = [[*shared, *_words(chosen, 50)] for _ in range(CONVERSATIONS)]
        for _ in range(TURNS):
            # The first alone, so that what all share is there for the others.
            for together in (texts[:1], texts[1:]):
                wanted = [0 if known is None else known.hit(text) for text in together]
                outputs, gone = _answer(inside, together, chosen)
                aborted += gone
                for text, output, want in zip(together, outputs, wanted, strict=True):
                    answer = list(output.outputs[0].token_ids)
                    if known is not None:
                        known.answered(text, answer)
                    asked, hits, expected = asked + len(text), hits + output.num_cached_tokens, expected + want
                    text += [*answer, *_words(chosen, chosen.randrange(10, 200))]
        ran += 1
        if ran == FIRST_ROUNDS:
            own = _own_memory()
    inside.generate([_words(chosen, 20)])
    return Soaked(ran, asked, hits, expected, aborted, _own_memory() - own, {} if side is None else inside.settled())


def _own_memory() -> int:
    """Bytes that this process has of its own. The engine's KV cache and the node's memory are left out: they are as
    large as they were made, however much of them has been touched."""
    nbytes = size = 0
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, _, value = line.partition(":")
            if name == "Size":
                size = int(value.split()[0]) << 10
            elif name == "Anonymous" and size < LARGE:
                nbytes += int(value.split()[0]) << 10
    return nbytes


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
        return engine.run(_rounds, seconds, FIRST_ROUNDS + 1, seed)


def soak_plain(model: Path, rounds: int, seed: int = 1) -> Soaked:
    """Run the same conversations in an engine without us."""
    with Engine(model, enable_prefix_caching=False) as engine:
        return engine.run(_rounds, 0.0, rounds, seed)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; the default is 10 minutes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmcache-soak-") as directory:
        folder = Path(directory)
        model = make_model("llama", folder / "model")
        soaked = soak(model, folder, given.seconds, given.seed)
        rate = soaked.hit_tokens / soaked.prompt_tokens
        print(
            f"{soaked.rounds} rounds, {soaked.prompt_tokens} tokens asked, {soaked.aborted} requests aborted\n"
            f"hits {soaked.hit_tokens}, expected {soaked.expected_tokens}: a rate of {rate:.4f}; left: {soaked.left}",
            flush=True,
        )
        plain = soak_plain(model, soaked.rounds, given.seed)
    print(f"memory grown by {soaked.grown >> 20} MiB, without us in as many rounds by {plain.grown >> 20} MiB")
    sys.exit(0 if soaked.good and soaked.grown < plain.grown + GROWTH else 1)


if __name__ == "__main__":
    main()
