"""One client of a node's socket: its requests, carried out on a thread of its own, and all that it holds.

Leases, stores and pins belong to the session and end with it, at whatever instruction the client died: the kernel
closes its socket when none of its threads can write to the pool any more. A GPU that copies for it can, until its
driver has let go of it, which is before the process has ended; so what it held is kept until then. Only pins that it
asks the node to keep stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NoReturn

import msgspec

from lmcache_core.client import Held, Model, PastHost, Storing
from lmcache_core.counts import COUNTERS
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError, ClosedError, LMCacheError, UsageError
from lmcache_core.node import Node
from lmcache_core.service import wire

log = logging.getLogger(__name__)

MOST_HELD = 4096
"""Leases and stores that one client may have at a time."""
MOST_MODELS = 256
MOST_AHEAD = 64
MOST_LABELS = 64
MOST_SHARDS = 1024
LONGEST_WAIT = 1e6
CLIENTS_COUNT = (
    *("retrieved_tokens", "stored_tokens", "present_tokens", "copied_bytes", "copy_seconds", "past_host_bytes"),
    "faults",
)
LABEL = re.compile(r"[A-Za-z0-9._ -]{1,64}")
SEND_TIMEOUT = 5.0
"""Seconds after which a client that doesn't take its answers is sent away."""
EXIT_TIMEOUT = 10.0
"""Seconds that a client which ends may take to."""
_PF_EXITING = 4
"""In the flags of a process: see proc_pid_stat(5) and the kernel's sched.h."""
HELLO_TIMEOUT = 5.0
"""Seconds in which a client must have said who it is."""


