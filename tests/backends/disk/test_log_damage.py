"""Logs that are cut short, altered, copied or made up: what is damaged is a miss, everything else hits."""

import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_backends.disk import records
from lmcache_backends.disk.inspection import inspect_path
from lmcache_backends.disk.records import HEAD, HEADER, Reader
from lmcache_backends.disk.replay import Replay
from lmcache_backends.disk.shard import seed_of
from lmcache_core.protocols import Chunk, ReadResult
from tests.backends.disk.kit import (
    KIB,
    MIB,
    SIZE,
    assert_holds,
    assert_lacks,
    chunk,
    copy_of,
    fill,
    get,
    opened,
    order,
    shard_in,
    tree,
)

VALUES = {(i, version): chunk(i, 4 * KIB, version=version) for i in range(14) for version in (0, 1)}
SPACE, PAGES = b"s" * 32, [bytes([65 + i]) * 32 for i in range(8)]


def spans(content: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Start and end of each record of an undamaged log."""
    at = len(HEAD)
    while content[at : at + 4] == records.MAGIC:
        length = HEADER.unpack_from(content, at)[2]
        yield at, at + length
        at += length


def test_a_log_torn_at_any_byte_loses_its_last_record_only(tmp_path: Path) -> None:
    chunks = [chunk(i, 4 * KIB) for i in range(4)]
    with opened(tmp_path, capacity=MIB) as store:
        fill(store, *chunks)
    log = shard_in(tmp_path) / "log"
    content = log.read_bytes()
    *_, (start, end) = spans(content)
    for cut in range(start, end):
        # As a crash leaves it: the file ends there, or zeros that were allocated ahead follow.
        log.write_bytes(content[:cut] + bytes(len(content) - cut if cut % 2 else 0))
        with opened(tmp_path, capacity=MIB) as store:
            assert order(store) == [c.key for c in chunks[:3]]
            assert store.count("log_tails_cut") == (cut > start)
            assert store.count("log_records_damaged") == 0
            assert_lacks(store, chunks[3])
            fill(store, chunks[3])
        with opened(tmp_path, capacity=MIB) as store:
            assert store.count("log_tails_cut") == 0
            assert_holds(store, *chunks)


@pytest.fixture(scope="module")
def used_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose log has records of all kinds."""
    path = tmp_path_factory.mktemp("damage") / "used"
    with opened(path, capacity=MIB) as store:
        fill(store, *[chunk(i, 4 * KIB, pages=1 + i % 4, parent=chunk(i - 1).key.page) for i in range(12)])
        store.touch([chunk(i).key for i in (3, 5)])
        store.delete([chunk(i).key for i in (0, 1)])
        fill(store, *[chunk(i, 4 * KIB, version=1) for i in (2, 3, 12, 13)])
        store.delete([chunk(4).key])
    return path


def versions(number: int) -> list[bytes]:
    return [bytes(VALUES[number, version].data) for version in (0, 1)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=6))
