"""`RemoteClient`: the client of a node in another process of this host.

The bytes of chunks are copied on the caller's thread, from and to the node's pool, which is mapped here; all else is
messages. Whatever happens to the node, a call ends within the deadline, and what it would have given is a miss. The
client comes back to a node that is there again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from lmcache_core.arguments import seconds
from lmcache_core.client import (
    AHEAD,
    KEY_BYTES,
    Boundary,
    DirectReading,
    Finished,
    Grant,
    Held,
    Model,
    Part,
    PastHost,
    Room,
    SpaceStats,
    Stats,
    Storing,
    check_keys,
    check_places,
)
from lmcache_core.config import Config
from lmcache_core.errors import BackendError, ClosedError, LayoutError, LMCacheError, UsageError
from lmcache_core.namespace import Namespace
from lmcache_core.node import FORKED
from lmcache_core.pins import Unpinned
from lmcache_core.protocols import ChunkKey, CopyBack, DirectChunk
from lmcache_core.ratelog import RateLog
from lmcache_core.service import wire
from lmcache_core.service.beside import TierReaders
from lmcache_core.service.link import ABSENT, Link, LinkDown
from lmcache_core.service.session import LONGEST_WAIT

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_KEYS = (wire.MOST_BYTES - 4096) // KEY_BYTES
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
"""Seconds between two tries to come back to a node."""


@dataclass(eq=False, slots=True)
class RemoteModel:
    """See `Model`. The number it has, or why the node will not have it, is each connection's own."""

    namespace: Namespace
    numbers: weakref.WeakKeyDictionary[Link, int | str] = field(default_factory=weakref.WeakKeyDictionary)


@dataclass(eq=False, slots=True)
class _Lease:
    link: Link
    number: int
    granted: dict[int, Grant]
    """What came with it, until it is asked for."""
    found: dict[int, PastHost | None] = field(default_factory=dict)
    """Where parts are to be read from past the pool, as far as it was asked."""
    released: bool = False

    def __del__(self) -> None:
        if not getattr(self, "released", True):  # it may have been interrupted while it was made
            self.link.later(wire.Release(self.number))


@dataclass(eq=False, slots=True)
class _Store:
    link: Link
    number: int
    finished: bool = False
    shared: bool = False
    """Others fill its rooms too."""
    pages: int = 0
    """Of rooms that this client has filled."""
    last: int = -1
    """Number of the last room."""

    def __del__(self) -> None:
        if not getattr(self, "finished", True):  # it may have been interrupted while it was made
            self.link.later(wire.DropStore(self.number))


