"""What a node and its clients say to each other over a Unix socket.

A message is its length (uint32, little-endian) and msgpack of one of the structs here, as an array whose first item is
the struct's number. A connection carries requests one way and their answers the other, in order; a `Cast` is a request
without an answer. What takes time is named by a ticket, and told on a second socket, one packet each, as `Done`.

A connection begins with `Hello` and ends at the first message that isn't one of these: too long, malformed, of another
version, or out of order.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from lmcache_core.errors import LMCacheError, UsageError
from lmcache_core.namespace import Namespace

VERSION = 5
MOST_BYTES = 16 << 20
"""Length of the longest message: the keys of half a million pages."""
KEY_BYTES = 32
LENGTH = struct.Struct("<I")
FIRST = 64 << 10
"""Bytes that are asked for at once when a message is received."""
_KEPT = 1 << 20
"""Size of a buffer that is kept between messages."""


class WireError(LMCacheError):
    """What came over a connection is no message of this protocol. The connection is closed."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


# From a client


class Hello(_Message, tag=0):
    """First message of a client."""

    version: int
    name: str
    """For people: what the process is."""
    shard: int
    """Of its rank."""
    tenant: str = ""
    """Whose its chunks are; the model's without one."""
    operator: bool = False
    """It is an operator's command: there is a place for it when engines have taken all of theirs."""


class Register(_Message, tag=1):
    """Answered by `Number`, that of the model."""

    namespace: Namespace


class Lookup(_Message, tag=2):
    """Answered by `Boundary`. `keys` are those of a prompt, one behind another."""

    model: int
    keys: bytes
    places: tuple[str, ...] | None
    quiet: bool


class Hold(_Message, tag=3):
    """Answered by `Held`."""

    model: int
    keys: bytes
    places: tuple[str, ...] | None
    ahead: int
    """Parts to grant at once, as `Grant` does."""
    counted: bool = False
    """It may count as a request's lookup."""


class Grant(_Message, tag=4):
    """Answered by `Grants`."""

    hold: int
    start: int
    ahead: int


class Consume(_Message, tag=5):
    """A cast."""

    hold: int
    parts: int


class Release(_Message, tag=6):
    """A cast."""

    hold: int


class BeginStore(_Message, tag=7):
    """Answered by `Rooms`."""

    model: int
    keys: bytes
    at: tuple[int, ...]
    first_page: int
    places: tuple[str, ...] | None
    prompt_pages: int


class Filled(_Message, tag=8):
    """A cast."""

    store: int
    room: int


class FinishStore(_Message, tag=9):
    """Answered by `Finished`."""

    store: int


class EndStore(_Message, tag=27):
    """A cast, of a client that has filled the rooms itself and so knows what is stored: as `FinishStore`. The ticket is
    the client's own, a negative number."""

    store: int
    ticket: int


class Prefetch(_Message, tag=10):
    """Answered by `Number`, a ticket; its value is the number of pages."""

    model: int
    keys: bytes
    source: tuple[str, ...] | None
    destination: str


class Pin(_Message, tag=11):
    """Answered by `Number`, of pages."""

    model: int
    keys: bytes
    kept: bool = False
    """It is the node's and outlives the client."""


class Unpin(_Message, tag=12):
    """Answered by `Unpinned`. Without a model it undoes all pins of one kind; answered by `Number`, of chunks."""

    model: int | None
    keys: bytes
    kept: bool = False
    """Of the pins that are the node's."""


class Evict(_Message, tag=13):
    """Answered by `Number`, of chunks."""

    model: int
    keys: bytes
    places: tuple[str, ...] | None


class Clear(_Message, tag=14):
    """Answered by `Number`, a ticket; its value is the number of chunks and 1 more, 0 if it could not be ended. Of all
    models without one."""

    model: int | None
    places: tuple[str, ...] | None


class Count(_Message, tag=15):
    """A cast."""

    name: str
    label: str
    amount: float


class AskStats(_Message, tag=16):
    """Answered by `Report`."""


class Flush(_Message, tag=17):
    """Answered by `Number`, a ticket; its value is 1 if nothing was left within `timeout` seconds."""

    timeout: float | None


class Ping(_Message, tag=19):
    """Answered by `Number`, if the node and its event loop are well."""


class DropStore(_Message, tag=18):
    """A cast: finish a store that nobody wants to know more of."""

    store: int