def test_damage_anywhere_loses_what_it_hits(used_cache: Path, tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    path = copy_of(used_cache, tmp_path / "damaged")
    log = shard_in(path) / "log"
    content = bytearray(log.read_bytes())
    whole = list(spans(content))
    hit = set[int]()
    for position, change in damage:
        position %= whole[-1][1]
        content[position] ^= change
        hit.update(i for i, (start, end) in enumerate(whole) if start <= position < end)
    before, last = log.read_bytes(), dict[bytes, int]()
    for i, (start, end) in enumerate(whole):
        if HEADER.unpack_from(before, start)[3] == records.PUT:
            last[before[end - 32 : end]] = i
    log.write_bytes(content)
    gone = {0, 1, 4}
    with opened(path, capacity=MIB) as store:
        for number in range(14):
            record = last[VALUES[number, 0].key.page]
            found = get(store, VALUES[number, 0].key, 4 * KIB)
            assert found in (ReadResult.MISS, ReadResult.CORRUPT, *versions(number)), "bytes of another chunk"
            if record not in hit and number not in gone:
                version = int(number in (2, 3, 12, 13))
                assert found == versions(number)[version], f"{number} was not damaged"
        listed, usage = order(store), store.usage()
    with opened(path, capacity=MIB) as store:  # what was found is found again, and the damage was cleared away
        assert (order(store), store.usage()) == (listed, usage)
        assert store.count("log_records_damaged") == 0


def test_a_lost_eviction_shows_when_its_place_is_used_again(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=256 * KIB, segment=256 * KIB) as store:
        fill(store, *[chunk(i, 64 * KIB) for i in range(4)])
        store.delete([chunk(i).key for i in (1, 2)])
        fill(store, chunk(5, 32 * KIB), chunk(6, 96 * KIB))  # the second begins inside of 1 and ends with 2
    log = shard_in(tmp_path) / "log"
    content = bytearray(log.read_bytes())
    evictions = [start for start, _ in spans(content) if HEADER.unpack_from(content, start)[3] == records.EVICT]
    for start in evictions:
        content[start + 20] ^= 1
    log.write_bytes(content)
    with opened(tmp_path, capacity=256 * KIB, segment=256 * KIB) as store:
        assert store.count("log_records_damaged") == 1, "the two lie side by side"
        assert_holds(store, chunk(0, 64 * KIB), chunk(3, 64 * KIB), chunk(5, 32 * KIB), chunk(6, 96 * KIB))
        assert_lacks(store, chunk(1, 64 * KIB), chunk(2, 64 * KIB))
        assert store.usage().chunks == 4


def test_a_place_whose_use_was_lost_twice_gives_no_other_chunks_bytes(tmp_path: Path) -> None:
    """The eviction of a chunk is damaged, and so is the record of what took its place."""
    with opened(tmp_path, capacity=2 * SIZE, segment=2 * SIZE) as store:
        fill(store, chunk(0), chunk(1))
        store.delete([chunk(0).key])
        fill(store, chunk(2))
    log = shard_in(tmp_path) / "log"
    content = bytearray(log.read_bytes())
    for start, _ in list(spans(content))[2:]:
        content[start + 20] ^= 1
    log.write_bytes(content)
    with opened(tmp_path, capacity=2 * SIZE, segment=2 * SIZE) as store:
        assert get(store, chunk(0).key) is ReadResult.CORRUPT
        assert store.count("values_damaged") == 1
        assert_holds(store, chunk(1))
        store.delete([chunk(0).key])
        fill(store, chunk(3))
        assert_holds(store, chunk(1), chunk(3))


def sealed(seed: int, segment: int, offset: int, nbytes: int, page: int = 0) -> bytes:
    return records.put(seed, segment, offset, nbytes, 1, 0, SPACE, PAGES[page], True)


MADE_UP: dict[str, Callable[[int], bytes]] = {
    "a segment that does not exist": lambda seed: sealed(seed, 77, 0, SIZE),
    "behind the end": lambda seed: sealed(seed, 1, 2**40, SIZE),
    "over the end": lambda seed: sealed(seed, 1, 4096, 2**62),
    "between units": lambda seed: sealed(seed, 1, 5, SIZE),
    "no bytes": lambda seed: sealed(seed, 1, 0, 0),
    "no pages": lambda seed: records.put(seed, 1, 0, SIZE, 1, 0, SPACE, b"", True),
    "half a page": lambda seed: records.put(seed, 1, 0, SIZE, 1, 0, SPACE, PAGES[0] + b"x" * 16, True),
    "another log's checksum": lambda seed: sealed(seed + 1, 1, 0, SIZE),
    "a touch of nothing": lambda seed: records.touch(seed, 5, [(9, 9), (1, 2**32 - 1)]),
    "an eviction of nothing": lambda seed: records.evict(seed, 9, 9, SPACE, PAGES[1]),
    "a kind of a later version": lambda seed: records._sealed(seed, 99, 0, 0, 0, 0, 0, 0, 0, b"news"),
    "a flag of a later version": lambda seed: records._sealed(
        seed, records.PUT, 2, 1, 1, 0, SIZE, 1, 0, SPACE + PAGES[0]
    ),
    "a touch of another shape": lambda seed: records._sealed(seed, records.TOUCH, 0, 1, 0, 0, 0, 5, 0, b"x" * 12),
    "a touch of more than it says": lambda seed: records._sealed(seed, records.TOUCH, 0, 1, 0, 0, 0, 5, 0, b"x" * 16),
    "a touch at the end of time": lambda seed: records.touch(seed, 2**64 - 1, [(1, 0)]),
    "an eviction of another shape": lambda seed: records._sealed(seed, records.EVICT, 0, 0, 1, 0, 0, 0, 0, SPACE),
    "a use at the end of time": lambda seed: records.put(seed, 1, 0, SIZE, 2**64 - 1, 0, SPACE, PAGES[0], True),
    "the last segment there can be": lambda seed: sealed(seed, 2**32 - 1, 0, SIZE),
}
TRUE = {
    "a segment that does not exist",
    "behind the end",
    "over the end",
    "another log's checksum",
    "a touch of nothing",
    "an eviction of nothing",
}
"""Of these, records that may be written, or are none."""


@pytest.mark.parametrize("name", MADE_UP)
def test_records_that_cannot_be_true_are_passed_over(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, capacity=MIB) as store:
        fill(store, chunk(0))
    shard = shard_in(tmp_path)
    log = shard / "log"
    content = log.read_bytes()
    *_, (_, end) = spans(content)
    log.write_bytes(content[:end] + MADE_UP[name](seed_of(os.fspath(shard))) + content[end:])
    odd = name not in TRUE
    (seen,) = inspect_path(tmp_path).shards
    assert (seen.damaged, len(seen.entries)) == (odd, 1)
    with opened(tmp_path, capacity=MIB) as store:
        assert store.count("log_records_damaged") == odd
        assert order(store) == [chunk(0).key]
        assert_holds(store, chunk(0))
        fill(store, chunk(1))
        assert_holds(store, chunk(0), chunk(1))
        store.delete([chunk(1).key])
        fill(store, chunk(2, 64 * KIB))  # takes another segment
    with opened(tmp_path, capacity=MIB) as store:
        assert store.count("log_records_damaged") == store.count("entries_lost") == 0, "the log was cleared of it"
        assert_holds(store, chunk(0), chunk(2, 64 * KIB))


NUMBERS = st.integers(0, 3) | st.sampled_from([SIZE, 2**31, 2**32 - 1])
LONG = NUMBERS | st.sampled_from([4096, 2**62, 2**63, 2**64 - 1])
BODIES = st.binary(max_size=200) | st.lists(st.sampled_from([SPACE, *PAGES]), max_size=5).map(b"".join)
SEALED = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), NUMBERS, LONG, LONG, LONG, NUMBERS, BODIES)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made_up=st.lists(SEALED, max_size=30))
def test_whole_records_of_any_content_break_nothing(used_cache: Path, tmp_path: Path, made_up: list[Any]) -> None:
    """What another revision, or a bug of this one, may have left."""
    path = copy_of(used_cache, tmp_path / "made-up")
    shard = shard_in(path)
    content = (shard / "log").read_bytes()
    *_, (_, end) = spans(content)
    seed = seed_of(os.fspath(shard))
    (shard / "log").write_bytes(content[:end] + b"".join(records._sealed(seed, *fields) for fields in made_up))
    (seen,) = inspect_path(path).shards
    with opened(path, capacity=MIB) as store:
        assert order(store) == [entry.stored.key for entry in seen.entries]
        assert (store.count("log_records_damaged"), store.count("entries_lost")) == (seen.damaged, seen.lost)
        for number in range(14):
            found = get(store, VALUES[number, 0].key, 4 * KIB)
            assert found in (ReadResult.MISS, ReadResult.CORRUPT, *versions(number)), "bytes of another chunk"
        store.delete(order(store))
        fill(store, *[chunk(100 + i, 4 * KIB) for i in range(3)])
        store.touch([chunk(100).key])
    with opened(path, capacity=MIB) as store:
        assert order(store) == [chunk(i).key for i in (101, 102, 100)]
        assert_holds(store, *[chunk(100 + i, 4 * KIB) for i in range(3)])


