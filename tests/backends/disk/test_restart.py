"""What a later opening finds: values, order, usage; and what it clears away."""

import random
import stat
from pathlib import Path

import pytest

from lmcache_backends.disk import log
from lmcache_backends.disk.inspection import inspect_path
from lmcache_core.protocols import Chunk, ReadResult, WriteResult
from tests.backends.disk.kit import (
    KIB,
    MIB,
    SIZE,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    get,
    opened,
    order,
    put,
    shard_in,
    taken,
)


def test_values_order_and_usage_are_back(tmp_path: Path) -> None:
    chunks = [chunk(i, (1 + i % 3) * SIZE, pages=1 + i % 4, parent=chunk(i - 1).key.page) for i in range(20)]
    with opened(tmp_path) as store:
        fill(store, *chunks)
        store.touch([chunks[i].key for i in (3, 1, 3)])
        store.delete([chunks[0].key])
        usage, listed = store.usage(), [entry.stored() for entry in store.entries()]
    assert usage.nbytes == sum(c.data.nbytes for c in chunks[1:])
    with opened(tmp_path) as store:
        assert store.usage() == usage
        assert [entry.stored() for entry in store.entries()] == listed
        assert [stored.key for stored in listed] == [chunks[i].key for i in (2, *range(4, 20), 1, 3)]
        assert [stored.pages for stored in listed] == [chunks[i].pages for i in (2, *range(4, 20), 1, 3)]
        assert {stored.parent for stored in listed} == {c.parent for c in chunks[1:]}
        assert_holds(store, *chunks[1:])
        assert_lacks(store, chunks[0])


def test_use_after_a_restart_is_later_than_all_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0), chunk(1), chunk(2))
    monkeypatch.setattr("time.time_ns", lambda: 0)  # the clock was set back
    with opened(tmp_path) as store:
        store.touch([chunk(0).key])
        fill(store, chunk(3))
    with opened(tmp_path) as store:
        assert order(store) == [chunk(i).key for i in (1, 2, 0, 3)]


def test_an_overwritten_value_is_the_newer_one(tmp_path: Path) -> None:
    newer = [chunk(i, SIZE * (1 + i % 2), version=1) for i in range(8)]
    with opened(tmp_path) as store:
        fill(store, *map(chunk, range(8)))
        fill(store, *newer)
        assert store.usage().nbytes == sum(c.data.nbytes for c in newer)
    with opened(tmp_path) as store:
        assert_holds(store, *newer)
        assert store.usage().chunks == 8


def test_a_read_of_another_size_is_corrupt(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0))
        assert get(store, chunk(0).key, 2 * SIZE) is ReadResult.CORRUPT


def test_what_no_log_speaks_of_is_removed_and_strangers_files_are_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0))
    shard = shard_in(tmp_path)
    orphans = [shard / "log.new", shard / "segment-000000aa"]
    strangers = [shard / "segment-notes", tmp_path / "README", tmp_path / "0123456789abcdef.txt"]
    for file in orphans + strangers:
        file.write_bytes(bytes(8 * KIB))
    (tmp_path / "lost+found").mkdir()
    with opened(tmp_path) as store:
        assert store.count("orphans_removed") == 2
        assert not any(file.exists() for file in orphans)
        assert all(file.exists() for file in strangers)
        assert_holds(store, chunk(0))
        fill(store, *[chunk(i, MIB) for i in range(1, 3)])
        assert_holds(store, chunk(0), *[chunk(i, MIB) for i in range(1, 3)])
        assert (shard / "segment-000000ab").exists(), "the number of a segment is used once"


def test_a_segment_that_is_gone_or_short_costs_its_chunks_only(tmp_path: Path) -> None:
    chunks = [chunk(i, MIB) for i in range(4)]
    with opened(tmp_path) as store:
        fill(store, *chunks)
    first, second, *_ = sorted(shard_in(tmp_path).glob("segment-*"))
    first.unlink()
    with open(second, "r+b") as file:
        file.truncate(MIB - 1)
    with opened(tmp_path) as store:
        assert_lacks(store, *chunks[:2])
        assert_holds(store, *chunks[2:])
        assert store.count("entries_lost") == 2
        assert store.usage().nbytes == 2 * MIB

    with opened(tmp_path) as store:
        assert store.count("entries_lost") == 0, "it is known by now"
        assert_holds(store, *chunks[2:])


