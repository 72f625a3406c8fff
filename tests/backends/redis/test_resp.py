"""The protocol on one socket: whatever comes, in whatever pieces, is a value, a miss or a lost connection."""

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_backends.redis.resp import (
    MOST_ITEMS,
    MOST_LINE,
    MOST_TEXT,
    ConnectionLost,
    ErrorReply,
    RespSocket,
    command,
    set_command,
)
from lmcache_core.protocols import ReadResult


@contextmanager
def told(pieces: Sequence[bytes]) -> Iterator[RespSocket]:
    """A connection whose other end sends `pieces`, and ends."""
    ours, theirs = socket.socketpair()

    def tell() -> None:
        with theirs:
            for piece in pieces:
                try:
                    theirs.sendall(piece)
                except BrokenPipeError:
                    return

    teller = threading.Thread(target=tell)
    teller.start()
    connection = RespSocket(ours)
    try:
        yield connection
    finally:
        connection.close()
        teller.join()


def cut(text: bytes, places: Sequence[int]) -> list[bytes]:
    """`text` in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$6\r\na\r\nb\r\n\r\n", b"a\r\nb\r\n"),
        (b"*3\r\n:1\r\n$-1\r\n*1\r\n+x\r\n", [1, None, [b"x"]]),
    ],
)
def test_a_reply_of_each_kind(text: bytes, reply: object) -> None:
    with told([text[at : at + 1] for at in range(len(text))]) as connection:
        assert connection.reply() == reply


def test_an_error_is_a_reply() -> None:
    with told([b"-MOVED 3999 127.0.0.1:6381\r\n:1\r\n"]) as connection:
        error = connection.reply()
        assert isinstance(error, ErrorReply)
        assert (error.code, error.rest) == ("MOVED", "3999 127.0.0.1:6381")
        assert connection.reply() == 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=300), st.integers(0, 70_000)), min_size=1, max_size=5),
    st.lists(st.integers(0, 1 << 20), max_size=8),
)
def test_values_in_any_pieces_fill_their_buffers(values: list[bytes | int | None], places: list[int]) -> None:
    wanted = [value if not isinstance(value, int) else random.Random(value).randbytes(value) for value in values]
    text = b"".join(b"$-1\r\n" if each is None else b"$%d\r\n%b\r\n" % (len(each), each) for each in wanted)
    with told(cut(text, places)) as connection:
        for each in wanted:
            into = bytearray(2 if each is None else len(each))
            result = connection.value_into(memoryview(into))
            assert result is (ReadResult.MISS if each is None else ReadResult.HIT)
            assert each is None or into == each
        with pytest.raises(ConnectionLost, match="closed by the server"):
            connection.reply()


@pytest.mark.parametrize("size", [0, 1, 99, 101, 200_000])
def test_a_value_of_another_size_touches_nothing_and_the_next_one_is_read(size: int) -> None:
    with told([b"$%d\r\n%b\r\n$3\r\nabc\r\n" % (size, bytes(size))]) as connection:
        into, after = bytearray(b"\xff" * 100), bytearray(3)
        assert connection.value_into(memoryview(into)) is ReadResult.CORRUPT
        assert into == b"\xff" * 100
        assert connection.value_into(memoryview(after)) is ReadResult.HIT
        assert after == b"abc"


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$99999999999999999999999999\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"$%d\r\n" % (MOST_TEXT + 1),
        b"*%d\r\n" % (MOST_ITEMS + 1),
        b"*1\r\n" * 20,
        b"+" + b"x" * (MOST_LINE + 10),
        b"$3\r\nabcde\r\n",
        b":1:2\r\n",
        b"",
        b"+O",
    ],
)
def test_what_is_not_the_protocol_ends_the_connection(text: bytes) -> None:
    with told([text]) as connection, pytest.raises(ConnectionLost):
        connection.reply()


def test_a_value_that_is_said_to_be_endless_is_not_waited_for() -> None:
    with told([b"$999999999999\r\n"]) as connection, pytest.raises(ConnectionLost, match="999999999999 bytes"):
        connection.value_into(memoryview(bytearray(10)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_ends_in_a_reply_or_a_lost_connection(noise: bytes, value: bool) -> None:
    with told([noise]) as connection:
        try:
            for _ in range(50):
                connection.value_into(memoryview(bytearray(8))) if value else connection.reply()
        except ConnectionLost:
            pass


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50_000), min_size=1, max_size=4), st.integers(0, 10**6))
def test_what_is_sent_arrives_in_order(values: list[bytes], ttl: int) -> None:
    ours, theirs = socket.socketpair()
    parts = [part for value in values for part in set_command(b"key", memoryview(value), ttl)]
    expected = b"".join(bytes(part) for part in parts)
    found = bytearray()

    def take() -> None:
        while data := theirs.recv(1 << 16):
            found.extend(data)

    taker = threading.Thread(target=take)
    taker.start()
    connection = RespSocket(ours)
    connection.send(parts)
    connection.close()
    taker.join()
    theirs.close()
    assert bytes(found) == expected
    assert connection.sent == len(expected)


def test_commands_as_bytes() -> None:
    assert command(b"GET", b"k") == b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    assert b"".join(map(bytes, set_command(b"k", memoryview(b"vv")))) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\nvv\r\n"
    with_ttl = b"".join(map(bytes, set_command(b"k", memoryview(b"vv"), 1500)))
    assert with_ttl == b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\nvv\r\n$2\r\nPX\r\n$4\r\n1500\r\n"


def test_an_abort_ends_a_call_that_waits() -> None:
    ours, theirs = socket.socketpair()
    connection = RespSocket(ours)
    raised: list[ConnectionLost] = []
    waiting = threading.Event()

    def wait() -> None:
        try:
            waiting.set()
            connection.value_into(memoryview(bytearray(100)))
        except ConnectionLost as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    theirs.sendall(b"$100\r\nabc")
    connection.abort()
    thread.join(10)
    assert not thread.is_alive()
    assert "given up" in str(raised[0])
    connection.close()
    theirs.close()