def in_format(number: int, content: bytes) -> bytes:
    """A log as a version with another format would have begun it."""
    head = HEAD[:8] + number.to_bytes(4, "little")
    return head + zlib.crc32(head).to_bytes(4, "little") + content[len(HEAD) :]


def test_a_log_of_another_format_is_set_aside_and_makes_room_when_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, capacity=8 * SIZE, segment=SIZE) as store:
        fill(store, *[chunk(i) for i in range(4)])
    theirs = shard_in(tmp_path)
    content = (theirs / "log").read_bytes()
    (theirs / "log").write_bytes(in_format(2, content))
    before = tree(theirs)
    with opened(tmp_path, capacity=8 * SIZE, segment=SIZE) as store:
        assert (store.count("shards_unreadable"), store.count("shards_adopted")) == (1, 0)
        assert [record.message for record in caplog.records if theirs.name in record.message]
        assert len(caplog.records) == 1
        assert_lacks(store, *[chunk(i) for i in range(4)])
        fill(store, *[chunk(i) for i in range(10, 14)])
        assert tree(theirs) == before, "it is left as it is"
        seen = {shard.name: shard for shard in inspect_path(tmp_path).shards}
        assert not seen[theirs.name].readable
        assert (seen[theirs.name].nbytes, seen[theirs.name].entries) == (4 * SIZE, ())
        assert [shard.readable for shard in seen.values()].count(True) == 1
    (theirs / "log").write_bytes(in_format(records.FORMAT, content))
    with opened(tmp_path, capacity=8 * SIZE, segment=SIZE) as store:
        assert_holds(store, *[chunk(i) for i in (0, 1, 2, 3, 10, 11, 12, 13)])
    (theirs / "log").write_bytes(in_format(2, content))
    with opened(tmp_path, capacity=8 * SIZE, segment=SIZE) as store:
        fill(store, *[chunk(i) for i in range(20, 24)])
        assert store.count("shards_evicted") == 1
        assert not theirs.exists()
        assert_holds(store, *[chunk(i) for i in (*range(10, 14), *range(20, 24))])


