"""Pages that stand for themselves are found, read and stored without those in front of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.connectors.sglang.snapshots import Snapshots, restorable
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace
from lmcache_core.wrappers.faulty import Faulty, every
from lmcache_core.wrappers.slow import Slow
from tests.connectors.sglang.host import Host, World, opened, prompt_keys

KEYS = prompt_keys(1, 20)
SHORT = Options(read_timeout=0.05, lookup_timeout=0.1, read_timeout_per_ki_token=0.0)


def states(host: Host) -> Namespace:
    group = Group(
        kind=GroupKind.STATE,
        layers=(0,),
        page_layer_bytes=host.page_bytes,
        dtype="uint8",
        kv_heads=0,
        head_size=0,
        planes=1,
    )
    encoding = Encoding(layout="native", engine="test", block_tokens=host.page_tokens, strides=(1,))
    return Namespace(weights="w", groups=(group,), page_tokens=host.page_tokens, encoding=encoding)


class Pages:
    """A host's pages, and the snapshots that they are stored as."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.host = world, world.host
        self.snapshots = Snapshots(world.client, world.client.register(states(world.host)), options)

    def store(self, keys: list[bytes]) -> list[bool]:
        for page, key in enumerate(keys):
            self.host.write(page, key)
        got = self.snapshots.set(keys, self.host.pages.view(range(len(keys))))
        self.host.wipe()
        return got

    def read(self, keys: list[bytes]) -> list[bool]:
        """Read pages; those that have come are right, and nothing else has."""
        self.host.wipe()
        places = list(range(len(keys)))[::-1]
        got = self.snapshots.get(keys, self.host.pages.view(places))
        for place, key, there in zip(places, keys, got, strict=True):
            assert self.host.holds(place, key) == there
        return got


@contextmanager
def pages(*backends: object, remote: Path | None = None, options: Options | None = None) -> Iterator[Pages]:
    options = options or Options()
    with opened(*backends, remote=remote, options=options, read_timeout=30.0) as world:  # type: ignore[arg-type]
        made = Pages(world, options)
        yield made
        made.snapshots.close()


@pytest.fixture(params=["direct", "remote"])
def some(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pages]:
    with pages(CpuBackend(CpuOptions()), remote=tmp_path if request.param == "remote" else None) as made:
        yield made


def test_each_page_stands_for_itself(some: Pages) -> None:
    assert some.store(KEYS[5:8]) == [True] * 3
    assert some.store(KEYS[12:13]) == [True]
    assert some.snapshots.present(KEYS, 2) == [5 <= place < 8 or place == 12 for place in range(20)]
    assert some.read([KEYS[4], KEYS[6], KEYS[12], KEYS[13]]) == [False, True, True, False]
    assert some.snapshots.present(KEYS[:8], 3) == [False] * 5 + [True] * 3
    some.world.forget("cpu")
    assert some.read(KEYS[5:8]) == [True] * 3
    assert some.snapshots.clear() > 0
    assert some.read(KEYS[5:8]) == [False] * 3


def test_a_tier_that_must_be_asked_is_asked_for_what_is_needed(some: Pages) -> None:
    some.store(KEYS[5:8])
    some.world.forget("cpu")
    other = Pages(some.world, Options())
    assert other.snapshots.present(KEYS[:8], 3)[5:] == [True] * 3
    other.snapshots.close()


def test_what_is_needed_is_kept_until_it_is_read() -> None:
    with pages() as some:
        some.store(KEYS[:4])
        assert some.snapshots.present(KEYS[:4], 2) == [True] * 4
        assert some.snapshots.present(KEYS[:4], 2) == [True] * 4
        assert some.world.leases == 2
        assert some.read(KEYS[2:4]) == [True] * 2
        assert some.world.leases == 0
        assert some.snapshots.present(KEYS[:4], 2) == [True] * 4
        some.snapshots.close()
        assert some.world.leases == 0


def test_reads_that_hang_end_in_time_and_land_nowhere() -> None:
    slow = Slow(CpuBackend(CpuOptions()))
    with pages(slow, options=SHORT) as some:
        some.store(KEYS[:4])
        some.world.forget("cpu")
        assert some.snapshots.present(KEYS[:4], 4) == [True] * 4
        slow.hang("read")
        assert some.read(KEYS[:4]) == [False] * 4
        slow.release()
        some.world.settle()
        assert some.host.blank


def test_whatever_is_read_is_right() -> None:
    chosen = random.Random(0)
    with pages(Faulty(CpuBackend(CpuOptions()), {"read": every(3), "write": every(4)}), options=SHORT) as some:
        hits = 0
        for _ in range(60):
            part = chosen.sample(KEYS, chosen.randrange(1, 8))
            if chosen.random() < 0.5:
                some.store(part)
            else:
                hits += sum(some.read(part))
            if chosen.random() < 0.2:
                some.world.forget("cpu")
        assert hits > 0


@pytest.mark.parametrize(
    ("there", "trailing", "lengths"),
    [
        ("", 1, []),
        ("111", 1, [1, 2, 3]),
        ("0110", 1, [2, 3]),
        ("0110", 2, [3]),
        ("110111", 3, [1, 2, 6]),
        ("0111", 5, []),
        ("1111", 5, [1, 2, 3, 4]),
    ],
)
def test_to_which_lengths_a_prefix_can_be_restored(there: str, trailing: int, lengths: list[int]) -> None:
    assert restorable([page == "1" for page in there], trailing) == lengths