def test_what_was_evicted_with_its_segment_is_not_lost(tmp_path: Path) -> None:
    chunks = [chunk(i, MIB) for i in range(4)]
    with opened(tmp_path) as store:
        fill(store, *chunks)
        fill(store, chunk(0, MIB, version=1))  # in another place
        store.delete([c.key for c in chunks[1:]])
        assert store.count("segments_given_back") > 0
    (shard,) = inspect_path(tmp_path).shards
    assert (shard.lost, len(shard.entries)) == (0, 1)
    with opened(tmp_path) as store:
        assert store.count("entries_lost") == 0
        assert_holds(store, chunk(0, MIB, version=1))
        store.delete([chunk(0).key])
        assert taken(tmp_path) == 0
    with opened(tmp_path) as store:
        assert store.count("entries_lost") == store.usage().chunks == 0


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache"
    with opened(path) as store:
        fill(store, chunk(0))
        for found in path.rglob("*"):
            assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600), found
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def _number(stored: Chunk) -> int:
    return int.from_bytes(stored.key.page[:8], "big")


@pytest.mark.parametrize("changes", [{}, {"segment": 96 * KIB}, {"fsync": True}, {"direct": "never"}])
def test_sizes_that_do_not_divide_segments(tmp_path: Path, changes: dict[str, object]) -> None:
    """Chunks of all sizes come and go; at any time all are right, none share a place, and there is no leak."""
    rng, held = random.Random(1), dict[int, Chunk]()
    capacity = 2 * MIB + 5 * KIB
    for _ in range(3):
        with opened(tmp_path, capacity=capacity, **changes) as store:
            assert_holds(store, *held.values())
            for number in range(150):
                new = chunk(rng.randrange(40), 4 * KIB * rng.randrange(1, 60), version=number)
                key = _number(new)
                (result,) = put(store, new)
                if result is WriteResult.STORED:
                    held[key] = new
                else:
                    victims = [held.pop(victim).key for victim in rng.sample(sorted(held), len(held) // 2)]
                    store.delete(victims)
                assert taken(tmp_path) <= capacity
            assert_holds(store, *held.values())
            assert store.usage().nbytes == sum(c.data.nbytes for c in held.values())
            store.delete([c.key for c in held.values()])
            held.clear()
            assert taken(tmp_path) == 0, "nothing is stored, nothing is taken"
            held = {_number(c): c for c in (chunk(1, 512 * KIB), chunk(2, MIB))}
            fill(store, *held.values())


def test_room_of_equal_chunks_is_used_to_the_last(tmp_path: Path) -> None:
    nbytes = 600 * KIB
    with opened(tmp_path, capacity=10 * nbytes, segment=MIB) as store:
        results = put(store, *[chunk(i, nbytes) for i in range(11)])
        assert results == [WriteResult.STORED] * 10 + [WriteResult.FULL]


def test_a_full_disk_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr(log, "_RESERVE", 10**6)
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0))
        assert put(store, chunk(1, MIB)) == [WriteResult.FULL]
        assert store.count("enospc") > 0
        store.delete([chunk(0).key])
        assert_lacks(store, chunk(0))


def test_the_number_of_a_segment_that_was_given_back_is_not_used_again(tmp_path: Path) -> None:
    """Else a record that outlived its eviction would point into another segment."""
    with opened(tmp_path) as store:
        fill(store, *[chunk(i, MIB) for i in range(3)])
        store.delete([chunk(i).key for i in (1, 2)])
    assert len(list(shard_in(tmp_path).glob("segment-*"))) == 2, "one that is empty is kept"
    with opened(tmp_path) as store:
        fill(store, chunk(4, MIB))
    assert [file.name[-1] for file in sorted(shard_in(tmp_path).glob("segment-*"))] == ["1", "4"]
