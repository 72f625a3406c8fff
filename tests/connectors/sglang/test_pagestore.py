"""What is stored of an engine's pages is found and read again, whole and right, whatever happens; nothing else is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from lmcache_core.wrappers.corrupting import Corrupting
from lmcache_core.wrappers.faulty import Faulty, always, every
from lmcache_core.wrappers.slow import Slow
from tests.connectors.sglang.host import LAYOUTS, Host, World, opened, prompt_keys
from tests.node.kv import until
from tests.node.shelf import Shelf

KEYS = prompt_keys(1, 40)
SHORT = Options(read_timeout=0.05, read_timeout_per_ki_token=0.0, lookup_timeout=0.2, store_timeout=0.05)


def tier() -> CpuBackend:
    return CpuBackend(CpuOptions())


class Unlisted:
    """A shelf that outlives a node and is asked by name alone."""

    def __init__(self) -> None:
        shelf = self.shelf = Shelf()
        self.open, self.close = shelf.open, shelf.close
        self.contains, self.read, self.write, self.delete = shelf.contains, shelf.read, shelf.write, shelf.delete


@pytest.fixture(params=["direct", "remote"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with opened(tier(), remote=tmp_path if request.param == "remote" else None) as made:
        yield made


# Finding and reading


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_read_into_other_pages(layout: str) -> None:
    with opened(tier(), host=Host(layout)) as world:
        assert world.compute(KEYS[:10]) == 10
        assert world.fetch(KEYS[:10]) == 10
        world.forget("cpu")
        assert world.fetch(KEYS[:10]) == 10


def test_the_longest_prefix_is_found(world: World) -> None:
    world.compute(KEYS[:10])
    assert world.store.exists(KEYS) == 10
    assert world.store.exists(KEYS[:7]) == 7
    assert world.store.exists(prompt_keys(2, 10)) == 0
    assert world.store.exists(KEYS[10:], KEYS[:10]) == 0
    assert world.store.exists([]) == 0


def test_runs_that_follow_each_other_share_chunks(world: World) -> None:
    world.compute(KEYS[:6])
    world.compute(KEYS[6:7], KEYS[:6])
    world.compute(KEYS[7:18], KEYS[:7])
    world.settle()
    until(lambda: world.chunks == 5)  # four of four pages, and one of two
    for start in range(18):
        assert world.fetch(KEYS[start:18], KEYS[:start]) == 18 - start
    world.forget("cpu")
    assert world.fetch(KEYS[:18]) == 18


def test_many_small_runs_make_no_more_chunks_than_one_run(world: World) -> None:
    for start in range(0, 40, 2):
        assert world.compute(KEYS[start : start + 2], KEYS[:start]) == 2
    world.settle()
    until(lambda: world.chunks == 10)
    assert world.fetch(KEYS) == 40


def test_a_run_whose_place_is_not_known_begins_a_stretch_of_its_own(world: World) -> None:
    for start, end in ((0, 6), (6, 7), (7, 18), (18, 40)):
        assert world.compute(KEYS[start:end]) == end - start
    assert world.fetch(KEYS) == 40
    assert world.fetch(KEYS, batch=3) == 40
    assert world.fetch(KEYS[6:]) == 34
    world.forget("cpu")
    assert world.fetch(KEYS, batch=5) == 40


@pytest.mark.parametrize("start", range(0, 18))
def test_a_new_node_finds_the_rest_of_what_an_engine_has_the_beginning_of(start: int) -> None:
    """On a tier that is asked by name: what is in front of the first chunk is not asked for."""
    tier = Unlisted()
    with opened(tier) as world:
        for before, end in ((0, 6), (6, 7), (7, 13), (13, 18)):
            world.compute(KEYS[before:end], KEYS[:before])
        world.settle()
    with opened(tier) as world:
        assert world.fetch(KEYS[start:18], KEYS[:start]) == 18 - start
        world.forget("cpu")
        assert world.fetch(KEYS[start:18], KEYS[:start]) == 18 - start
    assert not any(verb == "delete" for verb, _ in tier.shelf.calls)


def test_a_run_behind_pages_that_are_gone_begins_a_stretch_of_its_own(world: World) -> None:
    world.compute(KEYS[:6])
    world.forget("cpu", "tier0")
    assert world.compute(KEYS[6:20], KEYS[:6]) == 14
    assert world.fetch(KEYS[6:20], KEYS[:6]) == 14
    world.compute(KEYS[:6])
    assert world.fetch(KEYS[:20]) == 20


def test_a_run_behind_whole_chunks_that_are_gone_is_stored(world: World) -> None:
    world.compute(KEYS[:8])
    world.forget("cpu", "tier0")
    assert world.compute(KEYS[8:20], KEYS[:8]) == 12
    assert world.fetch(KEYS[8:20], KEYS[:8]) == 12


def test_pages_in_front_whose_own_chunk_in_front_is_gone_still_share_theirs(world: World) -> None:
    world.compute(KEYS[4:6])
    assert world.compute(KEYS[6:12], KEYS[:6]) == 6
    until(lambda: world.chunks == 2)
    assert world.fetch(KEYS[4:12], KEYS[:4]) == 8


def test_a_look_up_asks_no_second_time_where_no_chunk_can_begin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.compute(KEYS[:8])
    world.compute(prompt_keys(2, 7))
    hold, asked = world.client.hold, []

    def counting(model: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(keys))
        return hold(model, keys, *args, **kwargs)

    monkeypatch.setattr(world.client, "hold", counting)
    assert world.store.exists(KEYS) == 8
    assert asked in ([40], [40, 40])  # the latter where a tier has been waited for
    asked.clear()
    assert world.store.exists(prompt_keys(2, 7)) == 7
    assert world.store.exists([*prompt_keys(2, 7), *prompt_keys(3, 5)]) == 7
    assert asked[-1] == 5


def test_the_pages_in_front_are_read_from_a_tier(world: World) -> None:
    world.compute(KEYS[:6])
    world.forget("cpu")
    assert world.compute(KEYS[6:12], KEYS[:6]) == 6
    world.settle()
    until(lambda: world.chunks == 2)  # anew, of four pages each
    world.forget("cpu")
    assert world.fetch(KEYS[:12]) == 12


def test_pages_are_read_in_batches_that_end_inside_chunks(world: World) -> None:
    world.compute(KEYS)
    for batch in (1, 3, 5, 7, 16):
        assert world.fetch(KEYS, batch=batch) == 40
    world.forget("cpu")
    assert world.fetch(KEYS, batch=7) == 40


def test_pages_are_read_without_having_been_looked_up(world: World) -> None:
    world.compute(KEYS[:10])
    assert world.read(KEYS[3:9], KEYS[:3]) == 6
    assert world.read(KEYS[4:12], KEYS[:4]) == 6
    assert world.read(KEYS[20:22], KEYS[:20]) == 0


def test_pages_may_be_read_from_the_middle_of_what_was_found(world: World) -> None:
    world.compute(KEYS[:20])
    assert world.store.exists(KEYS[:20]) == 20
    assert world.read(KEYS[9:15], KEYS[:9]) == 6
    assert world.read(KEYS[15:20], KEYS[:15]) == 5
    assert world.read(KEYS[:4]) == 4


def test_what_is_there_already_is_not_stored_again(world: World) -> None:
    world.compute(KEYS[:8])
    world.host.wipe()  # as if something else had been computed
    assert world.store.set(KEYS[:8], world.host.pages.view(range(8))) == 8
    assert world.fetch(KEYS[:8]) == 8


@pytest.mark.parametrize("length", range(14))
def test_what_lies_far_in_front_need_not_be_told(world: World, length: int) -> None:
    told = world.store.needed_from(length)
    assert (told % 4, length - told < 8) == (0, True)
    for prefix in (KEYS[:length], KEYS[told:length]):
        world.forget("cpu", "tier0")
        world.compute(KEYS[:length])
        assert world.compute(KEYS[length:20], prefix) == 20 - length
        until(lambda: world.chunks == 5)
        assert world.fetch(KEYS[length:20], prefix) == 20 - length


def test_pages_of_one_token() -> None:
    keys = prompt_keys(3, 300, page_tokens=1)
    with opened(tier(), host=Host(pages=300, page_tokens=1), chunk_tokens=64) as world:
        for start in range(0, 300, 100):
            assert world.compute(keys[start : start + 100], keys[:start]) == 100
        world.settle()
        until(lambda: world.chunks == 5)
        assert world.fetch(keys, batch=128) == 300
        world.forget("cpu")
        assert world.fetch(keys[130:], keys[:130], batch=128) == 170


# Leases


def test_what_was_found_stays_until_it_is_read() -> None:
    with opened(capacity=300_000) as world:
        world.compute(KEYS[:8])
        assert world.store.exists(KEYS[:8]) == 8
        for seed in range(10, 40):
            world.compute(prompt_keys(seed, 16))
        assert world.read(KEYS[:8]) == 8
        assert world.leases == 0
        for seed in range(40, 80):
            world.compute(prompt_keys(seed, 16))
        assert world.store.exists(KEYS[:8]) == 0  # it could have gone, and has


def test_a_look_up_that_is_asked_again_replaces_the_first() -> None:
    with opened() as world:
        world.compute(KEYS[:8])
        for _ in range(5):
            assert world.store.exists(KEYS) == 8
        assert (world.leases, world.store.promises) == (1, 1)
        assert world.read(KEYS[:8]) == 8
        assert (world.leases, world.store.promises) == (0, 0)


def test_look_ups_that_are_never_read_are_bounded() -> None:
    with opened(options=Options(promises=3)) as world:
        for seed in range(10, 20):
            world.compute(prompt_keys(seed, 4))
            assert world.store.exists(prompt_keys(seed, 4)) == 4
        assert (world.leases, world.store.promises) == (3, 3)


def test_what_was_passed_over_is_kept_no_longer() -> None:
    with opened(capacity=300_000) as world:
        world.compute(KEYS[:12])
        assert world.store.exists(KEYS[:12]) == 12
        assert world.read(KEYS[8:10], KEYS[:8]) == 2
        assert sum(space.leased for space in DirectClient(world.node).spaces()) == 1


def test_look_ups_end_by_time() -> None:
    now = [0.0]
    with opened() as world:
        world.store = type(world.store)(world.client, world.store._model, Options(read_timeout=2.0), lambda: now[0])
        world.compute(KEYS[:4])
        world.compute(prompt_keys(2, 4))
        assert world.store.exists(KEYS[:4]) == 4
        now[0] = 1.9
        assert world.store.exists(prompt_keys(2, 4)) == 4
        assert world.leases == 2
        now[0] = 2.1
        assert world.store.exists(prompt_keys(2, 4)) == 4
        assert world.leases == 1
        world.store.close()


def test_what_other_ranks_lack_is_not_kept_for_ever() -> None:
    """A rank that has found more than the others reads what all have."""
    now = [0.0]
    with opened() as world:
        world.store = type(world.store)(world.client, world.store._model, Options(), lambda: now[0])
        world.compute(KEYS[:20])
        assert world.store.exists(KEYS[:20]) == 20
        assert world.read(KEYS[:10]) == 10
        assert world.leases == 1
        now[0] = 100.0
        assert world.store.exists(prompt_keys(2, 4)) == 0
        world.compute(prompt_keys(2, 4))
        world.store.exists(prompt_keys(2, 4))
        assert world.leases == 1
        world.store.close()


def test_the_chunks_of_one_read_come_side_by_side() -> None:
    """SGLang has one thread that reads: what does not happen at once within a call does not happen at once at all."""
    slow = Slow(tier())
    with opened(slow, read_timeout=30.0, capacity=8 << 20) as world:
        world.compute(KEYS)
        world.forget("cpu")
        assert world.store.exists(KEYS) == 40
        slow.hang("read")
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(world.read, KEYS)
            until(lambda: slow.hanging > 1)
            slow.release()
            assert reading.result() == 40


# Failures


def test_a_counter_says_why_what_was_stored_is_not_read_back() -> None:
    """Damage, lateness, or that there was no room for it."""
    with opened(Corrupting(tier())) as world:
        world.compute(KEYS[:8])
        world.forget("cpu")
        assert world.fetch(KEYS[:8]) == 0
        assert sum(world.counts("corrupt_chunks").values()) > 0
    slow = Slow(tier())
    with opened(slow, options=SHORT, read_timeout=0.01) as world:
        world.compute(KEYS[:8])
        world.forget("cpu")
        slow.hang("read")
        assert world.fetch(KEYS[:8]) == 0
        slow.release()
        world.settle()
        assert sum(world.counts("late_reads").values()) > 0
    with opened(capacity=60_000) as world:
        world.compute(KEYS[:8])
        world.store.exists(KEYS[:8])
        for seed in range(10, 30):
            world.compute(prompt_keys(seed, 16))
        assert world.counts("dropped_chunks")["pool_full"] > 0


def test_a_read_that_hangs_ends_in_time_and_lands_nowhere() -> None:
    slow = Slow(tier())
    with opened(slow, options=SHORT, read_timeout=30.0) as world:
        world.compute(KEYS[:8])
        world.forget("cpu")
        assert world.store.exists(KEYS[:8]) == 8
        slow.hang("read")
        assert world.read(KEYS[:8]) == 0
        assert world.host.blank
        slow.release()
        world.settle()
        assert world.host.blank  # what came late
        assert world.read(KEYS[:8]) == 8


class Slowly:
    """A view of pages that takes its time."""

    def __init__(self, view: Any, now: list[float]) -> None:
        self._view, self._now = view, now

    def gather(self, *args: Any) -> None:
        self._view.gather(*args)

    def scatter(self, *args: Any) -> None:
        self._view.scatter(*args)
        self._now[0] += 100.0


def test_nothing_is_copied_when_the_time_is_over() -> None:
    now = [0.0]
    with opened() as world:
        world.store = type(world.store)(world.client, world.store._model, Options(), lambda: now[0])
        world.compute(KEYS[:12])
        assert world.store.exists(KEYS[:12]) == 12
        assert world.store.get(KEYS[:12], Slowly(world.host.pages.view(range(12)), now)) == 4
        assert [world.host.holds(page, KEYS[page]) for page in range(12)] == [True] * 4 + [False] * 8


def test_a_page_that_could_not_be_read_counts_as_missing_for_a_while() -> None:
    slow = Slow(tier())
    now = [0.0]
    with opened(slow, read_timeout=30.0) as world:
        world.store = type(world.store)(world.client, world.store._model, SHORT, lambda: now[0])
        world.compute(KEYS[:8])
        world.compute(prompt_keys(2, 8))
        world.forget("cpu")
        assert world.store.exists(KEYS[:8]) == 8
        slow.hang("read")
        assert world.read(KEYS[:8]) == 0
        slow.release()
        world.settle()
        assert world.store.exists(KEYS[:8]) == 0
        assert world.fetch(prompt_keys(2, 8)) == 8
        now[0] = SHORT.retry_after + 1
        assert world.fetch(KEYS[:8]) == 8


def test_a_page_that_is_stored_again_is_missing_no_longer() -> None:
    faulty = Faulty(tier(), {"read": always})
    with opened(faulty) as world:
        world.compute(KEYS[:8])
        world.forget("cpu")
        assert world.fetch(KEYS[:8]) == 0
        assert world.store.exists(KEYS[:8]) == 0
        faulty.active = False
        world.compute(KEYS[:8])
        assert world.fetch(KEYS[:8]) == 8


@pytest.mark.parametrize("verb", ["read", "write", "contains", "delete"])
def test_a_tier_that_fails_costs_hits_only(verb: str) -> None:
    faulty = Faulty(tier(), {verb: every(2)})
    with opened(faulty, options=SHORT) as world:
        for seed in range(10, 20):
            keys = prompt_keys(seed, 12)
            assert world.compute(keys) == 12
            world.forget("cpu")
            assert world.fetch(keys) in range(13)


def test_damage_on_a_tier_is_a_miss() -> None:
    with opened(Corrupting(tier())) as world:
        world.compute(KEYS[:8])
        world.forget("cpu")
        assert world.fetch(KEYS[:8]) == 0


def test_a_full_pool_refuses_at_once() -> None:
    with opened(capacity=60_000) as world:
        world.compute(KEYS[:8])
        assert world.store.exists(KEYS[:8]) == 8  # leased, so nothing can go
        stored = [world.compute(prompt_keys(seed, 16)) for seed in range(10, 30)]
        assert stored[-1] < 16
        assert world.read(KEYS[:8]) == 8
        assert world.compute(prompt_keys(99, 4)) == 4


def test_clear_takes_what_is_this_model_s_and_nothing_else(world: World) -> None:
    from tests.connectors.sglang.host import namespace

    other = type(world.store)(world.client, world.client.register(namespace(world.host, "other")), Options())
    world.compute(KEYS[:8])
    ours, world.store = world.store, other
    world.compute(KEYS[:8])
    world.settle()
    assert ours.clear() > 0
    assert ours.exists(KEYS[:8]) == 0
    assert world.fetch(KEYS[:8]) == 8
    other.close()
    world.store = ours


def test_a_node_that_goes_away_costs_hits_only(tmp_path: Path) -> None:
    with opened(remote=tmp_path) as world:
        world.compute(KEYS[:8])
        assert world.store.exists(KEYS[:8]) == 8
        world.node.close()
        assert world.read(KEYS[:8]) in (0, 4, 8)
        assert world.compute(KEYS[8:12], KEYS[:8]) == 0
        assert world.store.exists(KEYS[:8]) == 0


def test_a_node_that_comes_back_is_used_again(tmp_path: Path) -> None:
    with opened(remote=tmp_path) as world:
        world.compute(KEYS[:8])
        config = world.node.config
        world.node.close()
        assert world.fetch(KEYS[:8]) == 0
        with Node(config, []) as again:
            again.servers.append(NodeServer(again, str(tmp_path / "s")))
            assert isinstance(world.client, RemoteClient)
            assert world.client.wait_until_up(10)
            assert world.compute(prompt_keys(2, 8)) == 8
            assert world.fetch(prompt_keys(2, 8)) == 8
            world.client.close()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_read_is_right(seed: int, tmp_path: Path) -> None:
    """Conversations that share prefixes, in a small pool over a tier that fails, with and without knowing the place."""
    chosen = random.Random(seed)
    faulty = Faulty(tier(), {"read": every(7), "write": every(5)})
    host = Host(chosen.choice(LAYOUTS))
    with opened(faulty, host=host, capacity=200_000, options=SHORT, remote=tmp_path if seed % 2 else None) as world:
        prompts = [prompt_keys(number, 40) for number in range(4)]
        hits = 0
        for _ in range(120):
            keys = chosen.choice(prompts)
            start = chosen.choice([0, chosen.randrange(40)])
            end = chosen.randrange(start + 1, 41)
            prefix = keys[:start] if chosen.random() < 0.8 else []
            act = chosen.random()
            if act < 0.45:
                assert world.compute(keys[start:end], prefix) <= end - start
            elif act < 0.9:
                hits += world.fetch(keys[start:end], prefix, batch=chosen.choice([1, 3, 8, 128]))
            elif act < 0.95:
                hits += world.read(keys[start:end], prefix)
            else:
                world.forget("cpu")
        assert hits > 0
