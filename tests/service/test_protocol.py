"""What comes over a socket may be anything: it costs its sender the connection, and nobody else anything."""

from __future__ import annotations

import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import Cache
from lmcache_core.service import wire
from lmcache_core.service.link import Link, LinkDown
from tests.node.kv import at_rest, namespace, retrieve, store, until
from tests.node.shelf import Shelf
from tests.service.kit import open_served

MESSAGES = 10_000
MOST_GROWTH = 4 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with open_served(tmp_path, Shelf(), slots=16) as cache:
        yield cache


def connected(cache: Cache) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(10)
    stream.connect(cache.client.path)  # type: ignore[attr-defined]
    return stream


def greeted(cache: Cache) -> socket.socket:
    stream = connected(cache)
    stream.sendall(wire.encode(wire.Hello(wire.VERSION, "a test", 0)))
    answer(stream)
    return stream


def answer(stream: socket.socket) -> Any:
    """The next answer; None at the end of the stream."""
    body = wire.Reader(stream).receive()
    return None if body is None else wire.decode_answer(body)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def at_end(stream: socket.socket) -> bool:
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


HOSTILE = {
    "no length": b"\x01",
    "too long": struct.pack("<I", 0xFFFFFFFF),
    "a byte too long": struct.pack("<I", wire.MOST_BYTES + 1),
    "empty": framed(b""),
    "no msgpack": framed(b"\xc1"),
    "no array": framed(msgspec.msgpack.encode({"a": 1})),
    "no tag": framed(msgspec.msgpack.encode([])),
    "an unknown tag": framed(msgspec.msgpack.encode([99])),
    "an answer": wire.encode(wire.Number(1)),
    "too few fields": framed(msgspec.msgpack.encode([2, 0])),
    "too many fields": framed(msgspec.msgpack.encode([6, 1, 2, 3])),
    "a field of another type": framed(msgspec.msgpack.encode([2, "model", b"", None, False])),
    "a second hello": wire.encode(wire.Hello(wire.VERSION, "again", 0)),
    "nested deeply": framed(b"\x91" * 100_000),
    "an array that claims to be huge": framed(b"\xdd\xff\xff\xff\xff"),
    "keys that claim to be huge": framed(b"\x95\x02\x00\xc6\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nonsense_is_answered_with_an_error_and_ends_the_connection(cache: Cache, what: str) -> None:
    stream = greeted(cache)
    stream.sendall(wire.encode(wire.Register(namespace())))
    assert answer(stream) == wire.Number(0)
    stream.sendall(HOSTILE[what])
    stream.shutdown(socket.SHUT_WR)
    failed = answer(stream)
    assert isinstance(failed, wire.Failed)
    assert failed.kind == "WireError"
    assert at_end(stream)
    stream.close()
    assert store(cache, "abcd")
    assert retrieve(cache, "abcd") == 4


@pytest.mark.parametrize(
    "first",
    [
        wire.Lookup(0, b"", None, False),
        wire.AskStats(),
        wire.Hello(wire.VERSION + 1, "newer", 0),
        wire.Hello(0, "older", 0),
    ],
    ids=["a lookup", "a question", "a newer version", "an older version"],
)
def test_a_connection_begins_with_a_hello_of_this_version(cache: Cache, first: msgspec.Struct) -> None:
    stream = connected(cache)
    stream.sendall(wire.encode(first))
    failed = answer(stream)
    assert isinstance(failed, wire.Failed)
    if isinstance(first, wire.Hello):
        assert "install one version of lmcache-core for both" in failed.text
    assert at_end(stream)
    stream.close()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (wire.Lookup(7, b"", None, False), "no model 7"),
        (wire.Lookup(-1, b"", None, False), "no model -1"),
        (wire.Lookup(0, b"", ("nowhere",), False), "no tier 'nowhere'"),
        (wire.Lookup(0, bytes(33), None, False), "keys of 33 bytes"),
        (wire.Grant(5, 0, 1), "no lease 5"),
        (wire.Grant(1, 2, 1), "part 2"),
        (wire.Grant(1, -1, 1), "part -1"),
        (wire.Grant(1, 0, 1 << 40), "cannot be had"),
        (wire.Hold(0, b"", None, -1), "cannot be had"),
        (wire.FindPastHost(5, 0, 1), "no lease 5"),
        (wire.FindPastHost(1, 2, 1), "cannot be said of part 2"),
        (wire.FindPastHost(1, -1, 1), "cannot be said of part -1"),
        (wire.FindPastHost(1, 0, 1 << 40), "cannot be said"),
        (wire.FindPastHost(1, 0, -1), "cannot be said"),
        (wire.FinishStore(9), "no store 9"),
        (wire.BeginStore(0, bytes(64), (), 3, None, 0), "no page 3"),
        (wire.BeginStore(0, bytes(64), (), -1, None, 0), "no page -1"),
        (wire.BeginStore(0, bytes(64), (3,), 0, None, 0), "boundaries"),
        (wire.BeginStore(0, bytes(64), (2, 1), 0, None, 0), "boundaries"),
        (wire.BeginStore(0, bytes(64), (0,), 0, None, 0), "boundaries"),
        (wire.BeginStore(0, bytes(64), (), 0, None, -1), "no -1 pages"),
        (wire.Share(0, 0), "no store 0"),
        (wire.Share(5, 0), "no lease 5"),
        (wire.Prefetch(0, b"", None, "nowhere"), "no tier 'nowhere'"),
        (wire.Flush(float("nan")), "a timeout is 0 to"),
        (wire.Flush(-1.0), "a timeout is 0 to"),
        (wire.Drain(float("nan")), "a timeout is 0 to"),
        (wire.Flush(1e300), "a timeout is 0 to"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_request_that_cannot_be_is_answered_and_the_next_works(
    cache: Cache, request_: msgspec.Struct, text: str
) -> None:
    store(cache, "abcd")
    stream = greeted(cache)
    stream.sendall(wire.encode(wire.Register(namespace())))
    assert answer(stream) == wire.Number(0)
    keys = wire.join_keys(cache.prompt([1] * 64).keys)
    stream.sendall(wire.encode(wire.Hold(0, keys, None, 1)))
    held = answer(stream)
    assert held.hold == 1
    stream.sendall(wire.encode(request_))
    failed = answer(stream)
    assert isinstance(failed, wire.Failed)
    assert text in failed.text
    casts: list[msgspec.Struct] = [
        wire.Count("no_such", "x", 1.0),
        wire.Count("faults", "x\n", 1.0),
        wire.Count("faults", "x", -1.0),
    ]
    for cast in (*casts, wire.Consume(1, -1), wire.Consume(1, 1 << 60), wire.Release(77), wire.Filled(8, 8)):
        stream.sendall(wire.encode(cast))
    stream.sendall(wire.encode(wire.AskStats()))
    assert isinstance(answer(stream), wire.Report)
    stream.close()
    until(lambda: cache.stats().leases == 0)
    at_rest(cache)


REQUESTS: list[Any] = [kind for kind in msgspec.inspect.type_info(wire.Request).types]  # type: ignore[attr-defined]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=99),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Messages that are well formed, nearly so, and not at all."""
    match draw(st.integers(0, 3)):
        case 0:
            return draw(st.binary(max_size=200))
        case 1:
            return msgspec.msgpack.encode([draw(st.integers(-1, 120)), *draw(st.lists(ANYTHING, max_size=6))])
        case _:
            body = bytearray(msgspec.msgpack.encode(draw(st.sampled_from(SAMPLES))))
            for _ in range(draw(st.integers(0, 2))):
                body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
            return bytes(body)


SAMPLES = [
    wire.Register(namespace()),
    wire.Lookup(0, bytes(64), None, False),
    wire.Hold(0, bytes(64), ("cpu",), 8),
    wire.Grant(1, 0, 8),
    wire.Consume(1, 1),
    wire.Release(1),
    wire.BeginStore(0, bytes(64), (1, 2), 0, None, 0),
    wire.Filled(2, 0),
    wire.FinishStore(2),
    wire.DropStore(2),
    wire.EndStore(2, -1),
    wire.Prefetch(0, bytes(32), None, "cpu"),
    wire.Pin(0, bytes(32)),
    wire.Pin(0, bytes(32), True),
    wire.Unpin(0, bytes(32)),
    wire.Unpin(None, b"", True),
    wire.Evict(0, bytes(32), None),
    wire.Count("faults", "fuzz", 1.0),
    wire.AskStats(),
    wire.Flush(0.0),
    wire.Ping(),
    wire.Share(1, 0),
    wire.JoinHold(1, 1),
    wire.JoinStore(1),
    wire.AskSpaces(),
    wire.AskClients(),
    wire.Freeze(False),
    wire.AskBeside(),
    wire.FindPastHost(1, 0, 8),
]


def test_every_request_is_in_the_samples() -> None:
    told = {type(sample) for sample in SAMPLES} | {wire.Hello, wire.Clear, wire.Drain}
    assert told == {kind.cls for kind in REQUESTS}


@settings(max_examples=MESSAGES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        request = wire.decode_request(body)
    except wire.WireError:
        return
    assert wire.decode_request(wire.encode(request)[4:]) == request or "nan" in repr(request)


def test_ten_thousand_messages_disturb_nobody_and_take_no_memory(cache: Cache) -> None:
    """A thousand each on ten connections at least; a connection that was ended is followed by the next."""
    rng = random.Random(5)
    assert store(cache, "abcd")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    sent = connections = 0
    while sent < MESSAGES:
        connections += 1
        stream = greeted(cache)
        try:
            stream.sendall(wire.encode(wire.Register(namespace())))
            for _ in range(rng.randrange(200)):
                body = bytearray(msgspec.msgpack.encode(rng.choice(SAMPLES)))
                if rng.random() < 0.02:
                    body[rng.randrange(len(body))] = rng.randrange(256)
                stream.sendall(framed(bytes(body)))
                sent += 1
        except OSError:
            pass  # it was ended
        stream.close()
        if connections % 20 == 0:
            assert retrieve(cache, "abcd") == 4
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most - before < MOST_GROWTH
    until(lambda: len(cache.client.server.sessions) == 1)  # type: ignore[attr-defined]
    assert store(cache, "efgh")
    at_rest(cache)


def test_a_length_alone_makes_nobody_allocate() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack("<I", wire.MOST_BYTES) + bytes(100))
    theirs.close()
    reader = wire.Reader(ours)
    tracemalloc.start()
    with pytest.raises(wire.WireError, match="ends inside a message"):
        reader.receive()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    ours.close()


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 300_000), max_size=6), cuts=st.lists(st.integers(1, 100_000), max_size=30))
def test_messages_arrive_whole_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    bodies = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    stream = b"".join(framed(body) for body in bodies)

    class Cut:
        def __init__(self) -> None:
            self.at = 0
            self.cuts = list(cuts)

        def recv_into(self, room: memoryview) -> int:
            count = min(len(room), self.cuts.pop() if self.cuts else len(room), len(stream) - self.at)
            room[:count] = stream[self.at : self.at + count]
            self.at += count
            return count

    reader = wire.Reader(Cut())  # type: ignore[arg-type]
    received = []
    while (body := reader.receive()) is not None:
        received.append(bytes(body))
    assert received == bodies