class Share(_Message, tag=20):
    """Answered by `Number`, by which clients of other ranks can join: 0 for what has ended. One of the two is 0."""

    hold: int
    store: int


class JoinHold(_Message, tag=21):
    """Answered by `Held`, or by `Number` 0 if it has ended."""

    number: int
    ahead: int


class JoinStore(_Message, tag=22):
    """Answered by `Rooms`, or by `Number` 0 if it has ended."""

    number: int


class AskSpaces(_Message, tag=23):
    """Answered by `Report`, of a list of `SpaceStats`."""


class AskClients(_Message, tag=24):
    """Answered by `Clients`."""


class Freeze(_Message, tag=25):
    """Answered by `Number`, the argument."""

    on: bool


class Drain(_Message, tag=26):
    """Store nothing new, write what is queued, and end the node if it is a process of its own. Answered by `Number`, a
    ticket; its value is 1 if all was written within `timeout` seconds."""

    timeout: float


class AskBeside(_Message, tag=28):
    """Answered by `Report`, of a list: number and settings (`TierConfig`, its options as plain data) of each tier that
    this client can read to a device of its own."""


class FindPastHost(_Message, tag=29):
    """Where parts of a lease lie for who reads them to a device. Answered by `PastHosts`."""

    hold: int
    start: int
    count: int


# From a node


class Welcome(_Message, tag=100):
    """Answer to `Hello`. With it come the descriptors of the pool and of the socket that tickets are told on."""

    version: int
    pool_bytes: int
    chunk_tokens: int
    page_tokens: int
    retention_tokens: int
    places: tuple[str, ...]
    """Names of the host pool and the tiers."""


class Failed(_Message, tag=101):
    """Answer to any request that raised an exception."""

    kind: str
    """Name of its class."""
    text: str


class Number(_Message, tag=102):
    """Answer to several requests."""

    value: int


class Boundary(_Message, tag=103):
    """Answer to `Lookup`."""

    pages: int
    tiers: dict[str, int]
    pending: bool


class Part(_Message, tag=104):
    """A run of pages of one group that one chunk holds."""

    group: int
    first: int
    pages: int


class Granted(_Message, tag=105):
    """Bytes `[offset, offset + nbytes)` of the pool, or a ticket that tells when to ask again."""

    tier: str
    offset: int
    nbytes: int
    ticket: int


class Held(_Message, tag=106):
    """Answer to `Hold`; the first of the parts are granted."""

    hold: int
    pages: int
    parts: tuple[Part, ...]
    asked: int
    """Ticket that tells when tiers that cannot tell at once have answered; 0 if none was asked."""
    granted: tuple[Granted, ...]


class Grants(_Message, tag=107):
    """Answer to `Grant`."""

    granted: tuple[Granted, ...]


class Room(_Message, tag=108):
    """Bytes `[offset, offset + nbytes)` of the pool that are to be filled."""

    group: int
    first: int
    pages: int
    offset: int
    nbytes: int


class Rooms(_Message, tag=109):
    """Answer to `BeginStore`."""

    store: int
    rooms: tuple[Room, ...]
    present: int
    dropped: int


class Finished(_Message, tag=110):
    """Answer to `FinishStore`. The ticket's value is 1 if all has arrived on the tiers it goes to."""

    pages: int
    ticket: int


class Report(_Message, tag=111):
    """Answer to `AskStats` and `AskSpaces`: structures of `lmcache_core.client`, as msgpack."""

    stats: bytes


class ClientStats(_Message, tag=112):
    """One client of a node."""

    pid: int
    uid: int
    name: str
    shard: int
    seconds: float
    """Since it has come."""
    leases: int
    stores: int
    tenant: str = ""


class Clients(_Message, tag=113):
    """Answer to `AskClients`."""

    clients: tuple[ClientStats, ...]


class Unpinned(_Message, tag=114):
    """Answer to `Unpin` of one prompt."""

    pages: int
    """Of chunks that are pinned no longer."""
    left: int
    """How often the prompt is still pinned."""
    was: bool
    """It had been pinned."""


class PastHost(_Message, tag=115):
    """The first pages of a chunk on a tier: see `lmcache_core.client.PastHost`."""

    tier: str
    number: int
    space: bytes
    keys: bytes
    """Of all its pages, one behind another."""
    parent: bytes
    shards: int
    page_bytes: int
    shard: int
    pages: int


