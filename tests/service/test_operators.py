"""What operators ask of a node that is at work, and tell it."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core import Cache, pins
from lmcache_core.cli import main
from lmcache_core.client import KeptStats
from lmcache_core.config import Config
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError, ConfigError, UsageError
from lmcache_core.namespace import Namespace
from lmcache_core.service import link, server, wire
from lmcache_core.service.remote import RemoteClient
from tests.node.kv import (
    CHUNK_FRAME,
    PAGE_TOKENS,
    PageView,
    at_rest,
    namespace,
    open_cache,
    retrieve,
    store,
    tokens,
    until,
)
from tests.node.shelf import Shelf
from tests.service.kit import Served, open_served, remote, serving


def test_what_a_node_holds_by_namespace(tmp_path: Path) -> None:
    cache = open_served(tmp_path, Shelf(), slots=16)
    client: RemoteClient = cache.client  # type: ignore[assignment]
    assert store(cache, "abcdefgh")
    assert store(cache, "abcdx")
    cache.pin(tokens("abcd"))
    held = client.hold(cache._model, cache.prompt(tokens("abcdefgh")).keys)
    cache.evict(tokens("abcdx"), ["cpu"])  # but for what is pinned and leased
    (space,) = client.spaces()
    assert Namespace.from_manifest(space.manifest) == namespace()
    assert space.digest == namespace().space(0)
    assert (space.chunks, space.pages, space.pinned, space.leased) == (3, 9, 1, 2)
    assert space.nbytes == {"cpu": 2 * CHUNK_FRAME, "t0": 2 * CHUNK_FRAME + 4096 + PAGE_TOKENS * 256}
    client.release(held)
    cache.unpin(tokens("abcd"))
    at_rest(cache)
    cache.close()


def test_who_uses_a_node(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, path):
        cache, other = remote(path), remote(path)
        assert store(cache, "abcd")
        client: RemoteClient = cache.client  # type: ignore[assignment]
        held = client.hold(cache._model, cache.prompt(tokens("abcd")).keys)
        told = client.clients()
        assert sorted((each.leases, each.stores, each.shard) for each in told) == [(0, 0, 0), (1, 0, 0)]
        assert all(each.seconds >= 0 and f"({each.pid})" in each.name for each in told)
        client.release(held)
        other.close()
        until(lambda: len(client.clients()) == 1)
        cache.close()


def test_a_frozen_node_serves_and_stores_nothing(tmp_path: Path) -> None:
    cache = open_served(tmp_path, Shelf())
    client: RemoteClient = cache.client  # type: ignore[assignment]
    assert store(cache, "abcd")
    client.freeze(True)
    assert client.stats().frozen
    prompt = cache.prompt(tokens("abcdefgh"))
    result = cache.store(prompt, PageView.of(prompt.keys))
    assert (result.stored, result.present, result.dropped) == (0, 4 * PAGE_TOKENS, 4 * PAGE_TOKENS)
    assert client.stats().counts["dropped_chunks"] == {"frozen": 1}
    cache.clear(["cpu"])
    assert retrieve(cache, "abcdefgh") == 4
    client.freeze(False)
    assert store(cache, "abcdefgh")
    at_rest(cache)
    cache.close()


def test_a_node_that_is_drained_has_written_everything_and_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path):
        cache = remote(path)
        prompt = cache.prompt(tokens("abcdefgh"))
        cache.store(prompt, PageView.of(prompt.keys))
        client: RemoteClient = cache.client  # type: ignore[assignment]
        assert client.drain(30)
        assert node.process.wait(30) == 0
        assert cache.lookup(prompt).tokens == 0
        with serving(tmp_path):
            until(lambda: cache.lookup(prompt).tokens == 8 * PAGE_TOKENS)
        cache.close()


def test_an_embedded_node_is_told_the_same(tmp_path: Path) -> None:
    with open_cache(Shelf()) as cache:
        client = cache.client
        client.freeze(True)
        assert store(cache, "abcd") is False
        assert client.spaces()[0].chunks == 0


def test_pins_that_the_node_keeps_outlive_who_asked_for_them(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path):
        cache = remote(path)
        client: RemoteClient = cache.client  # type: ignore[assignment]
        assert client.node_pid == node.process.pid
        assert store(cache, "abcdefgh")
        keys = cache.prompt(tokens("abcd")).keys
        other = remote(path)
        assert other.client.pin(other._model, keys, kept=True) == 4  # type: ignore[call-arg]
        assert other.client.pin(other._model, keys) == 4
        other.close()
        until(lambda: len(client.clients()) == 1)
        assert client.stats().pinned == 1
        assert cache.evict(tokens("abcdefgh"), ["cpu"]) == 1
        assert client.unpin(cache._model, keys) == 0, "it is not this client's"
        assert client.unpin(cache._model, keys, kept=True) == 4
        assert client.unpin(cache._model, keys, kept=True) == 0
        assert client.pin(cache._model, keys, kept=True) == 4
        assert client.pin(cache._model, cache.prompt(tokens("x")).keys, kept=True) == 0
        assert client.unpin_kept() == 1
        assert client.stats().pinned == 0
        at_rest(cache)
        cache.close()


def kept(cache: Cache, text: str) -> int:
    """Pin a prompt for good; returns its pages."""
    client: RemoteClient = cache.client  # type: ignore[assignment]
    return client.pin(cache._model, cache.prompt(tokens(text)).keys, kept=True)


def test_kept_pins_hold_at_most_half_of_the_pool(tmp_path: Path) -> None:
    cache = open_served(tmp_path, Shelf(), slots=6)
    client: RemoteClient = cache.client  # type: ignore[assignment]
    assert store(cache, "abcdefgh")
    assert store(cache, "ijklmnop")
    assert [kept(cache, "abcdefgh"), kept(cache, "abcd"), kept(cache, "ijkl")] == [8, 4, 4]
    with pytest.raises(UsageError) as refused:
        kept(cache, "ijklmnop")
    assert str(refused.value) == (
        "kept pins hold at most 60KiB, half of cpu: they hold 60KiB of "
        f"{namespace().content.hex()[:16]}, and this prompt needs 20KiB more; undo some with: lmcache-core unpin FILE; "
        "or all with: lmcache-core unpin --all"
    )
    assert client.stats().kept == KeptStats(3, 3 * CHUNK_FRAME, 3 * CHUNK_FRAME)
    for text in ("qrst", "uvwx", "qrstuvwx"):
        assert store(cache, text), "the other half is anybody's"
    assert cache.pin(tokens("qrst")) == 4 * PAGE_TOKENS, "an engine's own pins end with it"
    assert cache.unpin(tokens("qrst")) == 4 * PAGE_TOKENS
    assert client.unpin(cache._model, cache.prompt(tokens("abcd")).keys, kept=True) == 0, "it is pinned twice"
    assert client.unpin(cache._model, cache.prompt(tokens("abcdefgh")).keys, kept=True) == 8
    assert client.stats().kept == KeptStats(1, CHUNK_FRAME, 3 * CHUNK_FRAME)
    assert kept(cache, "ijklmnop") == 8
    assert client.unpin_kept() == 2
    assert client.stats().kept == KeptStats(0, 0, 3 * CHUNK_FRAME)
    at_rest(cache)
    cache.close()


def test_status_says_what_kept_pins_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = open_served(tmp_path, slots=6)
    served: Served = cache.client  # type: ignore[assignment]
    store(cache, "abcdefgh")
    cache.pin(tokens("abcdefgh"))
    assert main(["status", "--socket", served.path]) == 0
    assert "lmcache-core pin" not in capsys.readouterr().out, "an engine's pins are its own"
    assert kept(cache, "abcd") == 4
    assert main(["status", "--socket", served.path]) == 0
    assert capsys.readouterr().out.splitlines()[4] == "kept     1 chunks by `lmcache-core pin`, 20KiB of at most 60KiB"
    assert main(["status", "--json", "--socket", served.path]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept"] == {"chunks": 1, "nbytes": CHUNK_FRAME, "most": 3 * CHUNK_FRAME}
    cache.close()


def test_kept_pins_hold_at_most_half_of_a_tier_that_is_smaller(tmp_path: Path) -> None:
    cache = open_served(tmp_path, Shelf(), slots=8, tiers=[{"capacity": 2 * CHUNK_FRAME}])
    assert store(cache, "abcd")
    assert store(cache, "ijkl")
    assert kept(cache, "abcd") == 4
    with pytest.raises(UsageError, match=r"at most 20KiB, half of t0: they hold 20KiB of"):
        kept(cache, "ijkl")
    assert kept(cache, "abcd") == 4, "which holds no more"
    cache.close()


def test_kept_pins_are_bounded_and_those_of_what_is_gone_count_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "MOST_KEPT", 2)
    cache = open_served(tmp_path, slots=4)
    client: RemoteClient = cache.client  # type: ignore[assignment]
    store(cache, "abcd")
    assert [kept(cache, "abcd"), kept(cache, "abcd")] == [4, 4]
    with pytest.raises(UsageError, match=r"keeps 2 pins, and no more; undo some with: lmcache-core unpin FILE; or all"):
        kept(cache, "abcd")
    cache.clear()
    assert client.stats().kept.nbytes == 0
    store(cache, "efgh")
    assert kept(cache, "efgh") == 4
    assert client.stats().kept.nbytes == CHUNK_FRAME
    assert client.unpin_kept() == 1
    at_rest(cache)
    cache.close()


class Held:
    """A clear that waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        clear = DirectClient.clear

        def wait(client: DirectClient, model: Any = None, places: Any = None) -> int:
            self.entered.set()
            assert self.go_on.wait(30)
            return clear(client, model, places)

        monkeypatch.setattr(DirectClient, "clear", wait)


