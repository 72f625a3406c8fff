"""The public interface over a node with real tiers in memory."""

from __future__ import annotations

import array
import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core import (
    AsyncCache,
    Cache,
    ClosedError,
    ConfigError,
    LayoutError,
    Namespace,
    StoreResult,
    UsageError,
    direct,
    guard,
)
from lmcache_core.config import Config
from lmcache_core.direct import DirectClient
from lmcache_core.index import Entry
from lmcache_core.node import FORKED
from lmcache_core.service.remote import RemoteClient
from tests.node.kv import PAGE_TOKENS, PageView, at_rest, namespace, open_cache, retrieve, store, tokens


def memory() -> CpuBackend:
    return CpuBackend(CpuOptions())


def test_what_was_stored_comes_back_byte_for_byte() -> None:
    with open_cache() as cache:
        assert cache.lookup(tokens("abcdefg")).tokens == 0
        store(cache, "abcdefg")
        assert cache.lookup(tokens("abcdefg")).tiers == {"cpu": 7 * PAGE_TOKENS}
        assert retrieve(cache, "abcdefg") == 7
        assert retrieve(cache, "abcdefgh") == 7
        assert retrieve(cache, "abcdex") == 5
        assert retrieve(cache, "xbcdex") == 0
        at_rest(cache)


def test_tokens_behind_the_last_whole_page_are_left_out() -> None:
    with open_cache() as cache:
        ids = tokens("abc") + [7] * (PAGE_TOKENS - 1)
        prompt = cache.prompt(ids)
        result = cache.store(prompt, PageView.of(prompt.keys))
        assert (prompt.tokens, len(prompt.keys), result.stored) == (len(ids), 3, 3 * PAGE_TOKENS)
        assert cache.lookup(ids).tokens == 3 * PAGE_TOKENS


@pytest.mark.parametrize(
    "form", [list, tuple, lambda t: array.array("q", t), np.array, lambda t: np.array(t, np.uint32)]
)
def test_tokens_of_any_kind_name_the_same_prompt(form: type) -> None:
    with open_cache() as cache:
        store(cache, "abcd")
        assert cache.lookup(form(tokens("abcd"))).tokens == 4 * PAGE_TOKENS


def test_a_prompt_that_grows_is_the_prompt_that_was_whole() -> None:
    with open_cache() as cache:
        store(cache, "abcdef")
        prompt = cache.prompt(tokens("abc"))
        assert cache.lookup(prompt).tokens == 3 * PAGE_TOKENS
        prompt.extend(tokens("def"))
        assert cache.lookup(prompt).tokens == 6 * PAGE_TOKENS


def test_another_tenant_adapter_or_salt_has_no_hits() -> None:
    with open_cache() as cache:
        for setting in ({"salt": "tenant"}, {"adapter": "lora"}, {"salt": b"tenant", "adapter": "lora"}):
            prompt = cache.prompt(tokens("abcd"), **setting)
            assert cache.lookup(prompt).tokens == 0
            cache.store(prompt, PageView.of(prompt.keys))
            assert cache.lookup(prompt).tokens == 4 * PAGE_TOKENS
        assert cache.lookup(tokens("abcd")).tokens == 0
        other = Cache(cache.client, cache.namespace, salt="of the configuration")
        assert other.lookup(tokens("abcd")).tokens == 0
        assert other.lookup(other.prompt(tokens("abcd"), salt="tenant")).tokens == 0


def test_another_model_dtype_or_epoch_has_no_hits() -> None:
    with open_cache() as cache:
        store(cache, "abcd")
        base = cache.namespace
        for other in (namespace(weights="other"), base.with_epoch(5)):
            assert Cache(cache.client, other).lookup(tokens("abcd")).tokens == 0
        assert Cache(cache.client, namespace()).lookup(tokens("abcd")).tokens == 4 * PAGE_TOKENS


def test_first_token_leaves_the_pages_in_front_of_it_alone() -> None:
    with open_cache() as cache:
        store(cache, "abcdefgh")
        prompt = cache.prompt(tokens("abcdefgh"))
        view = PageView(8)
        view.rows[0][:5] = 7
        got = cache.retrieve(prompt, view, first_token=5 * PAGE_TOKENS)
        assert (got.tokens, got.tiers) == (8 * PAGE_TOKENS, {"cpu": 3 * PAGE_TOKENS})
        assert (view.rows[0][:5] == 7).all()
        assert view.wrong(prompt.keys, 8, first=5) == 0
        assert view.scattered == [(0, 5, 3)]


