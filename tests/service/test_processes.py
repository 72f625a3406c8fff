"""Nodes and engines as processes: sharing, dying, freezing and coming back."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmcache_core import ConfigError
from lmcache_core.errors import BackendError, UsageError
from lmcache_core.service import session, wire
from lmcache_core.service.address import Listener, socket_path
from lmcache_core.service.link import Link, LinkDown
from lmcache_core.wrappers import Slow
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PageView, at_rest, open_cache, retrieve, store, tokens, until
from tests.node.shelf import Shelf
from tests.service.kit import Process, open_served, remote, serving


class Engine:
    """A worker process at a node's socket."""

    def __init__(self, path: Path, **environment: str) -> None:
        self.process = Process("-m", "tests.service.worker", str(path), **environment)
        assert self.process.line() == "ready"

    def tell(self, line: str) -> None:
        stream = self.process.process.stdin
        assert stream is not None
        stream.write(line.encode() + b"\n")
        stream.flush()

    def do(self, line: str) -> Any:
        self.tell(line)
        return json.loads(self.process.line())


@contextmanager
def engine(path: Path, **environment: str) -> Iterator[Engine]:
    worker = Engine(path, **environment)
    try:
        yield worker
    finally:
        worker.process.close()


def test_what_one_engine_computed_another_has_also_after_a_restart_of_the_node(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path), engine(path) as first, engine(path) as second:
        assert first.do("store abcdefgh") == [8, True]
        assert second.do("retrieve abcdefghij") == 8
        node.stop()
        assert second.do("retrieve abcdefgh") == 0
        with serving(tmp_path):
            until(lambda: second.do("lookup abcdefgh") == 8)
            assert second.do("retrieve abcdefgh") == 8
            assert first.do("store ijkl") == [4, True]
            assert second.do("retrieve ijkl") == 4


def test_what_a_client_held_ends_with_it(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, path), engine(path) as first:
        cache = remote(path)
        assert first.do("store abcdefgh") == [8, True]
        assert first.do("pin abcd") == 4
        assert first.do("hold abcdefgh") == [8, 2]
        assert first.do("reserve ijklmnop") == 2
        stats = cache.stats()
        assert (stats.leases, stats.pinned, stats.staged) == (1, 1, 2)
        first.process.kill()
        until(lambda: not (cache.stats().leases or cache.stats().pinned or cache.stats().staged))
        assert cache.lookup(tokens("ijkl")).tokens == 0
        assert store(cache, "ijklmnop")
        at_rest(cache)
        cache.close()


def test_what_a_client_held_is_kept_until_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may still copy for a process whose sockets are closed already."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not session.is_exiting(child.pid)
    session.wait_for_exit(child.pid, 1e6)  # one that lives is not waited for
    monkeypatch.setattr(session, "is_exiting", lambda pid: True)
    ended = threading.Event()

    def wait() -> None:
        session.wait_for_exit(child.pid, 60)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not ended.wait(0.1)
    child.kill()
    assert ended.wait(10)
    waiting.join()
    monkeypatch.undo()
    assert session.is_exiting(child.pid)  # nobody has looked yet
    session.wait_for_exit(child.pid, 1e6)
    child.communicate()
    assert not session.is_exiting(child.pid)
    session.wait_for_exit(child.pid, 1e6)
    session.wait_for_exit(0, 1e6)


def test_a_frozen_client_and_one_that_takes_no_answers_hold_up_nobody(tmp_path: Path) -> None:
    """The node answers the others within their deadline, a second."""
    with serving(tmp_path) as (_, path), engine(path) as first, engine(path) as second:
        cache = remote(path, call_timeout=1.0)
        assert first.do("store abcdefgh") == [8, True]
        assert first.do("hold abcdefgh") == [8, 2]
        assert first.do("reserve ijklmnop") == 2
        first.process.freeze()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as greedy:
            greedy.connect(str(path))
            greedy.sendall(wire.encode(wire.Hello(wire.VERSION, "greedy", 0)))
            greedy.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    greedy.send(wire.encode(wire.AskStats()))
            for _ in range(20):
                assert cache.stats().leases >= 1
                assert cache.lookup(tokens("abcdefgh")).tokens == 2 * CHUNK_TOKENS
            assert store(cache, "qrst")
            assert retrieve(cache, "abcdefgh") == 8
            assert second.do("retrieve qrst") == 4
        first.process.kill()
        until(lambda: not (cache.stats().leases or cache.stats().staged))
        at_rest(cache)
        cache.close()