def test_a_clear_may_take_longer_than_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_served(tmp_path, Shelf(), slots=8, call_timeout=0.2)
    client: RemoteClient = cache.client  # type: ignore[assignment]
    assert store(cache, "abcdefgh")
    held = Held(monkeypatch)
    with ThreadPoolExecutor() as pool:
        clearing = pool.submit(cache.clear)
        assert held.entered.wait(10)
        with pytest.raises(TimeoutError):
            clearing.result(1.0)  # several deadlines, in which the node is asked whether it is there
        assert cache.lookup(tokens("abcd")).tokens == 4 * PAGE_TOKENS, "others are answered meanwhile"
        with pytest.raises(UsageError, match="one client may clear once at a time"):
            client.clear()
        held.go_on.set()
        assert clearing.result(10) == 2
    assert cache.lookup(tokens("abcd")).tokens == 0
    with pytest.raises(ConfigError, match="there is no tier 'moon'"):
        cache.clear(["moon"])
    cache.close()


def test_a_clear_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_served(tmp_path, Shelf(), slots=8)
    served: Served = cache.client  # type: ignore[assignment]
    assert store(cache, "abcd")
    held = Held(monkeypatch)
    with ThreadPoolExecutor() as pool:
        clearing = pool.submit(cache.clear)
        assert held.entered.wait(10)
        until(lambda: served._link is not None and bool(served._link._tickets))  # it has been answered
        served.server.sessions[0].stop()
        with pytest.raises(BackendError, match="has not ended the clear, some may be left; clear again"):
            clearing.result(10)
        held.go_on.set()
    cache.close()


