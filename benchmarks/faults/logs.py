"""Damage in the log of a disk. What the log says elsewhere still holds: those chunks are hits, and nothing is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.campaign import Campaign, Fault, Run
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace, settings
from lmcache_backends.disk.inspection import inspect_path
from lmcache_backends.disk.records import HEADER, KEY, PUT, TOUCH, Reader
from lmcache_backends.disk.shard import seed_of
from lmcache_core import Cache

__all__ = ["FAULTS"]


class Span(NamedTuple):
    """A record: where it is, and what it speaks of."""

    start: int
    end: int
    kind: int
    page: bytes
    """Key of the chunk; of a touch empty."""
    segment: int
    offset: int
    nbytes: int

    def overlaps(self, other: Span) -> bool:
        """Whether the places of two chunks have a byte in common."""
        if self.segment != other.segment:
            return False
        return self.offset < other.offset + max(other.nbytes, 1) and other.offset < self.offset + max(self.nbytes, 1)


class Damaged(NamedTuple):
    """A log that was altered."""

    content: bytes
    broken: list[Span]
    """Records that cannot be read any more."""
    repeated: list[Span]
    """Records that are read a second time, behind later ones."""


Damage = Callable[[random.Random, bytes, list[Span]], Damaged]


def spans(path: Path) -> tuple[bytes, list[Span]]:
    """The log of the only shard below `path` up to its end, and its records."""
    (log,) = path.glob("*/log")
    found = []
    with open(log, "rb") as file:
        reader = Reader(file.fileno(), seed_of(str(log.parent)))
        for kind, _, _, segment, offset, nbytes, _, _, body in reader:
            page = b"" if kind == TOUCH else body[-KEY:]
            found.append(Span(reader.end - HEADER.size - len(body), reader.end, kind, page, segment, offset, nbytes))
        file.seek(0)
        return file.read(reader.end), found


def hit_by(records: Sequence[Span], start: int, end: int) -> list[Span]:
    """Records with a byte in `[start, end)`."""
    return [record for record in records if record.start < end and record.end > start]


def a_range(rng: random.Random, log: bytes, most: int) -> tuple[int, int]:
    start = rng.randrange(len(log))
    return start, min(len(log), start + rng.randint(1, most))


def flip(rng: random.Random, log: bytes, records: list[Span]) -> Damaged:
    bits = {rng.randrange(len(log) * 8) for _ in range(rng.choice([1, 1, 3, 10]))}
    content = bytearray(log)
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    broken = {record for bit in bits for record in hit_by(records, bit // 8, bit // 8 + 1)}
    return Damaged(bytes(content), sorted(broken), [])


def cut(rng: random.Random, log: bytes, records: list[Span]) -> Damaged:
    end = rng.randrange(len(log))
    return Damaged(log[:end], hit_by(records, end, len(log)), [])


def garbage(rng: random.Random, log: bytes, records: list[Span]) -> Damaged:
    """Over records, or between or inside of them, behind which everything has moved."""
    start, end = a_range(rng, log, 2000)
    noise = rng.choice([rng.randbytes(end - start), bytes(end - start), b"KVL1" * (-(-(end - start) // 4))])
    if rng.random() < 0.5:
        return Damaged(log[:start] + noise[: end - start] + log[end:], hit_by(records, start, end), [])
    return Damaged(log[:start] + noise + log[start:], hit_by(records, start - 1, start + 1)[:1], [])


def duplicated(rng: random.Random, log: bytes, records: list[Span]) -> Damaged:
    start, end = a_range(rng, log, len(log) // 2)
    at = rng.choice([end, len(log), rng.randrange(end, len(log) + 1)])
    repeated = [record for record in records if start <= record.start and record.end <= end]
    broken = [record for record in records if record.start < at < record.end]
    return Damaged(log[:at] + log[start:end] + log[at:], broken, repeated)


def removed(rng: random.Random, log: bytes, records: list[Span]) -> Damaged:
    start, end = a_range(rng, log, len(log) // 4)
    return Damaged(log[:start] + log[end:], hit_by(records, start, end), [])


def must_hit(records: Sequence[Span], live: set[bytes], damaged: Damaged) -> set[bytes]:
    """Chunks that are there and whose last record is: the damage has not touched them."""
    broken = set(damaged.broken)
    last = {record.page: record for record in records if record.kind == PUT}
    spared = {page: last[page] for page in live if last[page] not in broken}
    for again in damaged.repeated:
        if again.kind != TOUCH:
            spared = {
                page: record
                for page, record in spared.items()
                if again == record or not (page == again.page or again.overlaps(record))
            }
    return set(spared)


def damage_log(damage: Damage, campaign: Campaign) -> None:
    for run in campaign:
        with run:
            _damage_once(damage, run)


def _damage_once(damage: Damage, run: Run) -> None:
    rng, path = run.rng, run.path / "kv"
    prompts = [Prompt(number, rng.randint(1, 3 * CHUNK_PAGES)) for number in range(30)]
    config = settings(path, capacity="2MiB", segment="256KiB")
    with Cache.open(config, namespace()) as cache:
        _use(rng, Engine(cache, run), prompts)
    live = {entry.stored.key.page for entry in inspect_path(path).entries()}
    log, records = spans(path)
    damaged = damage(rng, log, records)
    (file,) = path.glob("*/log")
    file.write_bytes(damaged.content + bytes(rng.choice([0, 0, 100, 4096])))
    wanted = must_hit(records, live, damaged)
    run.seen("records", len(records))
    run.seen("broken", len(damaged.broken))
    run.seen("repeated", len(damaged.repeated))
    run.seen("chunks", len(live))
    run.seen("must hit", len(wanted))
    with Cache.open(config, namespace()) as cache:
        engine = Engine(cache, run)
        for prompt in prompts:
            pages = 0
            keys = cache.prompt(prompt.tokens).keys
            while pages < prompt.pages and keys[min(pages + CHUNK_PAGES, prompt.pages) - 1] in wanted:
                pages = min(pages + CHUNK_PAGES, prompt.pages)
            if (got := engine.retrieve(prompt)) < pages:
                run.lost(f"{got} pages of {prompt} came back, though the records of {pages} are whole")
        # Damage is noticed when it is read, and a chunk is read when those in front of it are there.
        if all([engine.serves(prompt, tries=len(range(0, prompt.pages, CHUNK_PAGES)) + 1) for prompt in prompts]):
            run.recovered()


def _use(rng: random.Random, engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Leave a log with records of all kinds, and places that were used again."""
    for prompt in prompts:
        engine.stored(prompt)
    for prompt in rng.sample(prompts, 10):
        engine.cache.evict(prompt.tokens)
    for prompt in rng.sample(prompts, 10):
        engine.retrieve(prompt)
    for prompt in rng.sample(prompts, 20):
        engine.stored(prompt)
    guard = engine.cache.client.node.guard  # type: ignore[attr-defined]
    with guard.turn, guard.mutex:
        guard.use().tick()  # passes uses on to the tier
    engine.cache.flush(10)


FAULTS = [
    Fault("log, bits flipped", 30, partial(damage_log, flip), few=6),
    Fault("log, cut", 20, partial(damage_log, cut), few=4),
    Fault("log, garbage", 20, partial(damage_log, garbage), few=4),
    Fault("log, a range twice", 15, partial(damage_log, duplicated), few=4),
    Fault("log, a range removed", 15, partial(damage_log, removed), few=4),
]