def test_a_flood_of_stores_takes_no_more_memory_or_disk_than_was_allowed(tmp_path: Path) -> None:
    """Sixteen times as much as the pool, and as the disk may hold, faster than the disk takes it."""
    allowed = 4 << 20
    tier = {"backend": "disk", "path": str(tmp_path / "kv"), "capacity": allowed, "min_free": 0, "segment": "256KiB"}
    with serving(tmp_path, cpu={"capacity": allowed}, tiers=[tier]) as (node, path):
        cache = remote(path)
        assert store(cache, "abcd")
        until(lambda: cache.stats().pool_usable == allowed)
        process = psutil.Process(node.process.pid)
        before = process.memory_info().rss
        most = 0
        sent = 0
        while sent < 16 * allowed:
            prompt = cache.prompt([sent] * 32 * CHUNK_TOKENS)
            cache.store(prompt, PageView(len(prompt.keys)))
            sent += 32 * CHUNK_FRAME
            most = max(most, process.memory_info().rss)
        assert cache.flush(20)
        stats = cache.stats()
        assert stats.pool_used <= allowed
        assert stats.tiers[0].used <= allowed
        assert sum(file.stat().st_size for file in (tmp_path / "kv").glob("*/segment-*")) <= allowed
        assert stats.counts["evicted_chunks"]["cpu"] > allowed // CHUNK_FRAME
        assert max(most, process.memory_info().rss) - before < 8 << 20
        at_rest(cache)
        cache.close()


def test_a_frozen_node_costs_one_deadline_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path):
        cache = remote(path, call_timeout=0.2)
        assert store(cache, "abcd")
        node.freeze()
        started = time.monotonic()
        assert cache.lookup(tokens("abcd")).tokens == 0
        first = time.monotonic() - started
        started = time.monotonic()
        for _ in range(50):
            assert retrieve(cache, "abcd") == 0
        assert time.monotonic() - started < first + 5
        node.process.send_signal(signal.SIGCONT)
        until(lambda: cache.lookup(tokens("abcd")).tokens == CHUNK_TOKENS)
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)
        cache.close()


def test_a_node_that_freezes_while_it_is_waited_for_ends_the_waiting(tmp_path: Path) -> None:
    slow = Slow(Shelf())
    cache = open_served(tmp_path, slow, call_timeout=0.2, tiers=[{"read_timeout": 3600.0}])
    try:
        assert store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        got: list[int] = []
        waiting = threading.Thread(target=lambda: got.append(retrieve(cache, "abcd")))
        waiting.start()
        assert slow.wait_until_hanging()
        with cache.client.node.guard.mutex:  # type: ignore[attr-defined]
            assert not got
            waiting.join(10)
            assert got == [0]
    finally:
        slow.release()
        cache.close()


def test_a_node_that_is_killed_ends_waiting_and_its_disk_is_back_with_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path), engine(path) as worker:
        assert worker.do("store abcdefgh") == [8, True]
        assert worker.do("hold abcdefgh") == [8, 2]
        node.kill()
        assert worker.do("retrieve abcdefgh") == 0
        assert worker.do("store ijkl") == [0, False]
        with serving(tmp_path):
            until(lambda: worker.do("lookup abcdefgh") == 8)
            assert worker.do("retrieve abcdefgh") == 8
            cache = remote(path)
            at_rest(cache)
            cache.close()


def test_a_client_that_came_first_uses_the_node_when_it_comes(tmp_path: Path) -> None:
    cache = remote(tmp_path / "node.sock", chunk_tokens=CHUNK_TOKENS, page_tokens=16)
    assert cache.lookup(tokens("abcd")).tokens == 0
    prompt = cache.prompt(tokens("abcd"))
    result = cache.store(prompt, PageView.of(prompt.keys))
    assert (result.stored, result.dropped, result.wait(10)) == (0, 64, False)
    assert cache.flush(1) is False
    for ask in (cache.stats, lambda: cache.pin(prompt), cache.clear):
        with pytest.raises(BackendError, match="lmcache-core serve --socket"):
            ask()
    with serving(tmp_path):
        until(lambda: cache.lookup(tokens("abcd")).tokens == 0 and cache.client.wait_until_up(1))  # type: ignore[attr-defined]
        assert store(cache, "abcd")
        assert retrieve(cache, "abcd") == 4
    cache.close()


