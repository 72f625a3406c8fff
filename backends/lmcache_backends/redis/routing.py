"""Commands to the servers that hold their keys, over several connections, following keys that have moved."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from lmcache_backends.redis import problems
from lmcache_backends.redis.connecting import Connector
from lmcache_backends.redis.options import Address
from lmcache_backends.redis.pool import Connections
from lmcache_backends.redis.resp import Buffer, ErrorReply, RespSocket, command
from lmcache_backends.redis.topology import Topology, find
from lmcache_core.errors import BackendError
from lmcache_core.iothreads import IoThreads

T = TypeVar("T")
Parse = Callable[[RespSocket], T | ErrorReply]

PART_BYTES: Final = 2 << 20
"""Batches larger than this are spread over several connections."""
SMALL: Final = 2
"""Connections to each server for all that is not a chunk, so that a question never waits behind one."""
ROUNDS: Final = 4
"""How often a command is sent to where a cluster says that its key has gone."""
REFRESH: Final = 0.2
"""Seconds between two questions where the keys are, because of failures."""
AGAIN: Final = 2.0
"""Seconds after which a cluster is asked again whether the slots that it does not serve are served."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, in the parts that are sent, and the bytes of the chunk that goes or comes with it."""

    key: bytes
    parts: Sequence[Buffer]
    nbytes: int = 0


class Router:
    """The connections of an open backend. To be used on one event loop."""

    def __init__(self, connector: Connector) -> None:
        self.changes = 0
        """How often the keys were found to be on other servers than before."""
        self.unserved = 0
        """Commands on keys that no server of the cluster has now."""
        self._connector = connector
        self._limit = connector.options.connections
        self._topology = Topology([])
        self._control = IoThreads("lmcache-redis-control", 2)
        self._finding: asyncio.Task[Topology] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._found = 0.0
        self._data: dict[Address, Connections] = {}
        self._small: dict[Address, Connections] = {}

    async def find(self) -> None:
        """Find out where the keys are. Concurrent calls ask once.

        Raises:
            BackendError: Nobody answers.
            ConfigError: The options don't fit what answers.
        """
        if self._finding is None or self._finding.done():
            known = list(self._topology.servers)
            self._finding = asyncio.create_task(self._control.run(find, self._connector, known))
            self._finding.add_done_callback(_seen)
        topology = await asyncio.shield(self._finding)
        if self._topology.servers and topology.servers != self._topology.servers:
            self.changes += 1
        self._topology = topology
        self._found = asyncio.get_running_loop().time()

    @property
    def policy(self) -> str:
        """What the server does when it is full: `unbounded`, one of its policies, or empty where it does not tell."""
        return self._topology.policy

    def close(self) -> None:
        """Close all connections; those in use as soon as their job has ended. Idempotent."""
        for task in (self._finding, self._looking):
            if task is not None:
                task.cancel()
        for connections in self.pools():
            connections.close()
        self._control.close()

    def pools(self) -> Iterator[Connections]:
        """All connections, by server and use."""
        yield from self._data.values()
        yield from self._small.values()

    def _connections(self, where: Address, *, data: bool) -> Connections:
        pools = self._data if data else self._small
        if where not in pools:
            pools[where] = Connections(self._connector, where, self._limit if data else SMALL)
        return pools[where]

    async def run(
        self, commands: Sequence[Command], parses: Sequence[Parse[T]], *, data: bool, unserved: T | None = None
    ) -> list[T]:
        """The outcome of each command, as its parse makes it of the answer.

        Args:
            commands: To be sent.
            parses: Of each.
            data: Whether chunks go with them.
            unserved: The outcome where a cluster that serves its other slots has no server for the key's; without it
                that is a failure.

        Raises:
            BackendError: One of them failed. The others have ended.
            ConfigError: One of them can never succeed.
        """
        work = _Work(commands, parses, data, unserved)
        self._look_again()
        for attempt in range(ROUNDS):
            moved = await self._round(work)
            if not work.left:
                return [work.results[number] for number in range(len(commands))]
            if work.failures and (attempt or not self._elsewhere):
                break
            if work.failures or moved:
                await self._find_again()
        raise work.failures[0] if work.failures else BackendError("redis: keys move faster than they can be followed")

    def holders(self) -> list[Address]:
        """All servers that hold keys, as far as is known."""
        return self._topology.holders()

    async def ask(self, where: Address, job: Callable[[RespSocket], T]) -> T:
        """Return what `job` does with a connection to one server, for what is small.

        Raises:
            BackendError: There is no connection, or it ended.
            ConfigError: There can never be one.
        """
        return await self._connections(where, data=False).run(job)

    @property
    def _elsewhere(self) -> bool:
        """Whether keys may be on another server by now."""
        return bool(self._connector.options.service or self._topology.slots)

    async def _find_again(self) -> None:
        """As `find`, unless that was done just now, and without failing by it."""
        if asyncio.get_running_loop().time() - self._found >= REFRESH:
            with contextlib.suppress(BackendError):  # what has failed before is told, not this
                await self.find()

    def _look_again(self) -> None:
        """Beside what is done, so that it holds nothing up: there may be a node that nobody reaches."""
        looking = self._looking is not None and not self._looking.done()
        if self._topology.partial and not looking and asyncio.get_running_loop().time() - self._found >= AGAIN:
            self._looking = asyncio.create_task(self._find_again())

    async def _round(self, work: _Work[T]) -> bool:
        """Send what is left. Returns whether a key has moved for good."""
        work.failures.clear()
        batches: dict[tuple[Address, bool], list[int]] = defaultdict(list)
        for number in work.left:
            where = work.asked.get(number) or self._topology.server_of(work.commands[number].key)
            if where is None and self._topology.partial and work.unserved is not None:
                work.results[number] = work.unserved
                self.unserved += 1
                continue
            if where is None:
                work.failures.append(BackendError("redis: a slot of the cluster has no server now"))
                return False
            batches[where, number in work.asked].append(number)
        work.asked.clear()
        jobs = [
            (where, part, asking)
            for (where, asking), numbers in batches.items()
            for part in work.parts(numbers, self._limit if work.data else 1)
        ]
        outcomes = await asyncio.gather(
            *(
                self._connections(where, data=work.data).run(work.job(part, asking=asking))
                for where, part, asking in jobs
            ),
            return_exceptions=True,
        )
        moved = False
        for (where, part, _), outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, BackendError):
                work.failures.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                for number, result in zip(part, outcome, strict=True):
                    moved |= self._note(work, where, number, result)
        work.left = [number for number in work.left if number not in work.results]
        return moved

    def _note(self, work: _Work[T], where: Address, number: int, result: T | ErrorReply) -> bool:
        """Note an outcome, or why there is none. Returns whether the key has moved for good."""
        if not isinstance(result, ErrorReply):
            work.results[number] = result
        elif result.code in ("MOVED", "ASK") and self._topology.slots:
            slot, target = _redirection(result, where)
            if result.code == "MOVED":
                self._topology.moved(slot, target)
                return True
            work.asked[number] = target
        else:
            error = problems.of_reply(where, result, self._connector.options.mode)
            if not isinstance(error, BackendError):
                raise error
            work.failures.append(error)
        return False