class FakeNode:
    """Answers one connection with given bytes."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen()
        self.answers = answers
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        stream, _ = self.socket.accept()
        with stream:
            for each in self.answers:
                stream.recv(1 << 16)
                stream.sendall(each)

    def close(self) -> None:
        self.thread.join(10)
        self.socket.close()


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xff\xff\xff\xff",
        framed(b"\xc1"),
        wire.encode(wire.Number(1)),
        wire.encode(wire.Failed("PermissionError", "no")),
        wire.encode(wire.Welcome(wire.VERSION, 1 << 20, 256, 64, 4096, ("cpu",))),  # without descriptors
    ],
    ids=["nothing", "a huge length", "no msgpack", "something else", "a refusal", "no descriptors"],
)
def test_a_node_that_says_nonsense_is_no_node(tmp_path: Path, told: bytes) -> None:
    fake = FakeNode(tmp_path / "s", told)
    with pytest.raises(LinkDown, match=r"the node at .* (cannot be used|does not answer|sends this client away): "):
        Link(str(tmp_path / "s"), "a test", 0.5)
    fake.close()


def test_an_answer_that_came_before_the_node_ended_is_read(cache: Cache) -> None:
    """As that to `Drain`, upon which a node ends, where the caller is slow to look at it."""
    client: Any = cache.client
    link = client._link
    receive, closed = link._reader.receive, threading.Event()
    close_sockets = link._close_sockets

    def close() -> None:
        closed.set()
        close_sockets()

    def late() -> Any:
        link._stream.recv(1, socket.MSG_PEEK)  # it is there
        client.server.close()
        until(lambda: client._link is None)
        closed.wait(0.2)  # the sockets are not closed under it
        return receive()

    link._close_sockets, link._reader.receive = close, late
    assert link.call(wire.Ping(), wire.Number) == wire.Number(0)
    assert closed.wait(5)
