"""The Redis protocol (RESP2) on one blocking socket, without copies: values go from the caller's memory to the socket
and from the socket to the caller's memory, in as few calls as the kernel allows, each of which lets other threads run.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final, Union

from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult

Buffer = bytes | memoryview

MOST_LINE: Final = 1 << 16
MOST_TEXT: Final = 1 << 20
"""Bytes of a text reply that is not a chunk. Whoever is at the other end must not make us allocate more."""
MOST_ITEMS: Final = 1 << 16
MOST_DEPTH: Final = 8
MOST_SKIPPED: Final = 1 << 30
_AHEAD = 64
"""Bytes read at once where a value follows: what is read too much is copied."""
_IOV = 512
CRLF = b"\r\n"


class ErrorReply(Exception):
    """The server answered with an error: a word in capitals, and a text."""

    def __init__(self, text: str) -> None:
        text = "".join(letter if letter.isprintable() else " " for letter in text)  # it goes into logs
        super().__init__(text)
        self.code, _, self.rest = text.partition(" ")


Reply = Union[bytes, int, None, list["Reply"], ErrorReply]  # noqa: UP007  a type that holds itself


class ConnectionLost(BackendError):
    """The connection ended, was reset, or what came is not the protocol. Nothing more can come of it."""

    def __init__(self, problem: str, *, unanswered: bool = False) -> None:
        super().__init__(problem)
        self.unanswered = unanswered
        """Not one byte came in answer: the server had probably closed it before."""


def command(*words: bytes) -> bytes:
    """A command whose arguments are all short."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def set_command(key: bytes, value: memoryview, ttl_ms: int = 0) -> list[Buffer]:
    """`SET key value`, with `PX ttl_ms` if it is not 0, in parts; `value` is not copied."""
    words = 5 if ttl_ms else 3
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, value.nbytes)
    if not ttl_ms:
        return [head, value, CRLF]
    number = b"%d" % ttl_ms
    return [head, value, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(number), number)]


