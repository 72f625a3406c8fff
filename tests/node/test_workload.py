"""A synthetic multi-turn workload: what page-sized hits gain over chunk-sized ones, counted token by token.

Conversations share a system prompt and grow turn by turn, as chats and agents do; turns are short against a chunk. Hits
of the real cache are compared with an offline count of what is knowable: the longest stored prefix in whole pages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.node.kv import CHUNK_TOKENS, PAGE_TOKENS, PageView, at_rest, open_cache


def conversations(seed: int, chats: int = 12, turns: int = 6) -> Iterator[list[int]]:
    """Prompts in the order in which they arrive: turn 1 of every chat, turn 2 of every chat, ..."""
    rng = random.Random(seed)
    system = [rng.randrange(50_000) for _ in range(70)]
    texts = [list(system) for _ in range(chats)]
    for _ in range(turns):
        for text in texts:
            text += [rng.randrange(50_000) for _ in range(rng.randrange(10, 60))]
            yield list(text)


def offline(prompts: list[list[int]], unit: int) -> int:
    """Tokens that a cache of boundless room hits if it keeps and finds whole units of `unit` tokens."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for text in prompts:
        whole = len(text) // unit * unit
        prefixes = [tuple(text[:end]) for end in range(unit, whole + 1, unit)]
        hits += unit * next((n for n, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
        known.update(prefixes)
    return hits


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hits_are_what_whole_pages_allow_and_beat_whole_chunks(seed: int) -> None:
    prompts = list(conversations(seed))
    total = sum(len(text) for text in prompts)
    hits = 0
    with open_cache(slots=800) as cache:
        for text in prompts:
            prompt = cache.prompt(text)
            view = PageView(len(prompt.keys))
            got = cache.retrieve(prompt, view)
            assert view.wrong(prompt.keys, got.tokens // PAGE_TOKENS) == 0
            hits += got.tokens
            result = cache.store(prompt, PageView.of(prompt.keys))
            assert result.dropped == 0
        at_rest(cache)
    pages, chunks = offline(prompts, PAGE_TOKENS), offline(prompts, CHUNK_TOKENS)
    print(f"seed {seed}: {total} tokens, hit rate {hits / total:.3f} by page, {chunks / total:.3f} by chunk")
    assert hits == pages
    assert pages > chunks * 1.15
