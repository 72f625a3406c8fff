"""Damage inside the frames on a disk. Each damaged chunk is a miss, is counted and deleted; all others are hits."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import xxhash

from benchmarks.faults.campaign import Campaign, Fault, Run
from benchmarks.faults.engine import CHUNK_PAGES, PAGE_BYTES, Engine, Prompt, content, frame_shape, namespace, settings
from lmcache_backends.disk.inspection import Inspected, InspectedEntry, inspect_path
from lmcache_backends.disk.options import UNIT
from lmcache_backends.disk.records import Reader, put
from lmcache_backends.disk.shard import seed_of
from lmcache_core import Cache, frame
from lmcache_core.frame import FrameShape

__all__ = ["FAULTS"]

Damage = Callable[[random.Random, list[InspectedEntry], "Files"], list[InspectedEntry]]
"""Alters files; told all entries, answers which of them are damaged now."""

KEYS_AT, SUM_AT = 192, 40


def form_of(entry: InspectedEntry) -> FrameShape:
    return frame_shape(len(entry.stored.pages))


class Files:
    """The files of a cache, past the code under test."""

    def read(self, entry: InspectedEntry) -> bytearray:
        with open(entry.file, "rb") as file:
            file.seek(entry.offset)
            return bytearray(file.read(entry.stored.nbytes))

    def write(self, entry: InspectedEntry, at: int, data: bytes | bytearray) -> None:
        with open(entry.file, "r+b") as file:
            file.seek(entry.offset + at)
            file.write(data)


def flip(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """One bit, in any part of the frame: the payload would win a fair draw nearly always."""
    entry = rng.choice(entries)
    form = form_of(entry)
    table = KEYS_AT + 32 * form.pages
    payload_end = form.header_bytes + form.payload_bytes
    start, end = rng.choice(
        [
            (0, SUM_AT),
            (SUM_AT, SUM_AT + 16),
            (SUM_AT + 16, KEYS_AT),
            (KEYS_AT, table),
            (table, table + 24 * form.pages),
            (table + 24 * form.pages, form.header_bytes),
            (form.header_bytes, payload_end),
            (form.header_bytes, payload_end),
            (payload_end, form.nbytes),
        ]
    )
    bit = rng.randrange(start * 8, end * 8)
    whole = files.read(entry)
    files.write(entry, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))
    return [entry]


def cut(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """The file ends inside of a frame."""
    entry = rng.choice(entries)
    end = entry.offset + rng.randrange(entry.stored.nbytes)
    os.truncate(entry.file, end)
    return [other for other in entries if other.file == entry.file and other.offset + other.stored.nbytes > end]


def padding(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """Garbage behind the payload."""
    entry = rng.choice(entries)
    form = form_of(entry)
    start = form.header_bytes + form.payload_bytes
    start += rng.randrange(form.nbytes - start)
    files.write(entry, start, bytes(rng.randrange(1, 256) for _ in range(rng.randint(1, form.nbytes - start))))
    return [entry]


def longer(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """A header with a right checksum that claims more than there is: payload, pages, shards, or bytes of a page."""
    entry = rng.choice(entries)
    header = files.read(entry)[: form_of(entry).header_bytes]
    at, kind = rng.choice([(16, "<Q"), (24, "<I"), (28, "<I"), (32, "<Q"), (12, "<I")])
    (value,) = struct.unpack_from(kind, header, at)
    struct.pack_into(kind, header, at, value + rng.choice([1, 4096, 1 << 30]))
    files.write(entry, 0, summed(header))
    return [entry]


def swap(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """Two whole frames, each valid, in each other's place."""
    pairs = [(a, b) for a in entries for b in entries if a is not b and a.stored.nbytes == b.stored.nbytes]
    a, b = rng.choice(pairs)
    one, two = files.read(a), files.read(b)
    files.write(a, 0, two)
    files.write(b, 0, one)
    return [a, b]


def version(rng: random.Random, entries: list[InspectedEntry], files: Files) -> list[InspectedEntry]:
    """A header with a right checksum of another format version, or with a codec that nobody knows."""
    entry = rng.choice(entries)
    header = files.read(entry)[: form_of(entry).header_bytes]
    at, value = rng.choice([(8, 0), (8, 1), (8, 3), (8, 0xFFFF), (10, 9), (10, 0xFFFF)])
    struct.pack_into("<H", header, at, value)
    files.write(entry, 0, summed(header))
    return [entry]


def foreign(
    model: str, dtype: str, rng: random.Random, entries: list[InspectedEntry], files: Files
) -> list[InspectedEntry]:
    """A whole and valid frame with the same page keys, but of another model or type of numbers."""
    entry = rng.choice(entries)
    form, space = form_of(entry), namespace(model, dtype).space(0)
    whole = memoryview(bytearray(form.nbytes))
    for number, page in enumerate(entry.stored.pages):
        start = form.header_bytes + number * PAGE_BYTES
        whole[start : start + PAGE_BYTES] = content(page, space)
    frame.seal(whole, form, space, entry.stored.parent, entry.stored.pages)
    files.write(entry, 0, bytes(whole))
    return [entry]


