"""Storing to and retrieving from the host pool, beside memcpy of the same bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Buffer, Row, Scale, memcpy, rate, seconds, spinning
from benchmarks.workload import Engine, opened

__all__ = ["beside_a_busy_thread", "quiet"]


def quiet(scale: Scale) -> Iterator[Row]:
    """Rows `store.cpu.*` and `retrieve.cpu.*`: blocks of 16 and of 64 tokens."""
    for block_tokens in (16, 64):
        yield from _measured(scale, block_tokens, f"cpu.{block_tokens}", busy=False)


def beside_a_busy_thread(scale: Scale) -> Iterator[Row]:
    """Rows `store.busy` and `retrieve.busy`: blocks of 16 tokens; memcpy is measured when nothing else runs."""
    yield from _measured(scale, 16, "busy", busy=True)


def _measured(scale: Scale, block_tokens: int, suffix: str, *, busy: bool) -> Iterator[Row]:
    engine = Engine(scale.layers, scale.chunks, block_tokens)
    mine, pools = Buffer(engine.nbytes, shared=False), Buffer(engine.nbytes, shared=True)
    took: dict[str, list[float]] = defaultdict(list)
    limits: dict[str, list[float]] = defaultdict(list)

    def store() -> None:
        assert cache.store(tokens, engine.view()).stored == engine.tokens

    def retrieve() -> None:
        assert cache.retrieve(tokens, engine.view()).tokens == engine.tokens

    with opened(engine.namespace, 2 * scale.chunks * engine.frame_bytes) as cache:
        engine.check(cache)
        for number in range(scale.rounds + 1):
            tokens = engine.prompt()
            for verb, work, target, source in (("store", store, pools, mine), ("retrieve", retrieve, mine, pools)):
                limit = seconds(partial(memcpy, target, source, engine.chunk_bytes))
                with spinning(busy):
                    needed = seconds(work)
                if number:  # the first round warms up
                    limits[verb].append(limit)
                    took[verb].append(needed)
    for verb in took:
        yield rate(f"{verb}.{suffix}", engine.nbytes, took[verb], limits[verb])