def test_records_of_another_format_are_no_records_even_where_the_beginning_is_damaged(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=MIB) as store:
        fill(store, chunk(0))
    log = shard_in(tmp_path) / "log"
    content = log.read_bytes()
    log.write_bytes(bytes(len(HEAD)) + content[len(HEAD) :].replace(b"KVL1", b"KVL2"))
    with opened(tmp_path, capacity=MIB) as store:
        assert store.usage().chunks == 0
        fill(store, chunk(1))
    log = shard_in(tmp_path) / "log"
    assert log.read_bytes()[: len(HEAD)] == HEAD
    log.write_bytes(b"\xff" * len(HEAD) + log.read_bytes()[len(HEAD) :])
    with opened(tmp_path, capacity=MIB) as store:
        assert_holds(store, chunk(1))
        assert store.count("log_records_damaged") == 1
    assert log.read_bytes()[: len(HEAD)] == HEAD, "it was written anew"


def test_a_log_of_another_shard_is_worth_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with opened(tmp_path / name, capacity=MIB) as store:
            fill(store, chunk(0), chunk(1 if name == "a" else 2))
    (shard_in(tmp_path / "b") / "log").write_bytes((shard_in(tmp_path / "a") / "log").read_bytes())
    with opened(tmp_path / "b", capacity=MIB) as store:
        assert store.usage().chunks == 0


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.binary(max_size=80) | st.sampled_from(list(MADE_UP)), max_size=12))
def test_no_content_breaks_reading(pieces: list[bytes | str]) -> None:
    content = b"".join(piece if isinstance(piece, bytes) else MADE_UP[piece](0) for piece in pieces)
    fd = os.memfd_create("log")
    try:
        os.pwrite(fd, content, 0)
        for careful in (False, True):
            reader, replay = Reader(fd, 0), Replay({1: MIB}, careful)
            replay.apply(reader)
            assert 0 <= reader.end <= len(content)
            assert not replay.by_key
    finally:
        os.close(fd)


def test_records_across_windows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large logs are read piece by piece; damage and records at the seams change nothing."""
    monkeypatch.setattr(records, "_LARGEST", 400)
    pieces = [sealed(0, i, 0, SIZE, i % 8) for i in range(40)]
    rng = random.Random(3)
    for window in range(450, 700, 7):
        monkeypatch.setattr(records, "_WINDOW", window)
        broken = rng.sample(range(39), 5)
        content = b"".join(
            piece[:50] + b"\xff" + piece[51:] if i in broken else piece for i, piece in enumerate(pieces)
        )
        fd = os.memfd_create("log")
        try:
            os.pwrite(fd, content + bytes(1000), 0)
            reader = Reader(fd, 0)
            assert [record[3] for record in reader] == [i for i in range(40) if i not in broken]
            assert reader.end == len(content)
            assert not reader.torn
            assert reader.gaps == sum(i - 1 not in broken for i in broken)
        finally:
            os.close(fd)


def test_zeros_amid_the_log_are_damage(tmp_path: Path) -> None:
    """A power cut may lose a page of the log that was written before others."""
    chunks: list[Chunk] = [chunk(i, 4 * KIB) for i in range(60)]
    with opened(tmp_path, capacity=MIB) as store:
        fill(store, *chunks)
    log = shard_in(tmp_path) / "log"
    content = bytearray(log.read_bytes())
    lost = [i for i, (start, end) in enumerate(spans(content)) if start < 8192 and end > 4096]
    content[4096:8192] = bytes(4096)
    log.write_bytes(content)
    with opened(tmp_path, capacity=MIB) as store:
        assert store.count("log_records_damaged") == 1
        assert order(store) == [c.key for i, c in enumerate(chunks) if i not in lost]
        assert_holds(store, *[c for i, c in enumerate(chunks) if i not in lost])


@pytest.mark.parametrize("behind", [False, True])
def test_a_log_longer_than_any_drive_is_read_where_it_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0), chunk(1))
    log = shard_in(tmp_path) / "log"
    content = log.read_bytes()
    (start, end) = list(spans(content))[-1]
    with log.open("r+b") as file:
        file.truncate(1 << 40)
        if behind:
            file.seek(start)
            file.write(bytes(end - start))
            file.seek((1 << 39) + 777)
            file.write(content[start:end])
    reads = 0
    pread = os.pread

    def counted(*args: Any) -> bytes:
        nonlocal reads
        reads += 1
        assert reads < 50
        return pread(*args)

    monkeypatch.setattr(os, "pread", counted)
    assert len(list(inspect_path(tmp_path).entries())) == 2
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0), chunk(1))
        assert store.count("log_records_damaged") == behind
        assert store.count("log_tails_cut") == 0
    assert log.stat().st_size < 2 * MIB
    assert log.stat().st_blocks * 512 >= 256 * KIB, "it has room of its own again"