def summed(header: bytearray) -> bytearray:
    """A header with its checksum made right."""
    header[SUM_AT : SUM_AT + 16] = bytes(16)
    header[SUM_AT : SUM_AT + 16] = xxhash.xxh3_128_digest(header)
    return header


def make_log_agree(entries: Sequence[InspectedEntry]) -> None:
    """Let the log know damaged frames as they are now, so that it is the frame's own checks that have to notice."""
    for entry in entries:
        shard = entry.file.parent
        stored, seed = entry.stored, seed_of(str(shard))
        chain = stored.parent + b"".join(stored.pages)
        with open(shard / "log", "r+b") as file:
            reader = Reader(file.fileno(), seed)
            epoch = max([int(record[6]) for record in reader]) + 1
            check = zlib.crc32(Files().read(entry)[:UNIT])
            segment = int(entry.file.name.removeprefix("segment-"), 16)
            place = (segment, entry.offset, stored.nbytes)
            file.seek(reader.end)
            file.write(put(seed, *place, epoch, check, stored.key.space, chain, not stored.parent))


def undamaged_pages(prompt: Prompt, keys: Sequence[bytes], damaged: set[bytes]) -> int:
    """Pages in front of the first damaged chunk, which the key of its last page names."""
    for first in range(0, prompt.pages, CHUNK_PAGES):
        last = min(first + CHUNK_PAGES, prompt.pages)
        if keys[last - 1] in damaged:
            return first
    return prompt.pages


def damage_frames(damage: Damage, campaign: Campaign) -> None:
    for run in campaign:
        with run:
            _damage_once(damage, run)


def _damage_once(damage: Damage, run: Run) -> None:
    rng, path = run.rng, run.path / "kv"
    prompts = [Prompt(number, rng.randint(CHUNK_PAGES + 1, 3 * CHUNK_PAGES)) for number in range(3)]
    prompts += [Prompt(3, CHUNK_PAGES), Prompt(4, CHUNK_PAGES)]  # so that two frames have one size
    while_open = rng.random() < 0.5
    config = settings(path, capacity="1MiB", segment="256KiB")
    cache = Cache.open(config, namespace())
    try:
        engine = Engine(cache, run)
        if not all([engine.stored(prompt) for prompt in prompts]):
            run.lost("could not be stored")
            return
        before = inspect_path(path)
        if while_open:
            cache.clear(["cpu"])
        else:
            cache.close()
        damaged = damage(rng, list(before.entries()), Files())
        if not while_open:
            if damage is not cut and rng.random() < 0.5:
                make_log_agree(damaged)
                run.seen("the log agrees")
            cache = Cache.open(config, namespace())
            engine = Engine(cache, run)
        run.seen("damaged", len(damaged))
        _check(run, engine, prompts, {entry.stored.key.page for entry in damaged}, path)
        if all([engine.serves(prompt) for prompt in prompts]):
            run.recovered()
    finally:
        cache.close()


def _check(run: Run, engine: Engine, prompts: Sequence[Prompt], damaged: set[bytes], path: Path) -> None:
    reached = 0
    for prompt in run.rng.sample(prompts, len(prompts)):
        pages = undamaged_pages(prompt, engine.cache.prompt(prompt.tokens).keys, damaged)
        reached += pages < prompt.pages
        engine.lookup(prompt)
        engine.expect(prompt, pages)
        if (again := engine.lookup(prompt)) > pages:
            run.wrong(f"{again} pages of {prompt} are promised again")
    counters = engine.tier().counters
    by_frame = engine.count("corrupt_chunks") - counters["values_damaged"]
    by_disk = counters["values_damaged"] + counters["entries_lost"]
    run.seen("noticed by the frame's checks", by_frame)
    run.seen("by the disk's", by_disk)
    if by_frame + by_disk < reached:
        run.lost(f"{by_frame + by_disk} of {reached} damaged chunks were counted")
    engine.cache.flush(10)
    if left := damaged_but_listed(inspect_path(path), damaged):
        run.lost(f"{left} damaged chunks have not been deleted")


def damaged_but_listed(now: Inspected, damaged: set[bytes]) -> int:
    """Chunks that were seen to be damaged and are still listed: all but those behind another damaged one."""
    listed = {entry.stored.key.page: entry.stored for entry in now.entries()}
    return sum(page in damaged and stored.parent in ({b""} | set(listed)) for page, stored in listed.items())


FAULTS = [
    Fault("frame, one bit flipped", 300, partial(damage_frames, flip), few=20),
    Fault("frame, file cut", 100, partial(damage_frames, cut), few=8),
    Fault("frame, garbage in its padding", 100, partial(damage_frames, padding), few=8),
    Fault("frame, header claims more", 100, partial(damage_frames, longer), few=8),
    Fault("frame, two swapped", 100, partial(damage_frames, swap), few=8),
    Fault("frame, of another model", 70, partial(damage_frames, partial(foreign, "other", "float16")), few=6),
    Fault("frame, of another dtype", 70, partial(damage_frames, partial(foreign, "model", "bfloat16")), few=6),
    Fault("frame, of another version", 60, partial(damage_frames, version), few=6),
]