class _Work(Generic[T]):
    """Commands on their way."""

    def __init__(self, commands: Sequence[Command], parses: Sequence[Parse[T]], data: bool, unserved: T | None) -> None:
        self.commands = commands
        self.data = data
        self.unserved = unserved
        self.left: Sequence[int] = range(len(commands))
        self.results: dict[int, T] = {}
        self.failures: list[BackendError] = []
        """Of the last round. Another server may do better."""
        self.asked: dict[int, Address] = {}
        """Where a key is just now, though its slot is another server's."""
        self._parses = parses

    def parts(self, numbers: Sequence[int], most: int) -> list[list[int]]:
        """`numbers` in at most `most` parts of about as many bytes each, of `PART_BYTES` or more, in order."""
        total = sum(self.commands[number].nbytes for number in numbers)
        count = max(1, min(most, len(numbers), total // PART_BYTES))
        parts: list[list[int]] = [[]]
        done = 0
        for number in numbers:
            if parts[-1] and len(parts) < count and done >= total * len(parts) / count:
                parts.append([])
            parts[-1].append(number)
            done += self.commands[number].nbytes
        return parts

    def job(self, numbers: Sequence[int], *, asking: bool) -> Callable[[RespSocket], list[T | ErrorReply]]:
        """Sends commands at once and takes the answers in order."""

        def job(connection: RespSocket) -> list[T | ErrorReply]:
            parts: list[Buffer] = []
            for number in numbers:
                if asking:
                    parts.append(command(b"ASKING"))
                parts += self.commands[number].parts
            connection.send(parts)
            results: list[T | ErrorReply] = []
            for number in numbers:
                if asking:
                    connection.reply()
                results.append(self._parses[number](connection))
            return results

        return job


def _redirection(reply: ErrorReply, where: Address) -> tuple[int, Address]:
    """Slot and server of `MOVED 3999 127.0.0.1:6381` or `ASK ...`.

    Raises:
        BackendError: It is not one.
    """
    slot, _, text = reply.rest.partition(" ")
    host, _, port = text.rpartition(":")
    if not slot.isdecimal() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BackendError(f"redis at {where} says {reply}, which is no address")
    return int(slot), Address(host.strip("[]") or where.host, int(port))


def _seen(task: asyncio.Task[Topology]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be waiting any more