class RemoteClient:
    """See `Client`. A node that isn't there when this is made is used as soon as it is.

    Args:
        path: Of the node's socket.
        config: Settings of this client: `call_timeout`, `tenant`, and what to assume of a node not seen yet.
        name: What the node calls this client to people; the program's name by default.
        shard: The part of each chunk that this client copies: that of its rank.
        operator: Whether it is an operator's command, for which a node has places of their own.
        past_host: Read what can be read like that to devices of this process, past the pool: see `ReadsPastHost`. The
            tiers for that are opened here too, on threads.
        ahead: Parts of a lease that shall come to the pool as soon as there is one, unless `past_host` can read them.
    """

    def __init__(
        self,
        path: str,
        config: Config,
        name: str = "",
        *,
        shard: int = 0,
        operator: bool = False,
        past_host: bool = False,
        ahead: int = AHEAD,
    ) -> None:
        self.path = path
        self.shard = shard
        self.tenant = config.tenant
        self.chunk_tokens = config.chunk_tokens
        self.page_tokens = config.page_tokens
        self.retention_tokens = config.retention_tokens
        self._operator = operator
        self._name = name or f"{os.path.basename(sys.argv[0] or 'python')} ({os.getpid()})"
        self._deadline = config.call_timeout
        self._log = RateLog(log, config.log_interval)
        self._link: Link | None = None
        self.why = ""
        """Why the node is not there, when it is not."""
        self._absent = False
        """No process listens there, as far as is known."""
        self._closed = threading.Event()
        self._why_closed = "this client has been closed"
        self._came = threading.Condition()
        self._most_ahead = ahead
        self._readers = TierReaders(config.log_interval) if past_host else None
        _clients.add(self)
        first = self._connect()
        self._thread = threading.Thread(target=self._keep, args=(first,), name="lmcache-link", daemon=True)
        self._thread.start()

    # The connection

    def _connect(self) -> Link | None:
        try:
            link = Link(self.path, self._name, self._deadline, self.shard, self.tenant, operator=self._operator)
        except LinkDown as error:
            self.why, self._absent = str(error), error.kind == ABSENT
            self._log.warning(f"connect: {error.kind}", "%s; what it would give is computed until it is there", error)
            return None
        self.chunk_tokens = link.welcome.chunk_tokens
        self.page_tokens = link.welcome.page_tokens
        self.retention_tokens = link.welcome.retention_tokens
        self._learn_of_tiers(link)
        with self._came:
            self._link = link
            self._came.notify_all()
        return link

    def _learn_of_tiers(self, link: Link) -> None:
        if self._readers is not None:
            try:
                self._readers.use(link.call(wire.AskBeside(), wire.Report).stats)
            except LMCacheError as error:
                self._log.warning("beside", "the node at %s does not say what can be read: %s", self.path, error)

    def _keep(self, link: Link | None) -> None:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            if link is None:
                if self._closed.wait(pause):
                    return
                pause = min(LONGEST_PAUSE, 2 * pause)
                try:
                    link = self._connect()
                except Exception as error:  # noqa: BLE001 whatever one try fails of, the next may work
                    self._log.warning("connect", "the node at %s cannot be connected to: %s", self.path, error)
                continue
            pause = FIRST_PAUSE
            link.listen()
            self.why, self._absent = link.why, False
            if not self._closed.is_set():
                self._log.warning("down", "%s; what it would give is computed until it is back", link.why)
            with self._came:
                self._link = None
            link.close()
            link = None

    def wait_until_up(self, timeout: float) -> bool:
        """Wait for a connection. Returns whether there is one.

        Raises:
            UsageError: `timeout` is no number, or a negative one.
        """
        limit = seconds(timeout)
        with self._came:
            return self._came.wait_for(lambda: self._link is not None and not self._link.down, limit)

    @property
    def node_pid(self) -> int:
        """Process of the node; 0 while it is not there, or is in a container that this process does not see into."""
        link = self._link
        return 0 if link is None else link.node_pid

    @property
    def memory(self) -> memoryview | None:
        """See `Client`."""
        link = self._link
        return None if link is None or link.down else link.memory[:]

    def _up(self) -> Link:
        if self._closed.is_set():
            raise ClosedError(self._why_closed)
        link = self._link
        if link is None or link.down:
            raise LinkDown((link and link.why) or self.why or f"the node at {self.path} is not there")
        return link

    def _number(self, link: Link, model: Model) -> int:
        if not isinstance(model, RemoteModel):
            raise UsageError("a model that was registered with another client")
        number = model.numbers.get(link)
        if number is None:
            try:
                number = link.call(wire.Register(model.namespace), wire.Number).value
            except LayoutError as error:
                self._log.warning("register", "the node at %s takes no such KV: %s", self.path, error)
                number = str(error)
            model.numbers[link] = number
        if isinstance(number, str):
            raise LinkDown(number)
        return number

    def _try(self, call: Callable[[Link], T], otherwise: T) -> T:
        """What the call returns, or `otherwise` while the node is not there."""
        try:
            return call(self._up())
        except LinkDown:
            return otherwise

    def _ask(self, call: Callable[[Link], T]) -> T:
        """What the call returns.

        Raises:
            BackendError: The node is not there.
        """
        try:
            return call(self._up())
        except LinkDown as error:
            advice = f"; start it with: lmcache-core serve --socket {self.path}" if self._absent else ""
            raise BackendError(f"{error}{advice}") from error

    # As in `Client`

    def register(self, namespace: Namespace) -> RemoteModel:
        """See `Client`."""
        if not isinstance(namespace, Namespace):
            raise LayoutError(f"a Namespace says what the KV is of; this is a {type(namespace).__name__}")
        model = RemoteModel(namespace)
        self._try(lambda link: self._number(link, model), 0)
        for refusal in model.numbers.values():
            if isinstance(refusal, str):
                raise LayoutError(refusal)
        return model

    def lookup(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, quiet: bool = False
    ) -> Boundary:
        """See `Client`."""

        def ask(link: Link) -> Boundary:
            request = wire.Lookup(self._number(link, model), _joined(keys), _names(places), quiet)
            found = link.call(request, wire.Boundary)
            return Boundary(found.pages, found.tiers, found.pending)

        return self._try(ask, Boundary(0, {}))

    def hold(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, counted: bool = False
    ) -> Held:
        """See `Client`."""

        def ask(link: Link) -> Held:
            request = wire.Hold(self._number(link, model), _joined(keys), _names(places), self._ahead, counted)
            return _held(link, link.call(request, wire.Held))

        return self._try(ask, Held(0, []))

    def grant(self, held: Held, start: int, ahead: int) -> list[Grant]:
        """See `Client`."""
        lease: _Lease | None = held.handle
        if lease is None or lease.released:
            return []
        granted = []
        while start in lease.granted:  # came with the lease
            granted.append(lease.granted.pop(start))
            start += 1
        if granted:
            return granted
        for number in range(start, start + ahead):  # they are being read to the pool from now on
            if lease.found.get(number) is not None:
                lease.found[number] = None
        try:
            answer = lease.link.call(wire.Grant(lease.number, start, ahead), wire.Grants)
        except LinkDown:
            return []
        return [_grant(lease.link, each) for each in answer.granted]

    @property
    def _ahead(self) -> int:
        """Parts to have brought to the pool at once."""
        return 0 if self.reads_past_host else self._most_ahead

    @property
    def reads_past_host(self) -> bool:
        """See `ReadsPastHost`."""
        return self._readers is not None and self._readers.possible

    def past_host(self, held: Held, number: int) -> PastHost | None:
        """See `ReadsPastHost`."""
        lease: _Lease | None = held.handle
        if lease is None or lease.released or not self.reads_past_host:
            return None
        if number not in lease.found:
            if not 0 <= number < len(held.parts):
                return None
            try:
                answer = lease.link.call(wire.FindPastHost(lease.number, number, AHEAD), wire.PastHosts)
            except LinkDown:
                return None
            lease.found[number] = None
            try:
                lease.found.update(enumerate(map(_past_host, answer.found), number))
            except (UsageError, IndexError):
                lease.link.fail(f"it says nonsense of where chunks are: {answer.found!r:.80}")
        found = lease.found[number]
        assert self._readers is not None
        return found if found is not None and self._readers.can_read(found.number) else None

    def read_past_host(self, found: PastHost, address: int, back: CopyBack) -> DirectReading:
        """See `ReadsPastHost`."""
        if self._readers is None or self._closed.is_set():
            raise ClosedError(self._why_closed)
        return self._readers.read(found, address, back)

    def consume(self, held: Held, parts: int) -> None:
        """See `Client`."""
        lease: _Lease | None = held.handle
        if lease is not None and not lease.released:
            lease.link.later(wire.Consume(lease.number, parts))  # with the next part, or the release

    def release(self, held: Held) -> None:
        """See `Client`."""
        lease: _Lease | None = held.handle
        if lease is not None and not lease.released:
            lease.released = True
            self._cast(lease.link, wire.Release(lease.number))

    @staticmethod
    def _cast(link: Link, request: msgspec.Struct) -> None:
        with contextlib.suppress(LinkDown):  # what it was about has ended with the connection
            link.cast(request)

    def begin_store(
        self,
        model: Model,
        keys: Sequence[bytes],
        at: Sequence[int] = (),
        first_page: int = 0,
        places: Sequence[str] | None = None,
        *,
        prompt_pages: int = 0,
    ) -> Storing:
        """See `Client`."""

        def ask(link: Link) -> Storing:
            request = wire.BeginStore(
                self._number(link, model), _joined(keys), tuple(at), first_page, _names(places), prompt_pages
            )
            return _storing(link, link.call(request, wire.Rooms))

        check_keys(keys)
        return self._try(ask, Storing([], 0, len(keys) * len(model.namespace.groups)))

    def filled(self, room: Room) -> None:
        """See `Client`."""
        store, number = room.handle
        store.pages += room.part.pages
        with contextlib.suppress(BufferError):  # somebody has made an array of it and keeps that
            room.target.release()
        if number == store.last and not store.shared:
            store.link.later(wire.Filled(store.number, number))  # with the end of the store, which comes at once
        else:
            self._cast(store.link, wire.Filled(store.number, number))

    def finish_store(self, storing: Storing) -> Finished:
        """See `Client`."""
        store: _Store | None = storing.handle
        nothing: Future[bool] = Future()
        nothing.set_result(False)
        if store is None:
            return Finished(0, nothing)
        store.finished = True
        try:
            if not store.shared:
                number, written = store.link.own_ticket(bool)
                store.link.cast(wire.EndStore(store.number, number))
                return Finished(store.pages, written)
            got = store.link.call(wire.FinishStore(store.number), wire.Finished)
        except LinkDown:
            return Finished(0, nothing)
        return Finished(got.pages, store.link.ticket(got.ticket, bool))

    def share(self, work: Held | Storing) -> int:
        """See `Client`. 0, which nobody can join, once the node has gone."""
        handle: _Lease | _Store | None = work.handle
        if handle is None:
            return 0
        if isinstance(handle, _Store):
            handle.shared = True
        hold, store = (handle.number, 0) if isinstance(handle, _Lease) else (0, handle.number)
        try:
            return handle.link.call(wire.Share(hold, store), wire.Number).value
        except LinkDown:
            return 0

    def join_hold(self, number: int) -> Held | None:
        """See `Client`."""

        def ask(link: Link) -> Held | None:
            got = link.either(wire.JoinHold(number, self._ahead), wire.Held)
            return None if got is None else _held(link, got)

        return self._try(ask, None)

    def join_store(self, number: int) -> Storing | None:
        """See `Client`."""

        def ask(link: Link) -> Storing | None:
            got = link.either(wire.JoinStore(number), wire.Rooms)
            return None if got is None else _storing(link, got, shared=True)

        return self._try(ask, None)

    def prefetch(
        self, model: Model, keys: Sequence[bytes], source: Sequence[str] | None, destination: str
    ) -> Future[int]:
        """See `Client`."""

        def ask(link: Link) -> Future[int]:
            request = wire.Prefetch(self._number(link, model), _joined(keys), _names(source), destination)
            return link.ticket(link.call(request, wire.Number).value, int)

        nothing: Future[int] = Future()
        nothing.set_result(0)
        return self._try(ask, nothing)

    def pin(self, model: Model, keys: Sequence[bytes], *, kept: bool = False) -> int:
        """See `Client`. Pins end with the connection, but for those that are `kept`: they are the node's."""

        def ask(link: Link) -> int:
            request = wire.Pin(self._number(link, model), _joined(keys), kept)
            return link.call(request, wire.Number).value

        return self._ask(ask)

    def unpin(self, model: Model, keys: Sequence[bytes], *, kept: bool = False) -> int:
        """See `Client`. Of the pins that are `kept`, whoever asked for them."""
        return self.unpin_one(model, keys, kept=kept).pages

    def unpin_one(self, model: Model, keys: Sequence[bytes], *, kept: bool = False) -> Unpinned:
        """As `unpin`, with what is left.

        Raises:
            BackendError: The node is not there.
        """

        def ask(link: Link) -> Unpinned:
            got = link.call(wire.Unpin(self._number(link, model), _joined(keys), kept), wire.Unpinned)
            return Unpinned(got.pages, got.left, got.was)

        return self._ask(ask)

    def unpin_kept(self) -> int:
        """Undo all pins that the node keeps. Returns how many chunks are pinned no longer.

        Raises:
            BackendError: The node is not there.
        """
        return self._ask(lambda link: link.call(wire.Unpin(None, b"", True), wire.Number).value)

    def evict(self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None) -> int:
        """See `Client`."""
        return self._ask(
            lambda link: (
                link.call(wire.Evict(self._number(link, model), _joined(keys), _names(places)), wire.Number).value
            )
        )

    def clear(self, model: Model | None = None, places: Sequence[str] | None = None) -> int:
        """See `Client`. Takes as long as the node is there and at it.

        Raises:
            BackendError: The node is not there, or has gone before it was done.
        """

        def ask(link: Link) -> Future[int]:
            request = wire.Clear(None if model is None else self._number(link, model), _names(places))
            return link.ticket(link.call(request, wire.Number).value, int)

        cleared = self._ask(ask).result()
        if not cleared:
            raise BackendError(f"the node at {self.path} has not ended the clear, some may be left; clear again")
        return cleared - 1

    def count(self, name: str, label: str, amount: float = 1) -> None:
        """See `Client`."""
        link = self._link
        if link is not None:
            link.later(wire.Count(name, label, float(amount)))

    def stats(self) -> Stats:
        """See `Client`.

        Raises:
            BackendError: The node is not there.
        """
        report = self._ask(lambda link: link.call(wire.AskStats(), wire.Report))
        return msgspec.msgpack.decode(report.stats, type=Stats)

    def spaces(self) -> list[SpaceStats]:
        """What the node holds, by namespace and group.

        Raises:
            BackendError: The node is not there.
        """
        report = self._ask(lambda link: link.call(wire.AskSpaces(), wire.Report))
        return msgspec.msgpack.decode(report.stats, type=list[SpaceStats])

    def clients(self) -> Sequence[wire.ClientStats]:
        """The clients of the node, this one too.

        Raises:
            BackendError: The node is not there.
        """
        return self._ask(lambda link: link.call(wire.AskClients(), wire.Clients)).clients

    def freeze(self, on: bool) -> None:
        """Have the node store nothing new, or go on. What is there is served.

        Raises:
            BackendError: The node is not there.
        """
        self._ask(lambda link: link.call(wire.Freeze(on), wire.Number))

    def drain(self, timeout: float) -> bool:
        """Have the node store nothing new, write what is queued, and end if it is a process of its own. Returns whether
        all was written within `timeout` seconds.

        Raises:
            BackendError: The node is not there.
            UsageError: `timeout` is no number, or a negative one.
        """
        limit = _wait(timeout)
        done = self._ask(lambda link: link.ticket(link.call(wire.Drain(limit), wire.Number).value, bool))
        return done.result(limit + self._deadline)

    def flush(self, timeout: float | None = None) -> bool:
        """See `Client`. False while the node is not there."""
        limit = None if timeout is None else _wait(timeout)

        def ask(link: Link) -> Future[bool]:
            return link.ticket(link.call(wire.Flush(limit), wire.Number).value, bool)

        nothing: Future[bool] = Future()
        nothing.set_result(False)
        future = self._try(ask, nothing)
        try:
            return future.result(None if limit is None else limit + self._deadline)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Let go of the node; what this client holds there ends. Idempotent."""
        self._closed.set()
        link = self._link
        if link is not None:
            link.fail("this client was closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * self._deadline)
        if self._readers is not None:
            self._readers.close()


def _wait(timeout: float | None) -> float:
    """A timeout that a node accepts."""
    limit = seconds(timeout)
    return LONGEST_WAIT if limit is None else min(limit, LONGEST_WAIT)


def _joined(keys: Sequence[bytes]) -> bytes:
    check_keys(keys)
    if len(keys) > MOST_KEYS:
        raise UsageError(
            f"a prompt of {len(keys)} pages is more than fits into a message, {MOST_KEYS}; use a larger page_tokens"
        )
    try:
        joined = wire.join_keys(keys)
    except TypeError as error:
        raise UsageError(f"the key of a page is bytes: {error}") from error
    if len(joined) != KEY_BYTES * len(keys):
        raise UsageError(f"the key of a page is {KEY_BYTES} bytes; some of these {len(keys)} are not")
    return joined


def _names(places: Sequence[str] | None) -> tuple[str, ...] | None:
    check_places(places)
    return None if places is None else tuple(places)


def _grant(link: Link, granted: wire.Granted) -> Grant:
    if granted.ticket:
        return Grant(None, granted.tier, link.ticket(granted.ticket, bool))
    source = link.memory[granted.offset : granted.offset + granted.nbytes].toreadonly()
    return Grant(source, granted.tier, None, granted.offset)


def _past_host(found: wire.PastHost | None) -> PastHost | None:
    if found is None:
        return None
    pages = tuple(wire.split_keys(found.keys))
    chunk = DirectChunk(ChunkKey(found.space, pages[-1]), pages, found.parent, found.shards, found.page_bytes)
    return PastHost(found.tier, found.number, chunk, found.shard, found.pages)


def _held(link: Link, got: wire.Held) -> Held:
    # All at once, also what nobody may ask for: each ticket is told, and has to be taken.
    lease = _Lease(link, got.hold, {number: _grant(link, each) for number, each in enumerate(got.granted)})
    asked = link.ticket(got.asked, bool) if got.asked else None
    return Held(got.pages, [Part(part.group, part.first, part.pages) for part in got.parts], asked, lease)


def _storing(link: Link, got: wire.Rooms, *, shared: bool = False) -> Storing:
    store = _Store(link, got.store, shared=shared, last=len(got.rooms) - 1)
    rooms = [
        Room(
            Part(room.group, room.first, room.pages),
            link.memory[room.offset : room.offset + room.nbytes],
            (store, number),
            room.offset,
        )
        for number, room in enumerate(got.rooms)
    ]
    return Storing(rooms, got.present, got.dropped, store)


_clients: weakref.WeakSet[RemoteClient] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: its copies of sockets would keep the parent's connection up after the parent has died."""
    for client in list(_clients):
        client._closed.set()
        client._why_closed = FORKED
        link, client._link = client._link, None
        if link is not None:
            link.abandon()


os.register_at_fork(after_in_child=_leave_to_parent)