def test_two_nodes_at_one_path_and_what_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with serving(tmp_path) as (node, _):
        with pytest.raises(ConfigError, match=rf"a node \(process {node.process.pid}\) is served at {path} already"):
            Listener(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
        node.kill()
        assert path.is_socket()  # left behind
    with serving(tmp_path) as (node, _):
        assert node.stop() == 0
        assert not path.exists()
        assert not Path(f"{path}.lock").exists()
    path.write_text("a file")
    with pytest.raises(ConfigError, match="is no socket"):
        Listener(str(path))
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        socket_path("/" + 200 * "a")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_the_socket_of_another_program_stays(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "theirs.sock"
    with socket.socket(socket.AF_UNIX, kind) as theirs:
        theirs.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            theirs.listen(1)
        inode = path.stat().st_ino
        with pytest.raises(ConfigError, match=f"a process listens at {path} already.*; choose another path"):
            Listener(str(path))
        assert path.stat().st_ino == inode
        assert not Path(f"{path}.lock").exists()
    Listener(str(path)).close()  # it has ended
    assert list(tmp_path.iterdir()) == []


def test_a_node_whose_lock_somebody_removes_keeps_its_socket(tmp_path: Path) -> None:
    cache = open_served(tmp_path)
    path = Path(cache.client.path)  # type: ignore[attr-defined]
    Path(f"{path}.lock").unlink()
    with pytest.raises(ConfigError, match="or a node whose lock somebody has removed"):
        Listener(str(path))
    assert store(cache, "abcd")
    other = remote(path)
    assert retrieve(other, "abcd") == 4
    other.close()
    cache.close()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.sock"
    first = Listener(str(path))
    flock = fcntl.flock
    seen = []

    def late(fd: int, how: int) -> None:
        """The owner ends between somebody's open and lock."""
        if how & fcntl.LOCK_EX:
            seen.append(fd)
            if len(seen) == 1:
                first.close()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Listener(str(path))
    assert len(seen) == 2
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Listener(str(path))
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_makes_one_directory_and_no_tree(tmp_path: Path) -> None:
    Listener(str(tmp_path / "own" / "node.sock")).close()
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    missing = tmp_path / "mistyped"
    with pytest.raises(ConfigError, match=f"since {missing} is not there; make that directory"):
        Listener(str(missing / "deep" / "node.sock"))
    assert not missing.exists()


@pytest.mark.parametrize("text", ["/run/a\nb", "/run/a\x1b[2J", "/run/a\0b", "/run/\x85"])
def test_a_socket_has_no_control_characters(text: str) -> None:
    with pytest.raises(ConfigError, match="has control characters in its path"):
        socket_path(text)


@pytest.mark.needs_root
def test_another_user_is_sent_away(tmp_path: Path) -> None:
    cache = open_served(tmp_path)
    path = cache.client.path  # type: ignore[attr-defined]
    for place in (path, *Path(path).parents):
        if Path(tempfile.gettempdir()) in Path(place).parents:
            os.chmod(place, 0o777)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.settimeout(10)
                stream.connect(path)
                code = 0 if b"PermissionError" in stream.recv(1000) and not stream.recv(1) else 2
        finally:
            os._exit(code)  # whatever was raised: there must not be two of the process that runs the tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store(cache, "abcd")
    cache.close()


def test_a_child_of_a_client_does_not_keep_its_leases(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, path), engine(path) as worker:
        assert worker.do("store abcd") == [4, True]
        cache = remote(path)
        held = cache.client.hold(cache._model, cache.prompt(tokens("abcd")).keys)
        child = os.fork()
        if not child:
            signal.pause()
        other = remote(path)
        assert other.stats().leases == 1
        cache.close()
        assert held.pages == 4
        until(lambda: other.stats().leases == 0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        other.close()


def test_what_came_with_a_lease_and_was_not_asked_for_is_not_kept(tmp_path: Path) -> None:
    cache = open_served(tmp_path, Shelf())
    client: Any = cache.client
    assert store(cache, "abcdefgh")
    for _ in range(3):
        cache.clear(["cpu"])
        held = client.hold(cache._model, cache.prompt(tokens("abcdefgh")).keys)
        client.release(held)
        assert cache.flush(10)
    until(lambda: not client._link._tickets)
    assert not client._link._early
    cache.close()


def test_kv_that_a_node_refused_its_successor_may_take(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, path):
        cache = remote(path)
        client: Any = cache.client
        assert store(cache, "abcd")
        node.kill()
        with serving(tmp_path, chunk_tokens=1 << 20, tiers=[]) as (
            other,
            _,
        ):  # in chunks that large it cannot be handled
            assert client.wait_until_up(30)
            assert cache.lookup(tokens("abcd")).tokens == 0
            assert [kind for kind in cache._model.numbers.values() if "too large" in str(kind)]  # type: ignore[attr-defined]
            other.kill()
        with serving(tmp_path):
            until(lambda: cache.lookup(tokens("abcd")).tokens == CHUNK_TOKENS)
        cache.close()


def test_many_threads_of_one_client(tmp_path: Path) -> None:
    cache = open_served(tmp_path, slots=32)
    texts = ["abcd", "efgh", "ijkl", "mnop"]
    failures: list[object] = []
    for text in texts:
        assert store(cache, text)

    def work(text: str) -> None:
        try:
            for _ in range(30):
                prompt = cache.prompt(tokens(text))
                cache.store(prompt, PageView.of(prompt.keys))
                assert retrieve(cache, text) == 4
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(text,)) for text in texts for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    at_rest(cache)
    cache.close()


def test_a_node_that_was_stopped_when_it_was_told_to_end_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, _):
        node.freeze()
        node.process.terminate()
        node.process.send_signal(signal.SIGCONT)
        assert node.process.wait(30) == 0


def test_a_socket_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    cache = open_served(tmp_path)
    path = Path(cache.client.path)  # type: ignore[attr-defined]
    path.unlink()
    until(path.is_socket)
    other = remote(path)
    until(lambda: other.client.wait_until_up(1))  # type: ignore[attr-defined]
    assert store(other, "abcd")
    other.close()
    path.unlink()
    Path(f"{path}.lock").unlink()
    until(path.is_socket)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Listener(str(path))
    cache.close()
    assert not path.exists()


def test_a_child_of_a_nodes_process_keeps_neither_its_path_nor_its_clients(tmp_path: Path) -> None:
    cache = open_served(tmp_path)
    path = cache.client.path  # type: ignore[attr-defined]
    child = os.fork()
    if not child:
        signal.pause()
    try:
        assert store(cache, "abcd")
        cache.close()
        Listener(path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_client_for_whom_there_is_no_thread_is_sent_away_and_the_next_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_served(tmp_path)
    path = cache.client.path  # type: ignore[attr-defined]
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("lmcache-client"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(LinkDown, match="can't start new thread"):
        Link(path, "a test", 5.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    Link(path, "a test", 5.0).close()
    cache.close()


def test_a_clients_configuration_is_none_of_a_node(tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text("page_tokens: 64\nconnect: /run/node.sock\n")
    process = Process("-m", "lmcache_core", "serve", "--config", str(config), "--socket", str(tmp_path / "s"))
    try:
        assert process.line() == ""
        assert process.process.wait(30) == 1
    finally:
        process.close()


@pytest.mark.parametrize("how", ["direct", "socket"])
@pytest.mark.parametrize(
    "keys", [5, None, "x" * 32, b"x" * 32, ["x" * 32], [b"x"], [b"x" * 31, b"y"], [b"x" * 64], {b"x" * 32}, [None]]
)
def test_keys_that_cannot_be_are_refused_and_the_node_goes_on(tmp_path: Path, how: str, keys: Any) -> None:
    cache = open_served(tmp_path) if how == "socket" else open_cache()
    client = cache.client
    with pytest.raises(UsageError, match=r"keys? (are|of a page)"):
        client.lookup(cache._model, keys)
    with pytest.raises(UsageError, match=r"keys? (are|of a page)"):
        client.begin_store(cache._model, keys)
    for places in ("cpu", [3], 3):
        with pytest.raises(UsageError, match="places are a list"):
            client.lookup(cache._model, [], places)  # type: ignore[arg-type]
    assert store(cache, "abcd")
    at_rest(cache)
    cache.close()