def test_max_tokens_bounds_a_retrieve() -> None:
    with open_cache() as cache:
        store(cache, "abcdefgh")
        assert retrieve(cache, "abcdefgh", max_tokens=6 * PAGE_TOKENS + 3) == 6
        assert retrieve(cache, "abcdefgh", max_tokens=0) == 0


def test_only_what_is_missing_is_copied() -> None:
    with open_cache() as cache:
        store(cache, "abcd")
        prompt = cache.prompt(tokens("abcdefgh"))
        view = PageView.of(prompt.keys)
        result = cache.store(prompt, view)
        assert (result.stored, result.present, result.dropped) == (4 * PAGE_TOKENS, 4 * PAGE_TOKENS, 0)
        assert view.gathered == [(0, 4, 4)]


def test_placement_and_source_name_tiers() -> None:
    with open_cache(memory(), memory()) as cache:
        prompt = cache.prompt(tokens("abcd"))
        assert cache.store(prompt, PageView.of(prompt.keys), placement=["t1"]).wait(10)
        assert cache.contains(prompt) == {"cpu": 4 * PAGE_TOKENS, "t0": 0, "t1": 4 * PAGE_TOKENS}
        cache.clear(["cpu"])
        assert cache.lookup(prompt, source=["t0"]).tokens == 0
        assert retrieve(cache, "abcd", source=["t0", "cpu"]) == 0
        assert retrieve(cache, "abcd", source=["t1"]) == 4
        with pytest.raises(ConfigError, match=r"no tier 'tape'.*cpu, t0, t1"):
            cache.lookup(prompt, source=["tape"])


def test_one_slot_fans_out_to_all_tiers() -> None:
    first, second = memory(), memory()
    with open_cache(first, second) as cache:
        assert store(cache, "abcdef")
        assert cache.contains(tokens("abcdef")) == dict.fromkeys(["cpu", "t0", "t1"], 6 * PAGE_TOKENS)
        assert first.usage() == second.usage()
        assert first.usage().chunks == 2


def test_prefetch_brings_chunks_to_memory_and_to_other_tiers() -> None:
    with open_cache(memory(), memory()) as cache:
        prompt = cache.prompt(tokens("abcdef"))
        assert cache.store(prompt, PageView.of(prompt.keys), placement=["t0"]).wait(10)
        cache.clear(["cpu"])
        assert cache.prefetch(prompt, timeout=10) == 6 * PAGE_TOKENS
        assert cache.contains(prompt) == {"cpu": 6 * PAGE_TOKENS, "t0": 6 * PAGE_TOKENS, "t1": 0}
        cache.clear(["cpu"])
        assert cache.prefetch(prompt, source=["t0"], destination="t1", timeout=10) == 6 * PAGE_TOKENS
        assert cache.contains(prompt)["t1"] == 6 * PAGE_TOKENS
        cache.clear(["cpu", "t0"])
        assert retrieve(cache, "abcdef") == 6
        at_rest(cache)


def test_pinned_prompts_stay_until_unpinned() -> None:
    with open_cache(slots=2) as cache:
        store(cache, "abcd")
        assert cache.pin(tokens("abcd")) == 4 * PAGE_TOKENS
        assert cache.evict(tokens("abcd")) == 0
        for text in ("efgh", "ijkl", "mnop"):
            store(cache, text)
        assert retrieve(cache, "abcd") == 4
        assert cache.unpin(tokens("abcd")) == 4 * PAGE_TOKENS
        assert cache.unpin(tokens("abcd")) == 0
        for text in ("efgh", "ijkl", "mnop"):
            store(cache, text)
        assert retrieve(cache, "abcd") == 0
        at_rest(cache)


