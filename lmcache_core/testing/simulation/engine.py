"""An engine: a coroutine that calls the client as connectors do, checks every byte, and now and then walks away.

The client's calls run on its turn, under the node's mutex, as on a thread of an engine. Where a real thread would block
on a future, it waits in virtual time, and not longer than the answer may take.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core.client import Held, Room, Storing
from lmcache_core.direct import DirectClient, DirectModel
from lmcache_core.errors import ClosedError
from lmcache_core.node import TICK
from lmcache_core.testing.simulation.content import part_bytes, prompt

if TYPE_CHECKING:
    from lmcache_core.testing.simulation.host import Host

__all__ = ["Engine"]

T = TypeVar("T")

SLACK = 0.1
"""Virtual seconds that an answer may take beside what its tiers may."""


class Engine:
    """One client of each rank, of one host."""

    def __init__(self, host: Host, number: int, rng: random.Random) -> None:
        self.host = host
        self.name = f"{host.name}.e{number}"
        self.rng = rng
        self.trace = host.trace
        node = host.node
        tenant = rng.choice(("", "", "x", "y"))
        self.namespace = host.namespace
        self.clients = [DirectClient(node, shard=shard, tenant=tenant) for shard in range(self.namespace.shards)]
        self.client = self.clients[0]
        self.model: DirectModel | None = None

    async def run(self) -> None:
        """Work until the host is to come to rest or is closed."""
        weights = [weight for _, weight in self.OPERATIONS]
        operations = [operation for operation, _ in self.OPERATIONS]
        try:
            await self.pause()
            self.model = self.client.register(self.namespace)
            while not self.host.resting:
                operation = self.rng.choices(operations, weights)[0]
                self.trace.add(f"{self.name} {operation.__name__}")
                await operation(self)
                self.host.operations += 1
                self.host.check()
                await self.pause()
            self.client.unpin_all()
        except ClosedError as error:
            self.trace.add(f"{self.name} ends: {error}")
            if not self.host.closing:
                self.trace.fail(f"{self.name}: {error}, and nobody has closed it")

    async def pause(self) -> None:
        """Let others have their turns, for some time."""
        await asyncio.sleep(self.host.pace * self.rng.choice((0.0, 0.0, 0.0005, 0.001, 0.005, 0.02, 0.1)))

    async def wait(self, future: Future[Any], seconds: float, what: str) -> Any:
        """What a future has, or False if the node was closed. It must be there in so many seconds."""
        loop = asyncio.get_running_loop()
        if not future.done():
            awake: asyncio.Future[None] = loop.create_future()
            mine = self.host.engines_scope.context

            def wake() -> None:
                if not awake.done():
                    awake.set_result(None)

            future.add_done_callback(lambda _: loop.call_soon(wake, context=mine))
            timer = loop.call_later(seconds + SLACK, wake)
            began = loop.time()
            await awake
            timer.cancel()
            if not future.done():
                self.trace.fail(f"{self.name}: {what} has not ended in {seconds:g} s, since {began:g}")
        if future.cancelled():
            if not self.host.closing:
                self.trace.fail(f"{self.name}: {what} was cancelled")
            return False
        error = future.exception()
        if error is not None:
            if not (self.host.closing and isinstance(error, ClosedError)):
                self.trace.fail(f"{self.name}: {what} failed: {error!r}")
            return False
        return future.result()

    def keys(self, *, stored: bool = True) -> list[bytes]:
        """A prompt, mostly one that was stored not long ago if it shall be `stored`."""
        recent = self.host.recent
        if stored and recent and self.rng.random() < 0.8:
            return self.rng.choice(recent)
        return prompt(self.rng)

    def places(self) -> Sequence[str] | None:
        """Where to look, or to store."""
        if self.rng.random() < 0.85:
            return None
        return self.rng.sample(list(self.client.places), self.rng.randint(1, len(self.client.places)))

    @property
    def known(self) -> DirectModel:
        """The model, registered."""
        assert self.model is not None
        return self.model

    # Loading

    async def retrieve(self) -> None:
        """Look a prompt up and load it, on every rank."""
        keys, places = self.keys(), self.places()
        if self.rng.random() < 0.6:
            for _ in range(4):
                if not self.client.lookup(self.known, keys, places).pending:
                    break
                await self.pause()
        held = self.client.hold(self.known, keys, places, counted=self.rng.random() < 0.5)
        if held.asked is not None and self.rng.random() < 0.8:
            self.client.release(held)
            await self.wait(held.asked, self.host.ask_seconds, "asking tiers")
            held = self.client.hold(self.known, keys, places)
            if held.asked is not None:
                self.trace.fail(f"{self.name}: what tiers have just told is asked for again")
        self.lend(held)
        if self.rng.random() < 0.1:
            await asyncio.sleep(self.rng.random() * 2 * self.host.config.lease_timeout)
        ranks = [(self.client, held)]
        if len(self.clients) > 1:
            number = self.client.share(held)
            for client in self.clients[1:]:
                other = client.join_hold(number)
                if other is not None:
                    self.lend(other)
                    ranks.append((client, other))
        del held
        await self.side_by_side(ranks, lambda client, mine: self.load(client, mine, keys))

    def lend(self, held: Held) -> None:
        """Note which slots a lease keeps."""
        self.host.lent.held.append((held.handle.slots, held.handle.lease))

    async def load(self, client: DirectClient, held: Held, keys: list[bytes]) -> None:
        """Copy all parts of a lease."""
        walks_away = self.rng.random() < 0.2
        number = 0
        while number < len(held.parts):
            grants = client.grant(held, number, self.rng.choice((0, 1, 2, 8)) or (1 if number else 8))
            if not grants:
                break
            if grants[0].wait is not None:
                if not await self.wait(grants[0].wait, self.host.read_seconds, "a load"):
                    break
                continue
            ready = 0
            for grant in grants:
                if grant.source is None:
                    break
                part = held.parts[number + ready]
                wanted = part_bytes(self.known.spaces[part.group].digest, keys, part, client.shard)
                for again in range(2):
                    if grant.source != wanted:
                        self.trace.fail(f"{self.name}: wrong bytes of pages {part}, from {grant.tier}, look {again}")
                    if not again and self.rng.random() < 0.5:
                        await self.pause()
                ready += 1
            del grants
            if walks_away and self.rng.random() < 0.4:
                return  # without a release: the handle is let go of
            client.consume(held, ready)
            number += ready
        client.release(held)

    # Storing

    async def store(self) -> None:
        """Compute a prompt and store it, from every rank."""
        keys = self.keys(stored=False)
        self.host.recent.append(keys)
        at = sorted({len(keys), self.rng.randint(1, len(keys))})
        first = 0 if self.rng.random() < 0.9 else self.rng.randrange(len(keys))
        storing = self.client.begin_store(self.known, keys, at, first, self.places())
        self.host.lent.plans.append(storing.handle.plan)
        ranks = [(self.client, storing)]
        if len(self.clients) > 1:
            number = self.client.share(storing)
            for client in self.clients[1:]:
                joined = client.join_store(number)
                if joined is not None:
                    self.host.lent.held.append((joined.handle.joined, None))
                    ranks.append((client, joined))
        if self.rng.random() < 0.5:
            ranks.reverse()
        del storing
        await self.side_by_side(ranks, lambda client, mine: self.fill(client, mine, keys))

    async def side_by_side(
        self, ranks: list[tuple[DirectClient, T]], work: Callable[[DirectClient, T], Coroutine[Any, Any, None]]
    ) -> None:
        """Let each rank do its part. All have ended when this raises."""
        parts = [work(client, mine) for client, mine in ranks]
        ranks.clear()  # who lets go of a handle is the last to have it
        for outcome in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def fill(self, client: DirectClient, storing: Storing, keys: list[bytes]) -> None:
        """Fill all rooms of a store and end it."""
        walks_away = self.rng.random() < 0.2
        for room in storing.rooms:
            if walks_away and self.rng.random() < 0.4:
                return
            await self.copy(client, room, keys)
            client.filled(room)
        finished = client.finish_store(storing)
        del storing
        if self.rng.random() < 0.5:
            await self.wait(finished.written, self.host.write_seconds, "a store's arrival")

    async def copy(self, client: DirectClient, room: Room, keys: list[bytes]) -> None:
        """Put the bytes of a room in place, in two halves."""
        wanted = part_bytes(self.known.spaces[room.part.group].digest, keys, room.part, client.shard)
        half = len(wanted) // 2
        room.target[:half] = wanted[:half]
        if self.rng.random() < 0.5:
            await self.pause()
        room.target[half:] = wanted[half:]

    # Operators

    async def prefetch(self) -> None:
        """Bring a prompt to a tier."""
        destination = self.rng.choice(list(self.client.places))
        future = self.client.prefetch(self.known, self.keys(), None, destination)
        await self.wait(future, self.host.prefetch_seconds, "a prefetch")

    async def pin(self) -> None:
        """Pin a prompt for a while."""
        keys = self.keys()
        self.client.pin(self.known, keys)
        await self.pause()
        if self.rng.random() < 0.9:
            self.client.unpin(self.known, keys)

    async def evict(self) -> None:
        """Take a prompt out of some places."""
        places = ["cpu"] if self.rng.random() < 0.6 else self.places()
        self.client.evict(self.known, self.keys(), places)

    async def replace(self) -> None:
        """Take a prompt out of everywhere and store it again at once, some times."""
        for _ in range(self.rng.randint(1, 3)):
            self.client.evict(self.known, self.keys())
            await self.store()

    async def clear(self) -> None:
        """Take everything out of some places; of host memory alone most often, so that tiers are read."""
        places = ["cpu"] if self.rng.random() < 0.93 else self.places()
        self.client.clear(None if self.rng.random() < 0.5 else self.known, places)

    async def flush(self) -> None:
        """Wait until nothing is under way, for at most some time."""
        seconds = self.rng.choice((0.0, 0.1, 1.0))
        await self.wait(self.host.node.flushed(seconds), seconds + TICK, "a flush")

    async def freeze(self) -> None:
        """Store nothing for a while."""
        self.client.freeze(True)
        await self.pause()
        self.client.freeze(False)

    async def look_at(self) -> None:
        """What operators see."""
        stats = self.client.stats()
        self.client.spaces()
        self.host.watcher.counters()
        if stats.pool_used > stats.pool_capacity:
            self.trace.fail(f"{self.name}: more of the pool is used than there is")
        self.host.node.check()

    OPERATIONS: Sequence[tuple[Callable[[Engine], Awaitable[None]], int]] = (
        (retrieve, 14),
        (store, 7),
        (clear, 6),
        (replace, 1),
        (prefetch, 2),
        (pin, 1),
        (evict, 1),
        (flush, 1),
        (freeze, 1),
        (look_at, 1),
    )
