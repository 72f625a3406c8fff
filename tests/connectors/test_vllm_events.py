"""Which blocks are where, told in the engine's terms."""

from __future__ import annotations

from lmcache_core.connectors.vllm.events import BlockEvent, EventBook, Follower, Page
from lmcache_core.direct import DirectClient
from lmcache_core.index import Change
from tests.node.kv import open_cache

CPU, DISK = 1, 2
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def page(name: str) -> Page:
    return Page((name,), None, (1, 2), None, None)


def book() -> EventBook:
    made = EventBook({CPU: "cpu", DISK: "disk"})
    made.learn([A, B], [page("a"), page("b")])
    return made


def test_pages_come_and_go() -> None:
    events = book()
    events.apply([Change([A, B], CPU, True), Change([A, B], DISK, True), Change([A, B], CPU, False)])
    told = [(event.page.block_hashes[0], event.place, event.stored) for event in events.take()]
    assert told == [
        ("a", "cpu", True),
        ("b", "cpu", True),
        ("a", "disk", True),
        ("b", "disk", True),
        ("a", "cpu", False),
        ("b", "cpu", False),
    ]
    assert events.take() == []


def test_a_page_in_two_chunks_is_there_as_long_as_one_is() -> None:
    events = book()
    events.apply([Change([A], CPU, True), Change([A, B], CPU, True), Change([A], CPU, False)])
    assert events.take() == [BlockEvent(page("a"), "cpu", True), BlockEvent(page("b"), "cpu", True)]
    events.apply([Change([A, B], CPU, False)])
    assert events.take() == [BlockEvent(page("a"), "cpu", False), BlockEvent(page("b"), "cpu", False)]


def test_what_was_there_before_it_had_a_name_is_told_then() -> None:
    events = book()
    events.apply([Change([C], DISK, True)])
    assert events.take() == []
    events.learn([C], [page("c")])
    assert events.take() == [BlockEvent(page("c"), "disk", True)]


def test_what_has_gone_before_it_had_a_name_is_not_told() -> None:
    events = book()
    events.apply([Change([C], DISK, True), Change([C], DISK, False)])
    events.learn([C], [page("c")])
    assert events.take() == []


def test_who_follows_a_model_anew_leaves_nothing_behind() -> None:
    with open_cache() as cache:
        client = cache.client
        assert isinstance(client, DirectClient)
        model = client.register(cache.namespace)
        first = Follower(client, model, lambda request, first, end: ())
        second = Follower(client, model, lambda request, first, end: ())
        (space,) = client.node.guard.index.spaces.values()
        assert len(space.watches) == 2
        first.close()
        second.close()
        assert space.watches == []