class PastHosts(_Message, tag=116):
    """Answer to `FindPastHost`: for each part in turn where it lies, if it is to be read like that."""

    found: tuple[PastHost | None, ...]


class Done(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A ticket's value, on the second socket."""

    ticket: int
    value: int


Request: TypeAlias = (
    Hello
    | Register
    | Lookup
    | Hold
    | Grant
    | Consume
    | Release
    | BeginStore
    | Filled
    | FinishStore
    | Prefetch
    | Pin
    | Unpin
    | Evict
    | Clear
    | Count
    | AskStats
    | Flush
    | DropStore
    | Ping
    | Share
    | JoinHold
    | JoinStore
    | AskSpaces
    | AskClients
    | Freeze
    | Drain
    | EndStore
    | AskBeside
    | FindPastHost
)
Answer: TypeAlias = (
    Welcome | Failed | Number | Boundary | Held | Grants | Rooms | Finished | Report | Clients | Unpinned | PastHosts
)
CASTS = (Consume, Release, Filled, Count, DropStore, EndStore)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
_done = msgspec.msgpack.Decoder(Done)


def encode(message: msgspec.Struct) -> bytes:
    """A message as it is sent.

    Raises:
        WireError: It is too long.
    """
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    length = len(buffer) - LENGTH.size
    if length > MOST_BYTES:
        raise WireError(f"a message of {length} bytes; at most {MOST_BYTES} are sent")
    LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


def decode_request(body: memoryview | bytes) -> Request:
    """What a client sent.

    Raises:
        WireError: It is no request.
    """
    try:
        request: Request = _requests.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, LMCacheError) as error:
        raise WireError(f"not a request of version {VERSION}: {error}") from error
    return request


def decode_answer(body: memoryview | bytes) -> Answer:
    """What a node sent.

    Raises:
        WireError: It is no answer.
    """
    try:
        answer: Answer = _answers.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not an answer of version {VERSION}: {error}") from error
    return answer


def encode_done(ticket: int, value: int) -> bytes:
    """A ticket's value as one packet."""
    return _encoder.encode(Done(ticket, value))


def decode_done(packet: bytes) -> Done:
    """See `encode_done`.

    Raises:
        WireError: It is none.
    """
    try:
        return _done.decode(packet)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not the end of a ticket: {error}") from error


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Page keys one behind another."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """Undo `join_keys`.

    Raises:
        UsageError: It is no multiple of a key's length.
    """
    if len(joined) % KEY_BYTES:
        raise UsageError(f"keys of {len(joined)} bytes; each has {KEY_BYTES}")
    return [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", joined)]


class Reader:
    """Receives messages from a blocking stream socket. Bytes that came behind a message are kept for the next one."""

    def __init__(self, stream: socket.socket, most: int = MOST_BYTES) -> None:
        self._stream = stream
        self._most = most
        self._buffer = bytearray(FIRST)
        self._start = 0
        self._end = 0

    def receive(self) -> memoryview | None:
        """The body of the next message, valid until the next call; None when the other side has closed the stream.

        Raises:
            WireError: The message is too long, or the stream ends inside it.
            OSError: The stream is broken, or its timeout has passed.
        """
        if not self._fill(LENGTH.size):
            return None
        (length,) = LENGTH.unpack_from(self._buffer, self._start)
        if length > self._most:
            raise WireError(f"a message of {length} bytes; at most {self._most} are taken")
        if not self._fill(LENGTH.size + length):
            raise WireError("the stream ends inside a message")
        start = self._start + LENGTH.size
        self._start = start + length
        return memoryview(self._buffer)[start : self._start]

    def _fill(self, count: int) -> bool:
        """Have `count` bytes in the buffer behind its start. False if the stream has ended before the first of them."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEPT:
                self._buffer = bytearray(FIRST)
        while self._end - self._start < count:
            if self._start and self._start + count > len(self._buffer):
                rest = self._buffer[self._start : self._end]
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == len(self._buffer):
                # Grown as bytes arrive, so that a length alone makes nobody allocate.
                larger = bytearray(min(count, 2 * len(self._buffer)))
                larger[: self._end] = self._buffer
                self._buffer = larger
            with memoryview(self._buffer)[self._end :] as room:
                received = self._stream.recv_into(room)
            if not received:
                if self._end == self._start:
                    return False
                raise WireError("the stream ends inside a message")
            self._end += received
        return True
