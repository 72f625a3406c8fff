"""One connection of a client to a node: requests and answers on one socket, tickets on another, the pool mapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from lmcache_core import errors
from lmcache_core.errors import ClosedError, LMCacheError
from lmcache_core.hostpool import FAULT_STEP, populate
from lmcache_core.service import wire

A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")


class LinkDown(LMCacheError):
    """The node has gone, does not answer in time, or says nonsense. The link is closed by it.

    Args:
        why: What has happened.
        kind: In one word, for whoever counts.
    """

    def __init__(self, why: str, kind: str = "down") -> None:
        super().__init__(why)
        self.kind = kind


ABSENT = "absent"
"""Kind of a `LinkDown`: no process listens."""


class _Refused(LMCacheError):
    """The node is there and will not have this client."""


class Link:
    """A connection that works until it doesn't: then it is closed, every call raises `LinkDown`, and all waiting ends.

    Args:
        path: Of the node's socket.
        name: What the node calls this client to people.
        deadline: Seconds in which the node must answer.
        shard: Of the client's rank.
        tenant: Whose the client's chunks are.
        operator: Whether it is an operator's command.

    Raises:
        LinkDown: There is no node, or it does not answer.
    """

    def __init__(
        self, path: str, name: str, deadline: float, shard: int = 0, tenant: str = "", *, operator: bool = False
    ) -> None:
        self.down = False
        self.why = ""
        self._deadline = deadline
        self._lock = threading.Lock()
        self._tickets: dict[int, Callable[[int], None]] = {}
        self._early: dict[int, int] = {}
        self._own = 0
        self._waiting = threading.Lock()
        """Guards the two."""
        self._let_go: deque[msgspec.Struct] = deque()
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._packets: socket.socket | None = None
        try:
            self._stream.settimeout(deadline)
            self._stream.connect(path)
            credentials = self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            self.node_pid: int = struct.unpack("3i", credentials)[0]
            self._reader = wire.Reader(self._stream)
            with contextlib.suppress(BrokenPipeError):  # it may have said at once why it will not have us
                self._stream.sendall(wire.encode(wire.Hello(wire.VERSION, name, shard, tenant, operator)))
            self.welcome, fds = self._receive_welcome()
            # Timeouts of the kernel, so that a receive is one system call.
            self._stream.settimeout(None)
            timeout = struct.pack("ll", int(deadline), max(1, int(deadline % 1 * 1e6)))  # two zeros would mean none
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._packets = socket.socket(fileno=fds[1])
            self._packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            with open(fds[0], "rb", closefd=True) as pool:
                self._map = mmap.mmap(pool.fileno(), self.welcome.pool_bytes)
        except (OSError, wire.WireError, ValueError, _Refused) as error:
            self._close_sockets()
            raise _no_link(path, error) from error
        except BaseException:  # whatever it is, no socket stays behind
            self._close_sockets()
            raise
        self.memory = memoryview(self._map)
        """The node's pool."""
        with contextlib.suppress(RuntimeError):  # the system gives no more threads: copies are slower at first
            threading.Thread(target=self._populate, name="lmcache-map", daemon=True).start()

    def _populate(self) -> None:
        """Map the pool's pages before copies need them: each costs a fault otherwise."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for start in range(0, len(self.memory), FAULT_STEP):
            if self.down or not populate(address, start, min(FAULT_STEP, len(self.memory) - start)):
                return

    def _receive_welcome(self) -> tuple[wire.Welcome, list[int]]:
        data, fds, _, _ = socket.recv_fds(self._stream, wire.FIRST, 2)
        try:
            length = wire.LENGTH.unpack_from(data)[0] if len(data) >= wire.LENGTH.size else 0
            while len(data) < wire.LENGTH.size + length:
                more = self._stream.recv(wire.FIRST)
                if not more:
                    raise wire.WireError("the node closed the connection")
                data += more
            answer = wire.decode_answer(data[wire.LENGTH.size :])
            if isinstance(answer, wire.Failed):
                raise _Refused(answer.text)
            if not isinstance(answer, wire.Welcome) or len(fds) != 2:
                raise wire.WireError("the node does not say what it has")
            if answer.version != wire.VERSION:
                raise wire.WireError(f"the node speaks version {answer.version}, this client {wire.VERSION}")
        except BaseException:  # whatever it is, no descriptor stays behind
            for fd in fds:
                os.close(fd)
            raise
        return answer, fds

    def own_ticket(self, kind: Callable[[int], T]) -> tuple[int, Future[T]]:
        """A ticket that is not the node's but this client's, and its future."""
        with self._waiting:
            self._own -= 1
            number = self._own
        return number, self.ticket(number, kind)

    def later(self, request: msgspec.Struct) -> None:
        """Send a request that has no answer with the next one, or when nothing else has been said for a while. May be
        called from anywhere, finalizers too."""
        if not self.down:
            self._let_go.append(request)

    def call(self, request: msgspec.Struct, answer: type[A]) -> A:
        """Send a request and return its answer. See `either`."""
        got = self.either(request, answer)
        if got is None:
            raise self.fail(f"it answers a {type(request).__name__} with a number")
        return got

    def either(self, request: msgspec.Struct, answer: type[A]) -> A | None:
        """Send a request and return its answer; None for the number 0 in its place.

        Raises:
            LinkDown: None came in time.
            LMCacheError: What the node raised.
        """
        body = self._exchange(wire.encode(request), True)
        try:
            got = wire.decode_answer(body)
        except wire.WireError as error:
            raise self.fail(str(error)) from error
        if isinstance(got, answer):
            return got
        if isinstance(got, wire.Failed):
            raised = _raised(got)
            raise self.fail(got.text) if isinstance(raised, ClosedError) else raised
        if isinstance(got, wire.Number) and not got.value:
            return None
        raise self.fail(f"it answers a {type(request).__name__} with a {type(got).__name__}")

    def cast(self, request: msgspec.Struct) -> None:
        """Send a request that has no answer.

        Raises:
            LinkDown: It cannot be sent.
        """
        self._exchange(wire.encode(request), False)

    def _exchange(self, message: bytes, answered: bool) -> bytes:
        """Send a message, behind what was let go of before, and return the body of its answer if it has one."""
        if not self._lock.acquire(timeout=self._deadline):
            raise self.fail("it does not answer in time")
        try:
            if self.down:
                raise LinkDown(self.why)
            if self._let_go:
                first = []
                while self._let_go:
                    first.append(wire.encode(self._let_go.popleft()))
                message = b"".join([*first, message])
            self._stream.sendall(message)
            if not answered:
                return b""
            body = self._reader.receive()
            if body is None:
                raise wire.WireError("it has closed the connection")
            return bytes(body)
        except BlockingIOError as error:
            raise self.fail("it does not answer in time") from error
        except (OSError, wire.WireError) as error:
            raise self.fail(str(error)) from error
        except LinkDown:
            raise
        except BaseException:  # an interrupt: half a message may be on its way, or an answer that nobody reads
            self.fail("a call was interrupted", "the connection to the node was cut, since")
            raise
        finally:
            self._lock.release()

    def ticket(self, number: int, kind: Callable[[int], T]) -> Future[T]:
        """The future of a ticket that a call has returned: `kind` of its value, of 0 if the link goes down before."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._waiting:
            value = self._early.pop(number, None)
            if value is None and not self.down:
                self._tickets[number] = lambda value: future.set_result(kind(value))
                return future
        future.set_result(kind(value or 0))
        return future

    def listen(self) -> None:
        """Take the node's word on tickets, on this thread, until the link is down. When it says nothing while somebody
        waits for it, it is asked whether it is there: a node that is frozen ends no connection."""
        packets = self._packets
        assert packets is not None
        try:
            while True:
                try:
                    packet = packets.recv(wire.FIRST)
                except BlockingIOError:  # nothing within the deadline
                    if self._tickets or self._let_go:
                        self.call(wire.Ping(), wire.Number)
                    continue
                if not packet:
                    break
                done = wire.decode_done(packet)
                with self._waiting:
                    tell = self._tickets.pop(done.ticket, None)
                    if tell is None:
                        self._early[done.ticket] = done.value
                if tell is not None:
                    tell(done.value)
            self.fail("it has closed the connection")
        except (OSError, LMCacheError) as error:
            self.fail(str(error))

    def fail(self, why: str, what: str = "the node is gone:") -> LinkDown:
        """Close the link; idempotent. Returns an exception that says why."""
        with self._waiting:
            if not self.down:
                self.down = True
                self.why = f"{what} {why}"
            tickets, self._tickets = self._tickets, {}  # what has been told early is true still
        for end in (self._stream, self._packets):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it
        for tell in tickets.values():
            tell(0)
        return LinkDown(self.why)

    def abandon(self) -> None:
        """Close this process's copies of the sockets and nothing else, in a forked child."""
        self.down = True
        self.why = "this process was forked"
        self._close_sockets()

    def close(self) -> None:
        """Let go of the sockets. The memory stays mapped for those who still copy from it."""
        self.fail("this client was closed")
        with self._lock:  # a call may have to read its answer yet, which came before the node ended
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._stream.close()
        if self._packets is not None:
            self._packets.close()


def _no_link(path: str, error: Exception) -> LinkDown:
    reason = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return LinkDown(f"no node at {path}: {reason}", ABSENT)
    if isinstance(error, _Refused):
        return LinkDown(f"the node at {path} sends this client away: {reason}", "refused")
    if isinstance(error, TimeoutError):
        return LinkDown(f"the node at {path} does not answer: {reason}", "mute")
    return LinkDown(f"the node at {path} cannot be used: {reason}", "unusable")


def _raised(failed: wire.Failed) -> LMCacheError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, LMCacheError):
        error: LMCacheError = kind(failed.text)
        return error
    return LMCacheError(f"{failed.kind}: {failed.text}")
