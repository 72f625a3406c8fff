"""Files that somebody else wrote, or nobody: opening and using them never crashes and never takes much memory."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from benchmarks.faults.campaign import Report, Run, until
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, frame_shape, namespace, settings
from lmcache_backends.disk.records import HEADER, Reader
from lmcache_backends.disk.shard import seed_of
from lmcache_core import Cache, FrameError, frame

MUCH = 48 << 20
"""Bytes; a log is read in windows of 8 MiB, and the pool is not counted."""
EXTREMES = [0, 1, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def forge(rng: random.Random, log: Path) -> None:
    """Records whose checksums are right and whose numbers are not."""
    seed = seed_of(str(log.parent))
    fields: list[Any]
    with open(log, "r+b") as file:
        reader = Reader(file.fileno(), seed)
        known = list(reader)
        file.seek(reader.end)
        for _ in range(50):
            *fields, body = rng.choice(known)
            for _ in range(rng.randint(1, 3)):
                fields[rng.randrange(8)] = rng.choice(EXTREMES)
            kind, flags, count, segment, offset, nbytes, epoch, check = fields
            if rng.random() < 0.3:
                body = rng.randbytes(rng.choice([0, 31, 32, 64, 5000]))
            numbers = (kind & 0xFF, flags & 0xFF, count & 0xFFFF, segment & 0xFFFFFFFF, offset, nbytes, epoch)
            header = HEADER.pack(b"KVL1", 0, HEADER.size + len(body), *numbers, check & 0xFFFFFFFF)
            crc = zlib.crc32(header[8:] + body, seed)
            file.write(header[:4] + struct.pack("<I", crc) + header[8:] + body)


def noise(rng: random.Random, log: Path) -> None:
    log.write_bytes(rng.choice([rng.randbytes(300_000), b"KVL1" * 100_000, bytes(1 << 20)]))


def lengths(rng: random.Random, log: Path) -> None:
    """Records that claim to be long."""
    content = b"".join(
        HEADER.pack(b"KVL1", rng.getrandbits(32), rng.choice(EXTREMES) & 0xFFFFFFFF, 1, 0, 1, 0, 0, 4096, 1, 0)
        for _ in range(3000)
    )
    log.write_bytes(content)


def enormous_log(rng: random.Random, log: Path) -> None:
    os.truncate(log, 1 << 28)


def enormous_segment(rng: random.Random, log: Path) -> None:
    for segment in log.parent.glob("segment-*"):
        os.truncate(segment, 1 << 40)
    with open(log.parent / "segment-000000ff", "wb") as file:
        file.truncate(1 << 40)


def odd_files(rng: random.Random, log: Path) -> None:
    shard = log.parent
    for segment in rng.sample(sorted(shard.glob("segment-*")), 2):
        segment.unlink()
        match rng.randrange(3):
            case 0:
                segment.mkdir()
            case 1:
                segment.symlink_to("/dev/zero")
            case 2:
                os.mkfifo(segment)
    (shard / "segment-").write_bytes(b"x")
    (shard / "segment-0000000g").write_bytes(b"x")
    (shard / "segment-ffffffff").write_bytes(b"x" * 5000)
    (shard / "log.new").write_bytes(rng.randbytes(1000))
    (shard.parent / "0123456789abcdef").write_text("no directory")
    (shard.parent / "fedcba9876543210").symlink_to(shard)


def odd_manifests(rng: random.Random, log: Path) -> None:
    for manifest in (log.parents[1] / "manifests").iterdir():
        manifest.write_bytes(rng.randbytes(5000))
        with open(manifest.with_name("ab" * 32 + ".json"), "wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize(
    "damage",
    [forge, noise, lengths, enormous_log, enormous_segment, odd_files, odd_manifests],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_files_never_crash_or_take_much_memory(
    damage: Callable[[random.Random, Path], None], seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    report = Report("fuzz")
    run = Run(report, 0, seed, tmp_path)
    config = settings(tmp_path / "kv", capacity="2MiB", segment="64KiB")
    prompts = [Prompt(number, rng.randint(1, 3 * CHUNK_PAGES)) for number in range(20)]
    with Cache.open(config, namespace()) as cache:
        assert all([Engine(cache, run).stored(prompt) for prompt in prompts])
    (log,) = (tmp_path / "kv").glob("*/log")
    damage(rng, log)
    tracemalloc.start()
    try:
        with Cache.open(config, namespace()) as cache:
            engine = Engine(cache, run, deadline=20.0)
            for prompt in prompts:
                engine.retrieve(prompt)
                engine.store(prompt)
            assert until(lambda: engine.tier().up, 10), "the tier does not come up"
            assert until(lambda: engine.serves(Prompt(99, 2 * CHUNK_PAGES)), 10), report.notes[-1:]
        assert tracemalloc.get_traced_memory()[1] < MUCH
    finally:
        tracemalloc.stop()
    assert not report.wrong
    assert not [note for note in report.notes if "wrong: " in note or "lost: " in note]


def test_fuzzed_headers_are_frame_errors_and_take_no_memory() -> None:
    rng = random.Random(0)
    form = frame_shape()
    whole = memoryview(bytearray(form.nbytes))
    keys = [rng.randbytes(32) for _ in range(form.pages)]
    space, parent = rng.randbytes(32), rng.randbytes(32)
    frame.seal(whole, form, space, parent, keys)
    tracemalloc.start()
    try:
        for _ in range(3000):
            header = bytearray(whole[: form.header_bytes])
            for _ in range(rng.randint(1, 4)):
                at, size = rng.choice(
                    [(8, 2), (10, 2), (12, 4), (16, 8), (24, 4), (28, 4), (32, 8), (40, 16), (96, 32)]
                )
                value = rng.choice([*EXTREMES, rng.getrandbits(64)]) % (1 << 8 * size)
                header[at : at + size] = value.to_bytes(size, "little")
            if rng.random() < 0.7:
                header[40:56] = bytes(16)
                header[40:56] = xxhash.xxh3_128_digest(header)
            if header == whole[: form.header_bytes]:
                continue
            if not any(header[96:128]):
                continue  # without a parent it is the same chunk
            cut = header[: rng.choice([len(header), rng.randrange(len(header))])]
            try:
                found = frame.read_header(bytes(cut))
            except FrameError:
                pass
            else:
                assert found.form == form
            damaged = memoryview(bytearray(header) + bytearray(whole[form.header_bytes :]))
            with pytest.raises(FrameError):
                frame.verify(damaged, form, space, parent, keys)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