def client_of(cache: Cache, *, operator: bool) -> RemoteClient:
    served: Served = cache.client  # type: ignore[assignment]
    return RemoteClient(served.path, Config(call_timeout=10.0), "operator" if operator else "engine", operator=operator)


def test_operators_come_through_when_engines_have_taken_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MOST_CLIENTS", 2)
    monkeypatch.setattr(server, "OPERATORS", 1)
    cache = open_served(tmp_path)  # an engine
    second, third = client_of(cache, operator=False), client_of(cache, operator=False)
    refusal = f"the node at {second.path} sends this client away: the node has its 2 clients; close some that are"
    assert third.why == f"{refusal} not needed"
    with pytest.raises(BackendError) as refused:
        third.stats()
    assert str(refused.value) == third.why, "it is there, and need not be started"
    assert main(["freeze", "--socket", second.path]) == 0, "commands say that they are operators'"
    until(lambda: len(second.clients()) == 2)
    assert second.stats().frozen
    operator, another = client_of(cache, operator=True), client_of(cache, operator=True)
    until(lambda: [each.name for each in operator.clients()][1:] == ["engine", "operator"])
    assert "2 clients and 1 commands of operators; end some that are not needed" in another.why
    logged = [record.getMessage() for record in caplog.records if record.name == server.__name__]
    for reason in ("has its 2 clients; close", "has its 2 clients and 1 commands"):
        assert [line for line in logged if reason in line], "each reason is a kind of its own"
    another.close()
    second.close()
    assert third.wait_until_up(20), "it has the place of one that has left"
    until(lambda: len(third.clients()) == 3)
    operator.close()
    third.close()
    cache.close()