class RespSocket:
    """One connection. To be used by one thread at a time; `abort` may be called by any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(MOST_LINE)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self.plain = type(sock) is socket.socket
        self.sent = 0
        self.received = 0
        self._before = 0
        self.aborted = False

    def abort(self) -> None:
        """Make calls of other threads end at once."""
        self.aborted = True
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # of TLS too: nothing more is to be said

    def limit(self, seconds: float | None) -> None:
        """End any later call after so long without progress; None for never."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Let go of it. Nobody may be using it."""
        self._sock.close()

    # Sending

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all of `parts`, and take it that answers follow.

        Raises:
            ConnectionLost: It ended.
        """
        self._before = self.received
        try:
            if self.plain:
                self._send_plain(parts)
            else:
                self._send_tls(parts)
        except (OSError, ValueError) as error:  # ValueError: a TLS socket that was shut down
            raise self._lost(error) from error

    def _send_plain(self, parts: Sequence[Buffer]) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(left):
            sent = self._sock.sendmsg(left[first : first + _IOV])
            self.sent += sent
            while first < len(left) and sent >= left[first].nbytes:
                sent -= left[first].nbytes
                first += 1
            if sent:
                left[first] = left[first][sent:]

    def _send_tls(self, parts: Sequence[Buffer]) -> None:
        short: list[Buffer] = []
        for part in parts:
            if len(part) < MOST_LINE:
                short.append(part)
                continue
            self._sock.sendall(b"".join(short))
            self._sock.sendall(part)
            short.clear()
        self._sock.sendall(b"".join(short))
        self.sent += sum(len(part) for part in parts)

    # Receiving

    def reply(self) -> Reply:
        """The next reply, of any kind but a chunk's value. An error is returned, not raised.

        Raises:
            ConnectionLost: It ended, or the reply is not one.
        """
        return self._reply(0)

    def _reply(self, depth: int) -> Reply:
        line = self._line(MOST_LINE)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            size = self._number(rest)
            if size < 0:
                return None
            if size > MOST_TEXT:
                raise self._garbled(f"a text of {size} bytes")
            text = bytearray(size)
            self._fill(memoryview(text))
            self._end_of_value()
            return bytes(text)
        if kind == b"*":
            count = self._number(rest)
            if count > MOST_ITEMS or depth == MOST_DEPTH:
                raise self._garbled(f"a list of {count} items")
            return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        raise self._garbled(repr(line[:40]))

    def value_into(self, into: memoryview) -> ReadResult | ErrorReply:
        """The reply to `GET`: fill `into` with the value, if there is one and it is of that size.

        Raises:
            ConnectionLost: It ended, or the reply is not one.
        """
        found = self._value(into, into.nbytes)
        return ReadResult.HIT if isinstance(found, int) else found

    def value_within(self, into: memoryview) -> int | ReadResult | ErrorReply:
        """The same for a value of any size that fits. Returns its length.

        Raises:
            ConnectionLost: It ended, or the reply is not one.
        """
        return self._value(into, 1)

    def _value(self, into: memoryview, least: int) -> int | ReadResult | ErrorReply:
        line = self._line(_AHEAD)
        if line[:1] == b"-":
            return ErrorReply(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise self._garbled(repr(line[:40]))
        size = self._number(line[1:])
        if size < 0:
            return ReadResult.MISS
        if not least <= size <= into.nbytes:
            self._skip(size)
            self._end_of_value()
            return ReadResult.CORRUPT
        self._fill(into[:size])
        self._end_of_value()
        return size

    def _number(self, text: bytes) -> int:
        if not text.removeprefix(b"-").isdigit() or len(text) > 20:
            raise self._garbled(f"the number {text[:40]!r}")
        return int(text)

    def _line(self, ahead: int) -> bytes:
        searched = self._start
        while True:
            at = self._buffer.find(CRLF, searched, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            searched = max(self._start, self._end - 1)
            if self._start == self._end:
                searched = self._start = self._end = 0
            elif self._end == MOST_LINE:
                if self._start == 0:
                    raise self._garbled("a line that does not end")
                rest = bytes(self._view[self._start : self._end])
                self._buffer[: len(rest)] = rest
                searched -= self._start
                self._start, self._end = 0, len(rest)
            self._end += self._receive(self._view[self._end : min(self._end + ahead, MOST_LINE)], 0)

    def _fill(self, into: memoryview) -> None:
        """Fill `into` with what comes next, which may be here already in part."""
        there = min(self._end - self._start, into.nbytes)
        into[:there] = self._view[self._start : self._start + there]
        self._start += there
        flags = socket.MSG_WAITALL if self.plain else 0
        while there < into.nbytes:
            there += self._receive(into[there:], flags)

    def _skip(self, size: int) -> None:
        if size > MOST_SKIPPED:
            raise self._garbled(f"a value of {size} bytes")
        scratch = bytearray(min(size, 1 << 20))
        while size:
            part = memoryview(scratch)[: min(size, len(scratch))]
            self._fill(part)
            size -= part.nbytes

    def _end_of_value(self) -> None:
        end = bytearray(2)
        if self._end - self._start >= 2:
            end[:] = self._view[self._start : self._start + 2]
            self._start += 2
        else:
            there = self._end - self._start
            end[:there] = self._view[self._start : self._end]
            self._start = self._end = 0
            while self._end < 2 - there:
                self._end += self._receive(self._view[self._end : _AHEAD], 0)
            end[there:] = self._view[: 2 - there]
            self._start = 2 - there
        if end != CRLF:
            raise self._garbled("a value that is longer than it says")

    def _receive(self, into: memoryview, flags: int) -> int:
        try:
            count = self._sock.recv_into(into, into.nbytes, flags)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if count == 0:
            raise self._lost(None)
        self.received += count
        return count

    def _lost(self, error: Exception | None) -> ConnectionLost:
        why = "was given up" if self.aborted else f"ended: {error}" if error else "was closed by the server"
        return ConnectionLost(f"the connection {why}", unanswered=self.received == self._before)

    @staticmethod
    def _garbled(what: str) -> ConnectionLost:
        return ConnectionLost(f"what answers does not speak the Redis protocol: it sent {what}")
