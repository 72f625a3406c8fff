"""The cache on disk as blocking calls, for threads: what is found where, who reads it, and when a place is free again.

The order that makes it crash-safe:
    write:   value, then its record, then it is found, then the place of an older value is free
    delete:  evict record, then it is not found, then its place is free
A place is free only when nobody reads it any more. One lock guards what is in memory and the order of records; values
move without it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence

from lmcache_backends.disk.faults import FULL, failed
from lmcache_backends.disk.log import Rewrite
from lmcache_backends.disk.manifests import read_manifests
from lmcache_backends.disk.options import DiskOptions
from lmcache_backends.disk.replay import Entry, check_of
from lmcache_backends.disk.shard import Shard
from lmcache_backends.disk.tally import Tally
from lmcache_backends.disk.volume import Place, Volume
from lmcache_core.errors import BackendError
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Usage, WriteResult

__all__ = ["REFRESH", "Store"]

REFRESH = 1.0
"""Seconds after which it is looked up again how many owners share the capacity."""


class Store:
    """One opening of the cache. `contains`, `usage` and `stale` may be called anywhere, everything else on threads,
    by several at once. Raises `BackendError`."""

    def __init__(self, options: DiskOptions, tally: Tally) -> None:
        self._tally = tally
        self._fsync = options.fsync
        owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._volumes = [Volume(path, options, owner, tally, self._lock) for path in options.paths()]
        self._index: dict[tuple[bytes, bytes], tuple[Shard, Entry]] = {}
        self._nbytes = 0
        self._epoch = 0
        self._ticking = threading.Lock()  # around _epoch; held for no I/O
        self._refreshed = 0.0

    def open(self) -> None:
        """Learn what is stored. Everything is let go of when it fails."""
        try:
            for volume in self._volumes:
                with _failing(volume.path):
                    for shard, entries in volume.open():
                        self._learn(shard, entries)
                        self._compact(shard)
        except BaseException:  # whatever it was, the shards must not stay locked
            self.close()
            raise
        self._refreshed = time.monotonic()

    def close(self) -> None:
        """When no call is under way. Idempotent."""
        for volume in self._volumes:
            volume.close()

    def contains(self, key: ChunkKey) -> bool:
        return key in self._index

    def usage(self) -> Usage:
        return Usage(len(self._index), self._nbytes, sum(volume.share for volume in self._volumes))

    def stale(self) -> bool:
        """Is it time to `refresh`?"""
        return time.monotonic() - self._refreshed >= REFRESH

    def refresh(self) -> None:
        """Learn how many owners there are now, and give back what the others may have."""
        self._refreshed = time.monotonic()
        for volume in self._volumes:
            with contextlib.suppress(OSError):  # what needs the path will say so
                volume.refresh()
            volume.give_back()

    def epochs(self, number: int) -> int:
        """The first of `number` moments of use, later than all before."""
        with self._ticking:
            first = max(self._epoch + 1, time.time_ns() // 1000)
            self._epoch = first + number - 1
            return first

    def entries(self) -> list[Entry]:
        """What is stored, least recently used first."""
        with self._lock:
            found = [entry for _, entry in self._index.values()]
        found.sort(key=lambda entry: entry.epoch)
        return found

    def read(self, key: ChunkKey, into: memoryview) -> ReadResult:
        return self.read_part(key, into, 0, into.nbytes)[0]

    def read_part(self, key: ChunkKey, into: memoryview, start: int, stop: int) -> tuple[ReadResult, Entry | None]:
        """Fill `into[start:stop]`; also returns what was read from. `into` is as long as the value."""
        with self._lock:
            found = self._index.get(key)
            if found is None:
                return ReadResult.MISS, None
            shard, entry = found
            if entry.nbytes != into.nbytes:
                return ReadResult.CORRUPT, None
            segment = shard.segments[entry.segment]
            entry.readers += 1
        try:
            with _failing(segment.path):
                try:
                    whole = segment.read(entry.offset + start, into[start:stop])
                except OSError:  # a chunk that cannot be read is given up, so it has to fail twice
                    self._tally.add("reads_repeated")
                    whole = segment.read(entry.offset + start, into[start:stop])
        finally:
            with self._lock:
                self._release(shard, entry)
        if not whole or (not start and check_of(into) != entry.check):
            self._tally.add("values_damaged")
            return ReadResult.CORRUPT, entry
        return ReadResult.HIT, entry

    def write(self, chunk: Chunk, epoch: int) -> WriteResult:
        """`epoch` is from `epochs`."""
        self._refresh_stale()
        place = self._place(chunk.data.nbytes)
        if place is None:
            return WriteResult.FULL
        shard, segment, offset = place
        chain = chunk.parent + b"".join(chunk.pages)
        where, check = (segment.ident, offset, chunk.data.nbytes), check_of(chunk.data)
        entry = Entry(chunk.key.space, chain, not chunk.parent, *where, epoch, check)
        try:
            segment.write(offset, chunk.data, self._fsync)
            with self._lock:
                segment.check()
                shard.log.check()
                ticket = shard.put(entry)
                older = self._replace(chunk.key, shard, entry)
        except BaseException as error:  # whatever it was, the place must be free again
            with self._lock:
                shard.free(entry)
            if not isinstance(error, OSError):
                raise
            if error.errno in FULL:
                self._tally.add("enospc")
                return WriteResult.FULL
            raise failed(error, segment.path) from error
        try:
            self._sync(shard, ticket)
        finally:
            if older is not None:
                self._retire(*older, ticket)
        self._compact(shard)
        return WriteResult.STORED

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._refresh_stale()
        found: dict[Shard, list[Entry]] = {}
        gone: list[tuple[Shard, list[Entry], int]] = []
        failure: BackendError | None = None
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._index:
                    shard, entry = self._index[key]
                    found.setdefault(shard, []).append(entry)
            for shard, entries in found.items():
                try:
                    gone.append((shard, entries, shard.evict(entries)))
                except OSError as error:
                    failure = failed(error, shard.log.path)
                    continue
                for entry in entries:
                    del self._index[entry.key]
                    self._bury(entry)
        for shard, entries, ticket in gone:
            try:
                self._free(shard, entries, ticket)
            except BackendError as error:
                failure = error
        if failure is not None:
            raise failure
        for volume in self._volumes:
            volume.give_back()

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self._refresh_stale()
        epoch = self.epochs(len(keys))
        with self._lock:
            found = [self._index[key] for key in keys if key in self._index]
            for shard, group in itertools.groupby(found, key=lambda held: held[0]):
                entries = [entry for _, entry in group]
                with _failing(shard.log.path):
                    shard.touch(entries, epoch)
                epoch += len(entries)
        for shard in {shard for shard, _ in found}:
            self._compact(shard)

    def describe(self, space: bytes, manifest: bytes) -> None:
        """Keep a description, on the first path."""
        with _failing(self._volumes[0].path):
            self._volumes[0].describe(space, manifest)

    def manifests(self) -> dict[bytes, bytes]:
        """All descriptions."""
        with _failing(self._volumes[0].path):
            return read_manifests(self._volumes[0].path)

    def _learn(self, shard: Shard, entries: dict[tuple[bytes, bytes], Entry]) -> None:
        """Find `entries` from now on. Of a key in two shards, as a crash can leave it, the value used last."""
        for key in self._index.keys() & entries.keys():
            older = self._index[key]
            if older[1].epoch > entries[key].epoch:
                older = shard, entries.pop(key)
            older[0].evict([older[1]])
            older[0].free(older[1])
        self._index.update({key: (shard, entry) for key, entry in entries.items()})
        self._nbytes = sum([entry.nbytes for _, entry in self._index.values()])
        self._epoch = max([entry.epoch for entry in entries.values()] + [self._epoch])

    def _replace(self, key: ChunkKey, shard: Shard, entry: Entry) -> tuple[Shard, Entry] | None:
        """Find `entry` from now on; what was found before, whose place is to be freed. Under the lock."""
        older = self._index.get(key)
        self._index[key] = shard, entry
        self._nbytes += entry.nbytes
        if older is not None:
            self._bury(older[1])
            if older[0] is shard:  # the record of the new value says it
                shard.forget(older[1])
        return older

    def _retire(self, shard: Shard, entry: Entry, ticket: int) -> None:
        """Free the place of a value that was replaced by one whose record has this `ticket`."""
        with self._lock, _failing(shard.log.path):
            if shard.entries.get(entry.place) is entry:  # the new value is in another shard
                ticket = shard.evict([entry])
        self._free(shard, [entry], ticket)

    def _bury(self, entry: Entry) -> None:
        """An entry is no longer found; keep its place until `_free`. Under the lock."""
        entry.dead = True
        entry.readers += 1
        self._nbytes -= entry.nbytes

    def _free(self, shard: Shard, entries: Sequence[Entry], ticket: int) -> None:
        """Free the places of buried entries as soon as the record that says so is safe and nobody reads them."""
        try:
            self._sync(shard, ticket)
        except BackendError:
            with self._lock:
                shard.unfreed += entries
            raise
        with self._lock:
            if not shard.log.failed:
                entries = [*entries, *shard.unfreed]
                shard.unfreed = []
            for entry in entries:
                self._release(shard, entry)
        self._compact(shard)

    def _sync(self, shard: Shard, ticket: int) -> None:
        """With `fsync`, wait until the drive has the log up to `ticket`; if that fails, as a new log."""
        if not self._fsync:
            return
        try:
            shard.log.sync(ticket)
        except OSError:
            self._compact(shard)
            with _failing(shard.log.path):
                shard.log.sync(ticket)

    def _release(self, shard: Shard, entry: Entry) -> None:
        """One reader less. Under the lock."""
        entry.readers -= 1
        if entry.dead and not entry.readers:
            shard.free(entry)

    def _place(self, nbytes: int) -> Place | None:
        """Somewhere to write `nbytes`, on the path with most room if possible."""
        with self._lock:
            volumes = sorted(self._volumes, key=lambda volume: -volume.room)
        for volume in volumes:
            with self._lock:
                place = volume.allocate(nbytes)
            if place is not None:
                return place
            with volume.growing, _failing(volume.path):
                with self._lock:  # somebody may have grown it meanwhile
                    place = volume.allocate(nbytes)
                if place is not None:
                    return place
                grown = volume.grow(nbytes)
                if grown is None:
                    continue
                shard, segment = grown
                with self._lock:
                    shard.add_segment(segment)
                    return volume.allocate(nbytes)
        return None

    def _refresh_stale(self) -> None:
        if self.stale():
            self.refresh()

    def _compact(self, shard: Shard) -> None:
        """Rewrite the log of a shard if most of it is out of date. Failing costs nothing but the space."""
        with self._lock:
            if shard.compacting or not shard.log.due(shard.live):
                return
            shard.compacting = True
            rewrite = Rewrite(shard.log)
            entries = list(shard.entries.values())
        try:
            rewrite.fill(shard.records(entries))
            with shard.log.sync_lock:
                with self._lock:
                    rewrite.swap(self._fsync)
                if self._fsync:
                    rewrite.settle()
            self._tally.add("compactions")
        except OSError:
            self._tally.add("compactions_failed")
        finally:
            rewrite.abandon()
            shard.compacting = False


@contextlib.contextmanager
def _failing(path: str) -> Iterator[None]:
    """Turn errors of the system, met while working on `path`, into `BackendError`."""
    try:
        yield
    except OSError as error:
        raise failed(error, path) from error
