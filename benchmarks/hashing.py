"""Tokens to page keys, beside the bare loop of SHA-256 that nobody can do without."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.harness import Row, Scale, against, seconds
from lmcache_core.keys import page_keys

__all__ = ["hashing"]

PAGE_TOKENS = 64
VOCABULARY = 128_256


def hashing(scale: Scale) -> Iterator[Row]:
    """Rows `keys.*` in millions of tokens a second."""
    random_numbers = random.Random(0)
    tokens = [random_numbers.randrange(VOCABULARY) for _ in range(scale.hashed_tokens)]
    buffer = np.array(tokens, np.uint32)
    work: dict[str, tuple[Callable[[], list[bytes]], Callable[[], list[bytes]]]] = {
        "keys.list": (lambda: page_keys(tokens, PAGE_TOKENS), lambda: bare(memoryview(array("I", tokens)).cast("B"))),
        "keys.array": (lambda: page_keys(buffer, PAGE_TOKENS), lambda: bare(buffer.view(np.uint8).data)),
    }
    for name, (ours, limit) in work.items():
        assert ours() == limit()  # and both are warm now
        took, limits = [], []
        for _ in range(3 * scale.rounds):
            # A call takes 2 ms. Where others want the CPU, some lose it for longer than that: those don't count.
            pairs = [(seconds(limit), seconds(ours)) for _ in range(5)]
            limits.append(min(pair[0] for pair in pairs))
            took.append(min(pair[1] for pair in pairs))
        yield against(name, "Mtok/s", len(tokens) / 1e6, took, limits)


def bare(data: memoryview) -> list[bytes]:
    """The chain of digests and nothing else."""
    key = b""
    keys = []
    for at in range(0, len(data), 4 * PAGE_TOKENS):
        state = hashlib.sha256(key)
        state.update(data[at : at + 4 * PAGE_TOKENS])
        key = state.digest()
        keys.append(key)
    return keys
