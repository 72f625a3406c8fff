"""`DirectClient`: the client of a node in the same process. Calls run on the caller's thread, under its mutex."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lmcache_core.arguments import seconds
from lmcache_core.client import (
    AHEAD,
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
    counted_group,
)
from lmcache_core.errors import ConfigError, UsageError
from lmcache_core.guard import batches
from lmcache_core.handles import Filling, Holding, arrival, reading, rooms_of
from lmcache_core.index import POOL, Entry, Index, Space, Watch, tier_bit
from lmcache_core.index.decisions import Found
from lmcache_core.index.index import EVERYWHERE
from lmcache_core.index.residency import CPU
from lmcache_core.namespace import Namespace
from lmcache_core.node import Node
from lmcache_core.pins import Pins, Unpinned
from lmcache_core.protocols import CopyBack, DirectChunk, DirectRead, ReadResult
from lmcache_core.statistics import node_stats, space_stats

PLANNED = 64
"""Chunks of a store that are planned in one turn."""
PAUSE = 0.0005
"""Seconds between the turns of a clear or a long store: the mutex is nobody's by right, and whoever has let go of it
takes it again before one who waits for it is awake."""


@dataclass(frozen=True, slots=True)
class DirectModel:
    """See `Model`."""

    namespace: Namespace
    spaces: Sequence[Space]


class _Looked:
    """Prompts that were looked up and not held since, by their first page: most engines hold what they have looked up,
    or a part of it, and that is one request. The oldest are forgotten. Guarded by the mutex."""

    MOST = 4096

    def __init__(self) -> None:
        self._times: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Sequence[bytes]) -> None:
        """It has been looked up."""
        if keys:
            self._times[keys[0]] = self._times.pop(keys[0], 0) + 1
            if len(self._times) > self.MOST:
                self._times.popitem(last=False)

    def forget(self, keys: Sequence[bytes]) -> bool:
        """It is held. Returns whether it had been looked up."""
        times = self._times.pop(keys[0], 0) if keys else 0
        if times > 1:
            self._times[keys[0]] = times - 1
        return times > 0


class DirectClient:
    """See `Client`. Closing it closes the node if it `owns` it. By default its tenant is the node's, and its pins are
    its own. If it `pauses`, a long store of it lets others have their turns; its threads must be its own then."""

    def __init__(
        self,
        node: Node,
        *,
        owns: bool = False,
        shard: int = 0,
        tenant: str | None = None,
        pins: Pins | None = None,
        pauses: bool = False,
    ) -> None:
        self.node = node
        self.shard = shard
        self.tenant = node.config.tenant if tenant is None else tenant
        self._guard = node.guard
        self.chunk_tokens = node.config.chunk_tokens
        self.page_tokens = node.config.page_tokens
        self.retention_tokens = node.config.retention_tokens
        self._owns = owns
        self._pauses = pauses
        self._bits = {CPU: POOL} | {tier.name: tier_bit(n) for n, tier in enumerate(node.config.tiers)}
        self._names = {bit: name for name, bit in self._bits.items()}
        self._pins = Pins() if pins is None else pins
        self._looked = _Looked()

    @property
    def places(self) -> Sequence[str]:
        """Names of the host pool and the tiers."""
        return list(self._bits)

    @property
    def memory(self) -> memoryview | None:
        """See `Client`."""
        try:
            return self.node.pool.memory[:]
        except ValueError:  # it has been closed
            return None

    def register(self, namespace: Namespace) -> DirectModel:
        """See `Client`."""
        return DirectModel(namespace, self.node.register(namespace))

    def check_places(self, places: Sequence[str] | None) -> None:
        """
        Raises:
            ConfigError: One of them is no tier of this node.
        """
        self._mask(places)

    def _mask(self, places: Sequence[str] | None) -> int:
        check_places(places)
        if places is None:
            return EVERYWHERE
        mask = 0
        for name in places:
            if name not in self._bits:
                raise ConfigError(f"there is no tier {name!r}; this node has {', '.join(self._bits)}")
            mask |= self._bits[name]
        return mask

    def _too_short_for(self, tokens: int) -> int:
        """Mask of the tiers that want longer prompts."""
        return sum(tier_bit(n) for n, tier in enumerate(self.node.config.tiers) if tokens < tier.min_prompt)

    def _tier_of(self, entry: Entry, readable: int) -> str:
        where = entry.where & readable
        return self._names.get(where & -where, CPU)

    def _by_tier(self, found: Found, readable: int) -> dict[str, int]:
        tiers: dict[str, int] = {}
        counted = counted_group([piece.group for piece in found.pieces]) if found.pieces else 0
        for piece in found.pieces:
            if piece.group == counted:
                name = self._tier_of(piece.entry, readable)
                tiers[name] = tiers.get(name, 0) + piece.pages
        return tiers

    # Lookup and load

    def lookup(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, quiet: bool = False
    ) -> Boundary:
        """See `Client`."""
        check_keys(keys)
        spaces, mask = _spaces(model), self._mask(places)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            found = index.find(spaces, keys, mask)
            tiers = self._by_tier(found, index.readable & mask)
            if quiet:
                return Boundary(found.pages, tiers)
            if found.pages < len(keys) and self.node.ask(spaces, keys, found.pages, mask) is not None:
                return Boundary(found.pages, tiers, pending=True)  # counted when it is asked for the last time
            self._count_lookup("lookup", model, keys, tiers)
            self._looked.note(keys)
        return Boundary(found.pages, tiers)

    def _count_lookup(self, kind: str, model: Model, keys: Sequence[bytes], tiers: Mapping[str, int]) -> None:
        counts = self.node.counts
        counts.add("lookups", kind)
        counts.add("lookup_tokens", kind, len(keys) * model.namespace.page_tokens)
        for name, pages in tiers.items():
            counts.add("hit_tokens", name, pages * model.namespace.page_tokens)

    def hold(
        self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None, *, counted: bool = False
    ) -> Held:
        """See `Client`."""
        check_keys(keys)
        spaces, mask, shard = _spaces(model), self._mask(places), self._shard(model.namespace.shards)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            found = index.find(spaces, keys, mask)
            asked = self.node.ask(spaces, keys, found.pages, mask) if found.pages < len(keys) else None
            lease = index.lease(found)
            if counted and asked is None and not self._looked.forget(keys):
                self._count_lookup("retrieve", model, keys, self._by_tier(found, index.readable & mask))
        parts = [Part(piece.group, piece.first, piece.pages) for piece in found.pieces]
        return Held(found.pages, parts, asked, Holding(lease, shard, self._later_end))

    def grant(self, held: Held, start: int, ahead: int) -> list[Grant]:
        """See `Client`."""
        holding: Holding = held.handle
        pieces = holding.lease.found.pieces
        grants: list[Grant] = []
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            if not holding.lease.active:
                return []
            for number in range(start, len(pieces)):
                entry = pieces[number].entry
                slot = holding.slots.get(number) or entry.slot
                if slot is not None:
                    if number not in holding.slots:
                        slot.acquire()
                        holding.slots[number] = slot
                    source = slot.payload(holding.shard, pieces[number].pages).toreadonly()
                    offset = slot.payload_offset(holding.shard)
                    grants.append(Grant(source, holding.tiers.get(number, CPU), None, offset))
                    continue
                if ahead < 1:
                    break
                load = index.load(entry)
                if load is None:
                    break
                ahead -= 1
                holding.tiers[number] = self.node.config.tiers[load.tier].name
                grants.append(Grant(None, holding.tiers[number], reading(load)))
        return grants

    @property
    def reads_past_host(self) -> bool:
        """See `ReadsPastHost`."""
        return any(self.node.past_host(number) is not None for number in range(len(self.node.runners)))

    def past_host(self, held: Held, number: int) -> PastHost | None:
        """See `ReadsPastHost`."""
        return self.find_past_host(held, number, lambda tier: self.node.past_host(tier) is not None)

    def find_past_host(self, held: Held, number: int, readable: Callable[[int], bool]) -> PastHost | None:
        """As `past_host`, of tiers that are `readable`, by their number."""
        holding: Holding = held.handle
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            pieces = holding.lease.found.pieces
            if not holding.lease.active or number in holding.slots or not 0 <= number < len(pieces):
                return None
            piece = pieces[number]
            entry = piece.entry
            tier = index.source(entry)
            if tier is None or not readable(tier.number):
                return None
            form = entry.form
            chunk = DirectChunk(entry.chunk_key, entry.pages, entry.parent, form.shards, form.page_bytes)
            return PastHost(tier.rules.name, tier.number, chunk, holding.shard, piece.pages)

    def read_past_host(self, found: PastHost, address: int, back: CopyBack) -> DirectReading:
        """See `ReadsPastHost`."""
        reads = self.node.runners[found.number].direct
        assert reads is not None
        read = DirectRead(found.chunk, found.shard, 0, found.pages, address)
        ended: Future[list[ReadResult]] = Future()
        ended.set_running_or_notify_cancel()
        answered = self.node.start(reads.read(read, back, ended))
        return DirectReading(answered, ended)

    def consume(self, held: Held, parts: int) -> None:
        """See `Client`."""
        holding: Holding = held.handle
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            for number in range(holding.done, holding.done + parts):
                slot = holding.slots.pop(number, None)
                if slot is not None:
                    slot.release()
            holding.done += parts
            index.consume(holding.lease, parts)

    def release(self, held: Held) -> None:
        """See `Client`."""
        holding: Holding = held.handle
        self._end(holding)

    def _later_end(self, holding: Holding) -> None:
        self.node.later(lambda: self._end(holding))

    def _end(self, holding: Holding) -> None:
        guard = self._guard
        with guard.turn, guard.mutex:
            if not guard.broken:  # also once the node has been closed
                self.node.shared.pop(holding.shared, None)
                holding.release(guard.index)

    # Store

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
        check_keys(keys)
        spaces, mask, shard = _spaces(model), self._mask(places), self._shard(model.namespace.shards)
        mask &= ~self._too_short_for(max(len(keys), prompt_pages) * model.namespace.page_tokens)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            plan = index.plan_store(spaces, keys, at, first_page, mask, PLANNED, self.tenant)
            filling = Filling(plan, shard, self._later_finish, joined=False)
        while plan.rest:  # of a long store, so that others get the mutex in between
            if self._pauses:
                self.node.runtime.pause(PAUSE)
            with self._guard.turn, self._guard.mutex:
                self._guard.use().plan_more(plan, PLANNED)
        return Storing(rooms_of(filling), plan.present, plan.dropped, filling)

    def filled(self, room: Room) -> None:
        """See `Client`."""
        handle: tuple[Filling, int] = room.handle
        filling, number = handle
        reservation = filling.plan.reservations[number]
        try:  # noqa: SIM105  several times as fast as `suppress`
            room.target.release()
        except BufferError:
            pass  # somebody has made an array of it and keeps that
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            if filling.joined is not None:
                slot = filling.joined.pop(number, None)
                if slot is None:
                    raise UsageError("a room was reported twice, or after its store had ended")
                slot.release()
                if not reservation.open:
                    return  # whoever began the store has ended it
            index.filled(filling.plan, reservation, filling.shard)

    def finish_store(self, storing: Storing) -> Finished:
        """See `Client`."""
        filling: Filling = storing.handle
        with self._guard.turn, self._guard.mutex:
            return self._finish(self._guard.use(), filling)

    def _finish(self, index: Index, filling: Filling) -> Finished:
        plan = filling.plan
        self.node.shared.pop(filling.shared, None)
        if filling.joined is not None:
            filling.leave()
            pages = sum(len(r.entry.pages) for r in plan.reservations if r.published)
            return Finished(pages, arrival([], lambda: False))
        stored = index.commit(plan)
        filling.finished = True
        written = arrival(index.writes_of(plan.touched), lambda: index.arrived(plan))
        return Finished(sum(len(entry.pages) for entry in stored), written)

    def _later_finish(self, filling: Filling) -> None:
        def finish() -> None:
            guard = self._guard
            with guard.turn, guard.mutex:
                if not guard.broken:
                    self._finish(guard.index, filling)

        self.node.later(finish)

    # Ranks

    def share(self, work: Held | Storing) -> int:
        """See `Client`."""
        handle: Holding | Filling = work.handle
        with self._guard.turn, self._guard.mutex:
            self._guard.use()
            if not handle.shared:
                handle.shared = self.node.number()
                self.node.shared[handle.shared] = handle
            return handle.shared

    def join_hold(self, number: int) -> Held | None:
        """See `Client`."""
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            holding = self.node.shared.get(number)
            if not isinstance(holding, Holding) or not holding.lease.active:
                return None
            found = holding.lease.found
            shard = self._shard(found.pieces[0].entry.space.known.shards if found.pieces else 1)
            mine = Holding(index.lease(found), shard, self._later_end)
        parts = [Part(piece.group, piece.first, piece.pages) for piece in found.pieces]
        return Held(found.pages, parts, None, mine)

    def join_store(self, number: int) -> Storing | None:
        """See `Client`."""
        with self._guard.turn, self._guard.mutex:
            self._guard.use()
            filling = self.node.shared.get(number)
            if not isinstance(filling, Filling) or filling.finished:
                return None
            plan = filling.plan
            shards = plan.reservations[0].entry.space.known.shards if plan.reservations else 1
            mine = Filling(plan, self._shard(shards), self._later_finish, joined=True)
            if self.shard < shards:  # else what all ranks share is written by the first
                assert mine.joined is not None
                for place, reservation in enumerate(plan.reservations):
                    if reservation.open and mine.shard in reservation.missing:
                        reservation.slot.acquire()
                        mine.joined[place] = reservation.slot
        return Storing(rooms_of(mine), plan.present, plan.dropped, mine)

    def _shard(self, shards: int) -> int:
        if self.shard < shards:
            return self.shard
        if shards == 1:
            return 0  # all ranks hold the same
        raise UsageError(f"a client of shard {self.shard} cannot copy chunks of {shards} shards")

    # Operators

    def prefetch(
        self, model: Model, keys: Sequence[bytes], source: Sequence[str] | None, destination: str
    ) -> Future[int]:
        """See `Client`."""
        check_keys(keys)
        target = self._mask([destination])
        places = self._mask(source)
        return self.node.start(self._prefetch(_spaces(model), keys, places, target))

    async def _prefetch(self, spaces: Sequence[Space], keys: Sequence[bytes], places: int, target: int) -> int:
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            lease = index.lease(index.find(spaces, keys, places | target))
        pieces = lease.found.pieces
        turns = asyncio.Semaphore(AHEAD)
        missing = False

        async def bring(entry: Entry) -> bool:
            nonlocal missing
            async with turns:  # given in order
                there = not missing and await self._bring(entry, target)
            missing |= not there
            return there

        try:
            there = await asyncio.gather(*(bring(piece.entry) for piece in pieces))
        finally:
            with self._guard.turn, self._guard.mutex:
                if not self._guard.broken:
                    self._guard.index.release(lease)
        brought = itertools.takewhile(lambda each: each[1], zip(pieces, there, strict=True))
        counted = counted_group([piece.group for piece in pieces]) if pieces else 0
        return sum(piece.pages for piece, _ in brought if piece.group == counted)

    async def _bring(self, entry: Entry, target: int) -> bool:
        if entry.where & target:
            return True
        wait: Future[bool] | None = None
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            if entry.slot is None:
                load = index.load(entry)
                if load is None:
                    return False
                wait = reading(load)
        if wait is not None and not await asyncio.wrap_future(wait):
            return False
        if target == POOL:
            return True
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            tier = next(tier for tier in index.tiers if tier.bit == target)
            if index.write(tier, entry) is not None:
                return False
            arrived = arrival(index.writes_of([entry]), lambda: bool(entry.where & target))
        return await asyncio.wrap_future(arrived)

    def pin(self, model: Model, keys: Sequence[bytes]) -> int:
        """See `Client`."""
        check_keys(keys)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            found = index.find(_spaces(model), keys)
            self._pins.add(index, (_spaces(model)[0].digest, *keys), found)
        return found.pages

    def unpin(self, model: Model, keys: Sequence[bytes]) -> int:
        """See `Client`."""
        return self.unpin_one(model, keys).pages

    def unpin_one(self, model: Model, keys: Sequence[bytes]) -> Unpinned:
        """As `unpin`, with what is left."""
        check_keys(keys)
        with self._guard.turn, self._guard.mutex:
            return self._pins.remove(self._guard.use(), (_spaces(model)[0].digest, *keys))

    def unpin_all(self) -> int:
        """Undo all that was pinned through this client. Returns how many chunks are pinned no longer."""
        with self._guard.turn, self._guard.mutex:
            return self._pins.clear(self._guard.use())

    def watch(self, model: Model, group: int = 0) -> Watch:
        """Hear of the chunks of a cache group from now on, and of those that are there."""
        watch = Watch()
        space = _spaces(model)[group]
        with self._guard.turn, self._guard.mutex:
            self._guard.use()
            for entry in space.chunks.values():
                for place in self._names:
                    if entry.where & place:
                        watch.changed(entry.pages, place, True)
            space.watches.append(watch)
        return watch

    def unwatch(self, model: Model, watch: Watch, group: int = 0) -> None:
        """Hear no more of them."""
        with self._guard.turn, self._guard.mutex:
            self._guard.use()
            _spaces(model)[group].watches.remove(watch)

    @property
    def place_names(self) -> Mapping[int, str]:
        """Names of the places that a `Watch` tells of."""
        return self._names

    def evict(self, model: Model, keys: Sequence[bytes], places: Sequence[str] | None = None) -> int:
        """See `Client`."""
        check_keys(keys)
        mask = self._mask(places)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            found = index.find(_spaces(model), keys)
            return index.evict((piece.entry for piece in reversed(found.pieces)), mask)

    def clear(self, model: Model | None = None, places: Sequence[str] | None = None) -> int:
        """See `Client`."""
        mask = self._mask(places)
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            spaces = list(index.spaces.values()) if model is None else _spaces(model)
        removed = 0
        for space in spaces:
            with self._guard.turn, self._guard.mutex:
                self._guard.use()
                entries = list(space.chunks.values())
            for number, batch in enumerate(batches(entries)):
                if number:
                    self.node.runtime.pause(PAUSE)
                with self._guard.turn, self._guard.mutex:
                    removed += self._guard.use().clear(batch, mask)
        return removed

    def count(self, name: str, label: str, amount: float = 1) -> None:
        """See `Client`."""
        with self._guard.mutex:
            self.node.counts.add(name, label, amount)

    def stats(self) -> Stats:
        """See `Client`."""
        return node_stats(self.node, self._bits)

    def spaces(self) -> list[SpaceStats]:
        """What the node holds, by namespace and group."""
        return space_stats(self.node, self._bits)

    def freeze(self, on: bool) -> None:
        """Store nothing new from now on, or again. What is there is served."""
        with self._guard.turn, self._guard.mutex:
            self._guard.use().frozen = on

    def flush(self, timeout: float | None = None) -> bool:
        """See `Client`."""
        return self.node.flush(seconds(timeout))

    def close(self) -> None:
        """See `Client`."""
        if self._owns:
            self.node.close()


def _spaces(model: Model) -> Sequence[Space]:
    if not isinstance(model, DirectModel):
        raise UsageError("a model that was registered with another client")
    return model.spaces