def test_operators_take_no_place_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CLIENTS", 2)
    monkeypatch.setattr(server, "OPERATORS", 1)
    cache = open_served(tmp_path)  # an engine
    operators = [client_of(cache, operator=True) for _ in range(2)]
    assert [each.why for each in operators] == ["", ""], "what engines leave is anybody's"
    operators.pop().close()
    served: Served = cache.client  # type: ignore[assignment]
    until(lambda: len(served.clients()) == 2)
    engine = client_of(cache, operator=False)
    assert (engine.why, len(engine.clients())) == ("", 3)
    for client in (engine, *operators):
        client.close()
    cache.close()


def test_connections_that_say_nothing_take_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CLIENTS", 2)
    monkeypatch.setattr(server, "MOST_STRANGERS", 3)
    cache = open_served(tmp_path)
    served: Served = cache.client  # type: ignore[assignment]
    strangers = []
    for number in range(3):
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        strangers[-1].connect(served.path)
        until(lambda number=number: len(served.server.sessions) == number + 2)  # type: ignore[misc]
    refused = client_of(cache, operator=True)
    assert "3 connections have not said yet whose they are; try again" in refused.why
    for stranger in strangers:
        stranger.close()
    assert refused.wait_until_up(20)
    refused.close()
    cache.close()


def test_a_client_knows_why_its_node_is_not_there(tmp_path: Path) -> None:
    cache = remote(tmp_path / "nowhere")
    client: RemoteClient = cache.client  # type: ignore[assignment]
    assert client.why == f"no node at {tmp_path / 'nowhere'}: [Errno 2] No such file or directory"
    assert client.node_pid == 0
    with pytest.raises(BackendError) as refused:
        client.stats()
    start = f"start it with: lmcache-core serve --socket {tmp_path / 'nowhere'}"
    assert str(refused.value) == f"{client.why}; {start}"
    cache.close()


def test_a_refusal_of_another_version_is_what_its_client_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_served(tmp_path)
    served: Served = cache.client  # type: ignore[assignment]
    monkeypatch.setattr(link, "wire", SimpleNamespace(**vars(wire) | {"VERSION": wire.VERSION + 1}))
    other = RemoteClient(served.path, Config(call_timeout=10.0))
    with pytest.raises(BackendError) as refused:
        other.stats()
    assert str(refused.value) == (
        f"the node at {served.path} sends this client away: this node speaks version {wire.VERSION}, the client "
        f"{wire.VERSION + 1}; install one version of lmcache-core for both"
    )
    other.close()
    cache.close()


def test_an_interrupted_call_does_not_say_that_the_node_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_served(tmp_path)
    served: Served = cache.client  # type: ignore[assignment]
    made = link.Link(served.path, "a test", 10.0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made._reader, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.call(wire.Ping(), wire.Number)
    assert made.why == "the connection to the node was cut, since a call was interrupted"
    made.close()
    cache.close()