def is_exiting(pid: int) -> bool:
    """Whether a process is ending, or has ended and its parent has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False  # it has ended, or is in a container that this process does not see into


def wait_for_exit(pid: int, seconds: float) -> None:
    """Wait for a process that is ending, at most so long. One that lives is not waited for."""
    if pid < 1 or not is_exiting(pid):
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return  # it has ended
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll(seconds * 1000)
    finally:
        os.close(descriptor)


class Session:
    """See the module. `run` serves until the client has left or is sent away.

    Args:
        node: What is served.
        stream: To the client.
        all_of_them: The sessions that there are.
        keeper: Has the pins that the node keeps.
        admit: Why a client that has said who it is cannot be served, if it cannot.
    """

    def __init__(
        self,
        node: Node,
        stream: socket.socket,
        all_of_them: Callable[[], Sequence[Session]],
        keeper: DirectClient,
        admit: Callable[[Session], str | None],
    ) -> None:
        self.name = "?"
        self.operator = False
        """It is an operator's command, by its own word."""
        self.admitted = False
        """It has said who it is and has a place. Set by whoever admits it."""
        self.pid, self.uid, self.gid = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._client = DirectClient(node, pauses=True)
        self._keeper = keeper
        self._node = node
        self._all = all_of_them
        self._admit = admit
        self._since = time.monotonic()
        self._stream = stream
        self._reader = wire.Reader(stream)
        self._packets, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._packets.setblocking(False)
        self._models: list[Model] = []
        self._holds: dict[int, Held] = {}
        self._stores: dict[int, Storing] = {}
        self._labels: set[str] = set()
        self._numbers = 0
        self._afterwards: list[Callable[[], None]] = []
        """What is to be done once the answer has been sent."""
        self._cleared: Future[int] | None = None
        self._verbs: dict[type[msgspec.Struct], Callable[[Any], wire.Answer | None]] = {
            wire.Register: self._register,
            wire.Lookup: self._lookup,
            wire.Hold: self._hold,
            wire.Grant: self._grant,
            wire.Consume: self._consume,
            wire.Release: self._release,
            wire.BeginStore: self._begin_store,
            wire.Filled: self._filled,
            wire.FinishStore: self._finish_store,
            wire.DropStore: self._drop_store,
            wire.EndStore: self._end_store,
            wire.Prefetch: self._prefetch,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Evict: self._evict,
            wire.Clear: self._clear,
            wire.Count: self._count,
            wire.AskStats: self._stats,
            wire.Flush: self._flush,
            wire.Ping: self._ping,
            wire.AskSpaces: self._spaces,
            wire.AskClients: self._clients,
            wire.Freeze: self._freeze,
            wire.Drain: self._drain,
            wire.Share: self._share,
            wire.JoinHold: self._join_hold,
            wire.JoinStore: self._join_store,
            wire.AskBeside: self._beside,
            wire.FindPastHost: self._find_past_host,
        }

    @property
    def held(self) -> tuple[int, int]:
        """How many leases and stores the client has."""
        return len(self._holds), len(self._stores)

    def run(self) -> None:
        """Serve the client. Never raises for what the client does."""
        try:
            self._stream.settimeout(HELLO_TIMEOUT)
            self._greet()
            # Timeouts of the kernel, so that a receive is one system call.
            self._stream.settimeout(None)
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT), 0))
            while (body := self._reader.receive()) is not None:
                answer = self._answer(wire.decode_request(body))
                if answer is not None:
                    self._stream.sendall(wire.encode(answer))
                while self._afterwards:
                    self._afterwards.pop()()
        except wire.WireError as error:
            with contextlib.suppress(OSError):
                self._stream.sendall(wire.encode(wire.Failed(type(error).__name__, str(error))))
        except OSError:
            pass  # the client has gone, or doesn't take its answers
        finally:
            self.end()

    def stop(self) -> None:
        """Make `run` return soon. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close this process's copies of the sockets, in a forked child."""
        for end in (self._packets, self._theirs, self._stream):
            end.close()

    def _greet(self) -> None:
        body = self._reader.receive()
        hello = None if body is None else wire.decode_request(body)
        if not isinstance(hello, wire.Hello):
            raise wire.WireError("a connection begins with a Hello")
        if hello.version != wire.VERSION:
            raise wire.WireError(
                f"this node speaks version {wire.VERSION}, the client {hello.version}; install one version of "
                "lmcache-core for both"
            )
        self.name = hello.name[:100]
        if not 0 <= hello.shard < MOST_SHARDS:
            raise wire.WireError(f"shard {hello.shard} of a chunk; there are at most {MOST_SHARDS}")
        if hello.tenant and not LABEL.fullmatch(hello.tenant):
            raise wire.WireError(f"{hello.tenant[:100]!r} is no name of a tenant")
        self._client.shard = hello.shard
        self._client.tenant = hello.tenant
        self.operator = hello.operator
        refusal = self._admit(self)
        if refusal is not None:
            raise wire.WireError(refusal)
        client, pool = self._client, self._node.pool
        welcome = wire.Welcome(
            wire.VERSION,
            pool.capacity,
            client.chunk_tokens,
            client.page_tokens,
            client.retention_tokens,
            tuple(client.places),
        )
        message = wire.encode(welcome)
        sent = socket.send_fds(self._stream, [message], [pool.fd, self._theirs.fileno()])
        self._stream.sendall(message[sent:])
        self._theirs.close()

    def _answer(self, request: wire.Request) -> wire.Answer | None:
        verb = self._verbs.get(type(request))
        if verb is None:
            raise wire.WireError(f"a {type(request).__name__} is out of order")
        try:
            return verb(request)
        except wire.WireError:
            raise
        except (LMCacheError, ValueError, TypeError, OverflowError) as error:
            if isinstance(request, wire.CASTS):
                return None  # nobody waits for it; what it was about is gone
            return wire.Failed(type(error).__name__, str(error))

    def end(self) -> None:
        """Give back all that the client has. Called once `run` does nothing any more."""
        if self._holds or self._stores:
            wait_for_exit(self.pid, EXIT_TIMEOUT)
        with contextlib.suppress(ClosedError):
            for held in self._holds.values():
                self._client.release(held)
        self._holds.clear()
        with contextlib.suppress(ClosedError):
            for storing in self._stores.values():
                self._client.finish_store(storing)
        self._stores.clear()
        with contextlib.suppress(ClosedError):
            self._client.unpin_all()
        self.abandon()

    # What the client names by numbers

    def _number(self) -> int:
        if len(self._holds) + len(self._stores) >= MOST_HELD:
            raise UsageError(f"one client may have {MOST_HELD} leases and stores at a time; release some")
        self._numbers += 1
        return self._numbers

    def _model(self, number: int) -> Model:
        if not 0 <= number < len(self._models):
            _unknown("model", number)
        return self._models[number]

    def _held(self, number: int) -> Held:
        return self._holds.get(number) or _unknown("lease", number)

    def _storing(self, number: int) -> Storing:
        return self._stores.get(number) or _unknown("store", number)

    def _ticket(self, future: Future[Any]) -> int:
        """A number under which the outcome of a future is told. 0 is none."""
        self._numbers += 1
        ticket = self._numbers
        future.add_done_callback(lambda done: self._tell(ticket, done))
        return ticket

    def _tell(self, ticket: int, done: Future[Any]) -> None:
        # On the event loop, mostly: this must not block. Who leaves so many packets unread is sent away.
        try:
            value = int(done.result() or 0)
        except (CancelledError, LMCacheError, TimeoutError):
            value = 0
        except Exception:  # a defect of ours
            log.exception("what process %d waits for has failed", self.pid)
            value = 0
        self._packet(ticket, value)

    def _packet(self, ticket: int, value: int) -> None:
        try:
            self._packets.send(wire.encode_done(ticket, value))
        except OSError:
            self.stop()

    # Verbs, as in `Client`

    def _register(self, request: wire.Register) -> wire.Answer:
        if len(self._models) >= MOST_MODELS:
            raise UsageError(f"one client may have {MOST_MODELS} models")
        self._models.append(self._client.register(request.namespace))
        return wire.Number(len(self._models) - 1)

    def _lookup(self, request: wire.Lookup) -> wire.Answer:
        keys = wire.split_keys(request.keys)
        found = self._client.lookup(self._model(request.model), keys, request.places, quiet=request.quiet)
        return wire.Boundary(found.pages, dict(found.tiers), found.pending)

    def _hold(self, request: wire.Hold) -> wire.Answer:
        number = self._number()
        keys = wire.split_keys(request.keys)
        held = self._client.hold(self._model(request.model), keys, request.places, counted=request.counted)
        return self._told(number, held, request.ahead)

    def _told(self, number: int, held: Held, ahead: int) -> wire.Answer:
        self._holds[number] = held
        asked = 0 if held.asked is None else self._ticket(held.asked)
        parts = tuple(wire.Part(*part) for part in held.parts)
        return wire.Held(number, held.pages, parts, asked, self._granted(held, 0, ahead))

    def _grant(self, request: wire.Grant) -> wire.Answer:
        return wire.Grants(self._granted(self._held(request.hold), request.start, request.ahead))

    def _granted(self, held: Held, start: int, ahead: int) -> tuple[wire.Granted, ...]:
        if not (0 <= start <= len(held.parts) and 0 <= ahead <= MOST_AHEAD):
            raise UsageError(f"a lease has {len(held.parts)} parts; part {start} and {ahead} more cannot be had")
        grants = self._client.grant(held, start, ahead)
        return tuple(
            wire.Granted(
                grant.tier,
                grant.offset,
                0 if grant.source is None else len(grant.source),
                0 if grant.wait is None else self._ticket(grant.wait),
            )
            for grant in grants
        )

    def _consume(self, request: wire.Consume) -> None:
        held = self._held(request.hold)
        if not 0 <= request.parts <= len(held.parts):
            raise UsageError(f"a lease has {len(held.parts)} parts; {request.parts} cannot have been copied")
        self._client.consume(held, request.parts)

    def _release(self, request: wire.Release) -> None:
        self._client.release(self._held(request.hold))
        del self._holds[request.hold]

    def _begin_store(self, request: wire.BeginStore) -> wire.Answer:
        number = self._number()
        keys = wire.split_keys(request.keys)
        if not 0 <= request.first_page <= len(keys):
            raise UsageError(f"a prompt of {len(keys)} pages has no page {request.first_page}")
        if any(not 0 < page <= len(keys) for page in request.at) or sorted(set(request.at)) != list(request.at):
            raise UsageError(f"boundaries of a prompt of {len(keys)} pages lie in it, ascending")
        if request.prompt_pages < 0:
            raise UsageError(f"a prompt has no {request.prompt_pages} pages")
        model = self._model(request.model)
        storing = self._client.begin_store(
            model, keys, request.at, request.first_page, request.places, prompt_pages=request.prompt_pages
        )
        return self._opened(number, storing)

    def _opened(self, number: int, storing: Storing) -> wire.Answer:
        self._stores[number] = storing
        rooms = tuple(wire.Room(*room.part, room.offset, len(room.target)) for room in storing.rooms)
        return wire.Rooms(number, rooms, storing.present, storing.dropped)

    def _filled(self, request: wire.Filled) -> None:
        storing = self._storing(request.store)
        if not 0 <= request.room < len(storing.rooms):
            _unknown("room", request.room)
        self._client.filled(storing.rooms[request.room])

    def _finish_store(self, request: wire.FinishStore) -> wire.Answer:
        storing = self._storing(request.store)
        del self._stores[request.store]
        finished = self._client.finish_store(storing)
        return wire.Finished(finished.pages, self._ticket(finished.written))

    def _end_store(self, request: wire.EndStore) -> None:
        if request.ticket >= 0:
            raise UsageError("a client's own tickets are negative numbers")
        try:
            storing = self._storing(request.store)
            del self._stores[request.store]
            written = self._client.finish_store(storing).written
        except LMCacheError:
            self._packet(request.ticket, 0)
            raise
        written.add_done_callback(lambda done: self._tell(request.ticket, done))

    def _drop_store(self, request: wire.DropStore) -> None:
        storing = self._storing(request.store)
        del self._stores[request.store]
        self._client.finish_store(storing)

    def _prefetch(self, request: wire.Prefetch) -> wire.Answer:
        future = self._client.prefetch(
            self._model(request.model), wire.split_keys(request.keys), request.source, request.destination
        )
        return wire.Number(self._ticket(future))

    def _pin(self, request: wire.Pin) -> wire.Answer:
        pinner = self._keeper if request.kept else self._client
        return wire.Number(pinner.pin(self._model(request.model), wire.split_keys(request.keys)))

    def _unpin(self, request: wire.Unpin) -> wire.Answer:
        pinner = self._keeper if request.kept else self._client
        if request.model is None:
            return wire.Number(pinner.unpin_all())
        return wire.Unpinned(*pinner.unpin_one(self._model(request.model), wire.split_keys(request.keys)))

    def _evict(self, request: wire.Evict) -> wire.Answer:
        keys = wire.split_keys(request.keys)
        return wire.Number(self._client.evict(self._model(request.model), keys, request.places))

    def _clear(self, request: wire.Clear) -> wire.Answer:
        model = None if request.model is None else self._model(request.model)
        self._client.check_places(request.places)
        if self._cleared is not None and not self._cleared.done():
            raise UsageError("one client may clear once at a time; wait until that has ended")
        cleared: Future[int] = Future()

        def clear() -> None:
            try:
                cleared.set_result(1 + self._client.clear(model, request.places))
            except BaseException as error:  # noqa: BLE001 whatever it is, nobody may wait for ever
                cleared.set_exception(error)

        # On a thread of its own: a million chunks take longer than a client waits for an answer.
        try:
            threading.Thread(target=clear, name=f"lmcache-clear-{self.pid}", daemon=True).start()
        except RuntimeError as error:
            raise BackendError(f"the node has no thread to clear with: {error}") from error
        self._cleared = cleared
        return wire.Number(self._ticket(cleared))

    def _count(self, request: wire.Count) -> None:
        known = request.name in COUNTERS and request.name in CLIENTS_COUNT
        if not known or not LABEL.fullmatch(request.label) or not 0 <= request.amount < 2**53:
            raise UsageError(f"clients do not count {request.name!r} of {request.label!r}")
        self._labels.add(request.label)
        if len(self._labels) > MOST_LABELS:
            raise UsageError(f"a client may use {MOST_LABELS} labels")
        self._client.count(request.name, request.label, request.amount)

    def _stats(self, request: wire.AskStats) -> wire.Answer:
        return wire.Report(msgspec.msgpack.encode(self._client.stats()))

    def _flush(self, request: wire.Flush) -> wire.Answer:
        if request.timeout is not None:
            _check_wait(request.timeout)
        return wire.Number(self._ticket(self._node.flushed(request.timeout)))

    def _spaces(self, request: wire.AskSpaces) -> wire.Answer:
        return wire.Report(msgspec.msgpack.encode(self._client.spaces()))

    def _clients(self, request: wire.AskClients) -> wire.Answer:
        return wire.Clients(tuple(session.told() for session in self._all()))

    def told(self) -> wire.ClientStats:
        """What others may know of this client."""
        age = time.monotonic() - self._since
        leases, stores = self.held
        return wire.ClientStats(
            self.pid, self.uid, self.name, self._client.shard, age, leases, stores, self._client.tenant
        )

    def _freeze(self, request: wire.Freeze) -> wire.Answer:
        self._client.freeze(request.on)
        return wire.Number(int(request.on))

    def _drain(self, request: wire.Drain) -> wire.Answer:
        _check_wait(request.timeout)
        self._client.freeze(True)
        written = self._node.flushed(request.timeout)
        ticket = self._ticket(written)
        # The process ends upon that, and the client must have its answer before.
        self._afterwards.append(lambda: written.add_done_callback(lambda _: self._node.drained.set()))
        return wire.Number(ticket)

    def _share(self, request: wire.Share) -> wire.Answer:
        work = self._held(request.hold) if request.hold else self._storing(request.store)
        return wire.Number(self._client.share(work))

    def _join_hold(self, request: wire.JoinHold) -> wire.Answer:
        number = self._number()
        held = self._client.join_hold(request.number)
        return wire.Number(0) if held is None else self._told(number, held, request.ahead)

    def _join_store(self, request: wire.JoinStore) -> wire.Answer:
        number = self._number()
        storing = self._client.join_store(request.number)
        return wire.Number(0) if storing is None else self._opened(number, storing)

    def _beside(self, request: wire.AskBeside) -> wire.Answer:
        told: list[tuple[int, msgspec.Raw]] = []
        for number, config in self._node.beside:
            try:
                options = msgspec.to_builtins(config.options, enc_hook=str)
                told.append(
                    (number, msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(config, options=options))))
                )
            except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
                log.warning(
                    "tier %s is not read by other processes: its options cannot be told: %s", config.name, error
                )
        return wire.Report(msgspec.msgpack.encode(told))

    def _find_past_host(self, request: wire.FindPastHost) -> wire.Answer:
        held = self._held(request.hold)
        if not (0 <= request.start <= len(held.parts) and 0 <= request.count <= MOST_AHEAD):
            raise UsageError(
                f"a lease has {len(held.parts)} parts; it cannot be said of part {request.start} and {request.count} "
                "more where they are"
            )
        numbers = range(request.start, min(request.start + request.count, len(held.parts)))
        found = [self._client.find_past_host(held, number, self._node.is_beside) for number in numbers]
        return wire.PastHosts(tuple(None if each is None else _told_past_host(each) for each in found))

    def _ping(self, request: wire.Ping) -> wire.Answer:
        self._node.check()
        return wire.Number(0)


def _unknown(what: str, number: int) -> NoReturn:
    raise UsageError(f"there is no {what} {number}; it has ended, or never was")


def _told_past_host(found: PastHost) -> wire.PastHost:
    chunk = found.chunk
    keys = wire.join_keys(chunk.pages)
    sizes = chunk.shards, chunk.page_bytes
    return wire.PastHost(
        found.tier, found.number, chunk.key.space, keys, chunk.parent, *sizes, found.shard, found.pages
    )


def _check_wait(seconds: float) -> None:
    if not 0 <= seconds <= LONGEST_WAIT:  # nor NaN, which stops event loops
        raise UsageError(f"a timeout is 0 to {LONGEST_WAIT:g} seconds, not {seconds}")