def test_evict_takes_one_prompt_and_clear_takes_all() -> None:
    with open_cache(memory()) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        assert cache.evict(tokens("abcd"), ["cpu"]) == 1
        assert cache.contains(tokens("abcd")) == {"cpu": 0, "t0": 4 * PAGE_TOKENS}
        assert cache.evict(tokens("abcd")) == 1
        assert cache.lookup(tokens("abcd")).tokens == 0
        assert cache.clear() == 1
        assert cache.flush(10)
        stats = cache.stats()
        assert (stats.pool_used, stats.tiers[0].used, stats.tiers[0].chunks) == (0, 0, 0)


def turns_of(cache: Cache, monkeypatch: pytest.MonkeyPatch, between: Callable[[], object]) -> list[int]:
    """Chunks in each turn of the clears that follow. `between` is called between turns, where the mutex is free."""
    index = cache.client.node.guard.index  # type: ignore[attr-defined]
    clear, sizes = index.clear, []

    def noted(entries: Sequence[Entry], places: int) -> int:
        sizes.append(len(entries))
        return int(clear(entries, places))

    monkeypatch.setattr(guard, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(index, "clear", noted)
    monkeypatch.setattr("lmcache_core.runtime.time.sleep", lambda seconds: between())
    return sizes


def test_clear_takes_turns_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(memory(), slots=16) as cache:
        for text in ("abcdefghijkl", "mnop", "qrstuvwx", "yzab"):
            assert store(cache, text)
        looked_up = []
        sizes = turns_of(cache, monkeypatch, lambda: looked_up.append(cache.lookup(tokens("mnop")).tokens))
        assert cache.clear() == 7
        assert sizes == [3, 3, 1]
        assert looked_up == [4 * PAGE_TOKENS, 0]
        assert cache.clear() == 0
        assert sizes == [3, 3, 1], "of nothing there is no turn"
        at_rest(cache)
        assert cache.stats().pool_used == 0


def test_what_is_stored_while_all_is_cleared_stays_and_what_was_there_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(memory(), slots=16) as cache:
        assert store(cache, "abcdefghijkl")
        assert store(cache, "mnopqrst")
        sizes = turns_of(cache, monkeypatch, lambda: [store(cache, text) for text in ("uvwx", "abcd", "mnopqrst1234")])
        assert cache.clear() == 5
        assert sizes == [3, 2]
        assert cache.contains(tokens("uvwx")) == {"cpu": 4 * PAGE_TOKENS, "t0": 4 * PAGE_TOKENS}, "new"
        assert cache.contains(tokens("abcdefgh"))["cpu"] == 4 * PAGE_TOKENS, "its beginning has been stored anew"
        assert cache.lookup(tokens("mnopqrst1234")).tokens == 0, "what was there is gone, though a store had found it"
        monkeypatch.undo()
        assert store(cache, "mnopqrst")
        assert retrieve(cache, "mnopqrst1234") == 12, "what was stored anew behind it is found with it"
        cache.clear()
        at_rest(cache)
        assert (cache.stats().pool_used, cache.stats().tiers[0].used) == (0, 0)


def test_a_request_counts_as_one_lookup_however_it_is_made() -> None:
    with open_cache() as cache:
        store(cache, "abcd")

        def counted() -> dict[str, dict[str, float]]:
            counts = cache.stats().counts
            names = ("lookups", "lookup_tokens", "hit_tokens")
            return {name: {kind: value for kind, value in counts.get(name, {}).items() if value} for name in names}

        assert retrieve(cache, "abcdef") == 4
        assert retrieve(cache, "xy") == 0
        alone = {"lookups": {"retrieve": 2}, "lookup_tokens": {"retrieve": 8 * PAGE_TOKENS}}
        assert counted() == alone | {"hit_tokens": {"cpu": 4 * PAGE_TOKENS}}
        for text in ("abcdef", "abxy"):  # two requests that begin alike, looked up before either is retrieved
            cache.lookup(tokens(text))
        assert [retrieve(cache, "abcdef"), retrieve(cache, "ab")] == [4, 2]
        assert counted() == {
            "lookups": {"retrieve": 2, "lookup": 2},
            "lookup_tokens": {"retrieve": 8 * PAGE_TOKENS, "lookup": 10 * PAGE_TOKENS},
            "hit_tokens": {"cpu": 10 * PAGE_TOKENS},
        }
        retrieve(cache, "abcd")
        assert counted()["lookups"] == {"retrieve": 3, "lookup": 2}


@pytest.mark.parametrize("pauses", [False, True])
def test_a_long_store_of_a_client_with_its_own_threads_lets_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(direct, "PLANNED", 1)
    monkeypatch.setattr("lmcache_core.runtime.time.sleep", slept.append)
    with open_cache(memory(), slots=16) as cache:
        client = DirectClient(cache.client.node, pauses=pauses)  # type: ignore[attr-defined]
        assert store(Cache(client, namespace()), "abcdefghijkl")
    assert slept == [direct.PAUSE] * (2 if pauses else 0), "between three turns"


def test_a_pin_of_another_outlives_a_clear_of_memory_and_an_unpin() -> None:
    with open_cache(memory()) as cache:
        other = Cache(DirectClient(cache.client.node), namespace())  # type: ignore[attr-defined]
        assert store(cache, "abcd")
        cache.pin(tokens("abcd"))
        assert cache.clear(["cpu"]) == 1
        assert cache.stats().pinned == 1, "it is still on a tier"
        other.pin(tokens("abcd"))
        assert cache.unpin(tokens("abcd")) == 0, "the other's pin holds it"
        assert other.evict(tokens("abcd")) == 0
        assert other.unpin(tokens("abcd")) == 4 * PAGE_TOKENS
        assert other.evict(tokens("abcd")) == 1
        at_rest(cache)


def test_a_clear_of_all_tiers_ends_pins() -> None:
    with open_cache(memory()) as cache:
        other = Cache(DirectClient(cache.client.node), namespace())  # type: ignore[attr-defined]
        assert store(cache, "abcd")
        cache.pin(tokens("abcd"))
        assert cache.clear() == 1
        assert cache.stats().pinned == 0
        assert store(cache, "abcd")
        other.pin(tokens("abcd"))
        assert cache.unpin(tokens("abcd")) == 0, "what it had pinned has gone"
        assert other.evict(tokens("abcd")) == 0, "the other's pin is of what is there now"
        other.unpin(tokens("abcd"))
        at_rest(cache)


def test_clear_leaves_other_models_alone() -> None:
    with open_cache() as cache:
        other = Cache(cache.client, namespace(weights="other"))
        store(cache, "abcd")
        store(other, "abcd")
        assert other.clear() == 1
        assert (retrieve(cache, "abcd"), retrieve(other, "abcd")) == (4, 0)


def test_a_view_that_is_too_small_is_an_error_and_leaves_nothing_behind() -> None:
    with open_cache() as cache:
        prompt = cache.prompt(tokens("abcdefgh"))
        with pytest.raises(LayoutError):
            cache.store(prompt, PageView.of(prompt.keys[:5]))
        assert retrieve(cache, "abcdefgh") == 4, "what was copied before the error is kept"
        store(cache, "abcdefgh")
        with pytest.raises(LayoutError):
            cache.retrieve(prompt, PageView(6))
        at_rest(cache)


def test_a_prompt_of_another_page_size_is_refused() -> None:
    with open_cache() as cache:
        other = Cache(cache.client, Namespace.from_manifest(namespace("s", page_tokens=32).manifest()))
        with pytest.raises(LayoutError, match="pages of 32 tokens"):
            cache.lookup(other.prompt(tokens("ab")))


def test_one_namespace_with_two_geometries_is_refused() -> None:
    with open_cache() as cache:
        client = cache.client
        assert isinstance(client, DirectClient)
        client.node.config = type(client.node.config)(chunk_tokens=128, page_tokens=PAGE_TOKENS)
        with pytest.raises(LayoutError, match="same chunk_tokens"):
            Cache(client, namespace())


def test_a_closed_cache_says_so() -> None:
    cache = open_cache()
    cache.close()
    cache.close()
    prompt = cache.prompt(tokens("abcd"))
    for call in (
        lambda: cache.lookup(prompt),
        lambda: cache.store(prompt, PageView.of(prompt.keys)),
        lambda: cache.retrieve(prompt, PageView(4)),
        cache.clear,
        cache.stats,
    ):
        with pytest.raises(ClosedError):
            call()


def test_hybrid_models_restore_what_every_group_holds() -> None:
    with open_cache(kinds="fws", slots=40) as cache:
        prompt = cache.prompt(tokens("abcdefghij"))
        result = cache.store(prompt, PageView.of(prompt.keys, 3), turns=[6 * PAGE_TOKENS])
        assert result.dropped == 0
        view = PageView(10, 3)
        assert cache.retrieve(prompt, view).tokens == 10 * PAGE_TOKENS
        assert view.wrong(prompt.keys, 10) == 0
        assert view.wrong(prompt.keys, 10, group=1, first=8) == 0
        assert view.wrong(prompt.keys, 10, group=2, first=9) == 0
        fork = cache.prompt(tokens("abcdefxyz"))
        view = PageView(9, 3)
        assert cache.retrieve(fork, view).tokens == 6 * PAGE_TOKENS, "the turn's end, where all groups were kept"
        assert view.wrong(fork.keys, 6) == 0
        assert view.wrong(fork.keys, 6, group=1, first=4) == 0
        assert view.wrong(fork.keys, 6, group=2, first=5) == 0
        assert cache.lookup(tokens("abcdexyz")).tokens == 0, "no snapshot lies in the first five pages"
        at_rest(cache)


async def test_the_async_form_does_the_same() -> None:
    blocking = await asyncio.to_thread(open_cache, memory())
    cache = AsyncCache(blocking.client, blocking.namespace)
    prompt = cache.prompt(tokens("abcdefg"))
    result = await cache.store(prompt, PageView.of(prompt.keys))
    assert (result.stored, await result.written()) == (7 * PAGE_TOKENS, True)
    assert cache.clear(["cpu"]) == 2
    assert (await cache.lookup(prompt)).tiers == {"t0": 7 * PAGE_TOKENS}
    view = PageView(7)
    got = await cache.retrieve(prompt, view, wait=10)
    assert (got.tokens, view.wrong(prompt.keys, 7)) == (7 * PAGE_TOKENS, 0)
    cache.clear(["cpu"])
    assert await cache.prefetch(prompt) == 7 * PAGE_TOKENS
    assert cache.contains(prompt) == {"cpu": 7 * PAGE_TOKENS, "t0": 7 * PAGE_TOKENS}
    assert await cache.flush()
    await cache.close()
    with pytest.raises(ClosedError):
        await cache.lookup(prompt)


async def test_the_async_form_opens_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_text("page_tokens: 16\nchunk_tokens: 64\ncpu: {capacity: 1MiB}\nsalt: tenant\n")
    async with await AsyncCache.open(path, namespace()) as cache:
        prompt = cache.prompt(tokens("abcd"))
        assert (await cache.store(prompt, PageView.of(prompt.keys))).stored == 4 * PAGE_TOKENS
        assert (await cache.lookup(prompt)).tokens == 4 * PAGE_TOKENS
        assert (await cache.lookup(Cache(cache.client, cache.namespace).prompt(tokens("abcd")))).tokens == 0


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    with open_cache(memory()) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        child = os.fork()
        if not child:
            code = 1
            try:
                cache.lookup(tokens("abcd"))
            except ClosedError as error:
                cache.close()
                code = 0 if str(error) == FORKED else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


@pytest.mark.parametrize("timeout", [0, -0.0, 1e300, float("inf"), 10**30])
def test_any_number_from_nothing_on_is_a_timeout(timeout: float) -> None:
    with open_cache(memory()) as cache:
        prompt = cache.prompt(tokens("abcd"))
        result = cache.store(prompt, PageView.of(prompt.keys))
        assert result.wait(10)
        assert result.wait(timeout)
        cache.clear(["cpu"])
        cache.flush(timeout)
        assert cache.prefetch(prompt, timeout=timeout) in (0, 4 * PAGE_TOKENS)
        assert cache.flush(10)
        assert retrieve(cache, "abcd", timeout=timeout) in (0, 4)


WAITS: dict[str, Callable[[Cache, StoreResult, Any], object]] = {
    "retrieve": lambda cache, result, given: retrieve(cache, "abcd", timeout=given),
    "prefetch": lambda cache, result, given: cache.prefetch(tokens("abcd"), timeout=given),
    "flush": lambda cache, result, given: cache.flush(given),
    "result": lambda cache, result, given: result.wait(given),
    "async lookup": lambda cache, result, given: asyncio.run(
        AsyncCache(cache.client, cache.namespace).lookup(tokens("abcd"), wait=given)
    ),
    "async retrieve": lambda cache, result, given: asyncio.run(
        AsyncCache(cache.client, cache.namespace).retrieve(tokens("abcd"), PageView(4), wait=given)
    ),
    "client": lambda cache, result, given: cache.client.flush(given),
}
REMOTE_WAITS: dict[str, Callable[[RemoteClient, Any], object]] = {
    "flush": lambda client, given: client.flush(given),
    "drain": lambda client, given: client.drain(given),
    "wait_until_up": lambda client, given: client.wait_until_up(given),
}
NO_TIMEOUTS = [
    (float("nan"), "a number of seconds.*not nan"),
    ("1", "a number of seconds.*not '1'"),
    (True, "a number of seconds.*not True"),
    (-1, "must not be negative: -1; write 0"),
    (-1e-9, "must not be negative: -1e-09; write 0"),
    (float("-inf"), "must not be negative: -inf; write 0"),
]


@pytest.mark.parametrize(("timeout", "refusal"), NO_TIMEOUTS)
@pytest.mark.parametrize("verb", WAITS)
def test_what_cannot_be_meant_is_no_timeout(verb: str, timeout: Any, refusal: str) -> None:
    with open_cache() as cache:
        prompt = cache.prompt(tokens("abcd"))
        result = cache.store(prompt, PageView.of(prompt.keys))
        with pytest.raises(UsageError, match=f"^(a timeout|wait) (is )?{refusal}"):
            WAITS[verb](cache, result, timeout)
        assert retrieve(cache, "abcd", timeout=0) == 4


@pytest.mark.parametrize(("timeout", "refusal"), NO_TIMEOUTS)
@pytest.mark.parametrize("verb", REMOTE_WAITS)
def test_what_cannot_be_meant_is_no_timeout_of_a_remote_client(
    verb: str, timeout: Any, refusal: str, tmp_path: Path
) -> None:
    """Whether or not the node is there."""
    client = RemoteClient(str(tmp_path / "nowhere"), Config())
    with pytest.raises(UsageError, match=f"^a timeout (is )?{refusal}"):
        REMOTE_WAITS[verb](client, timeout)
    client.close()


def test_chunks_too_large_to_be_handled_are_refused_at_once() -> None:
    group = namespace().groups[0]
    huge = Namespace.from_manifest(namespace().manifest())
    huge = type(huge)(
        weights="huge",
        groups=(group, type(group)(**{f: getattr(group, f) for f in group.__struct_fields__} | HUGE)),
        page_tokens=PAGE_TOKENS,
        encoding=huge.encoding,
    )
    with open_cache() as cache:
        with pytest.raises(LayoutError, match="smaller chunk_tokens"):
            Cache(cache.client, huge)
        with pytest.raises(LayoutError, match="Namespace"):
            Cache(cache.client, "model")  # type: ignore[arg-type]
        at_rest(cache)


HUGE = {"page_layer_bytes": 1 << 40, "head_size": 1 << 32, "layers": (7,)}


async def test_a_store_that_is_cancelled_twice_keeps_its_slot_until_its_copy_has_ended() -> None:
    blocking = await asyncio.to_thread(open_cache)
    cache = AsyncCache(blocking.client, blocking.namespace)
    entered, go_on = threading.Event(), threading.Event()

    class Slow(PageView):
        def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
            entered.set()
            go_on.wait(20)
            super().gather(group, first_page, pages, into)

    prompt = cache.prompt(tokens("abcd"))
    storing = asyncio.create_task(cache.store(prompt, Slow(4)))
    await asyncio.to_thread(entered.wait, 20)
    for _ in range(3):
        storing.cancel()
        await asyncio.sleep(0)
    assert not storing.done()
    assert cache.stats().slots == 1
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert cache.stats().slots == 0
    await cache.close()


def test_a_prompt_without_a_whole_page_is_nothing_to_store() -> None:
    for kinds in ("f", "fs", "fw", "s"):
        with open_cache(kinds=kinds) as cache:
            result = cache.store([1] * 3, PageView(0, len(kinds)))
            assert (result.stored, result.present, result.dropped) == (0, 0, 0)
