"""Coding at work for one tier: what is written to its backend, and what comes from it. Runs on the event loop; the
work itself is done on the framer's threads."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lmcache_core.coding.frames import Encoded, Subject, Unreadable, decode, encode
from lmcache_core.coding.recipe import Recipe
from lmcache_core.coding.staging import Stage, Staging
from lmcache_core.coding.worth import LEAST_SAVING, Worth
from lmcache_core.errors import FrameError
from lmcache_core.frame import Codec
from lmcache_core.framing import Framer
from lmcache_core.protocols import ChunkKey, ReadResult, ReadsShorter, Scannable, StorageBackend
from lmcache_core.ratelog import RateLog

if TYPE_CHECKING:
    from lmcache_core.hostpool import Slot
    from lmcache_core.index import Entry
    from lmcache_core.index.decisions import Load, Write

__all__ = ["STAGED", "TierCoder"]

P = ParamSpec("P")
R = TypeVar("R")

STAGED = 64 << 20
"""Bytes of encoded chunks that one tier may have under way, or one chunk that is larger."""

OTHERS = 60.0
"""Seconds for which nobody is promised what turned out to be another chunk."""
MOST_OTHERS = 4096

Counted = Callable[[Mapping[str, float]], None]

_WHY = {
    Unreadable.UNKNOWN_KEY: "it is encrypted with a key that this tier's cipher doesn't have",
    Unreadable.NOT_ENCRYPTED: "it is not encrypted, and this tier's cipher wants all to be",
    Unreadable.UNKNOWN_CODEC: "it is compressed with a codec that is not installed here",
    Unreadable.OTHER_PAGES: "it holds other pages than its name says here; give all nodes that share this tier one "
    "chunk_tokens",
}


class TierCoder:
    """Of one tier.

    Args:
        name: The tier's name, for log lines.
        recipe: How its chunks are coded.
        framer: Whose threads do the work.
        counted: Called with what was counted, by the names of counters.
        log: For chunks that cannot be read.
    """

    def __init__(self, name: str, recipe: Recipe, framer: Framer, counted: Counted, log: RateLog) -> None:
        self.staging = Staging(STAGED)
        self._others: OrderedDict[ChunkKey, float] = OrderedDict()
        """When chunks of others were found under names of ours."""
        self._name = name
        self._recipe = recipe
        self._framer = framer
        self._counted = counted
        self._log = log
        self._worth = Worth()

    # Writing

    @asynccontextmanager
    async def values(self, writes: Sequence[Write]) -> AsyncIterator[list[memoryview]]:
        """What to store for each of `writes`. The backend may use it until the context ends."""
        codecs = [self._codec(write.entry) for write in writes]
        staged = [write for write, codec in zip(writes, codecs, strict=True) if codec or self._recipe.keys is not None]
        stages = await self.staging.take([write.slot.form.nbytes for write in staged]) if staged else []
        try:
            places = dict(zip(staged, stages, strict=True))
            yield [
                (await self._value(write, codec, places.get(write))).toreadonly()
                for write, codec in zip(writes, codecs, strict=True)
            ]
        finally:
            self.staging.give_back(stages)

    def _codec(self, entry: Entry) -> Codec:
        codec = self._recipe.codec
        if codec and not self._worth.tries(entry.space.digest):
            self._counted({"incompressible_chunks": 1})
            return Codec.NONE
        return codec

    async def _value(self, write: Write, codec: Codec, stage: Stage | None) -> memoryview:
        entry, slot = write.entry, write.slot
        if stage is not None:
            tenant = entry.owner.name if entry.owner.kind == "tenant" else slot.tenant
            key = self._recipe.keys.writing(tenant) if self._recipe.keys is not None else None
            encoded, seconds = await self._framer.run(
                _timed, encode, slot.frame, stage.memory, _subject(entry, slot), codec, key
            )
            self._count(entry, encoded, codec, seconds)
            if encoded.nbytes:
                return stage.memory[: encoded.nbytes]
        await self._framer.seal(slot, entry)
        return slot.frame

    def _count(self, entry: Entry, encoded: Encoded, codec: Codec, seconds: float) -> None:
        counts = {
            "coding_plain_bytes": entry.nbytes,
            "coding_stored_bytes": encoded.nbytes or entry.nbytes,
            "encode_seconds": seconds,
        }
        if encoded.saving is not None:
            self._worth.learn(entry.space.digest, encoded.saving)
            if encoded.saving < LEAST_SAVING:
                counts["incompressible_chunks"] = 1
        self._counted(counts)

    # Reading

    async def read(
        self, backend: StorageBackend, keys: Sequence[ChunkKey], into: Sequence[memoryview]
    ) -> Sequence[int | ReadResult | Unreadable]:
        """Have the tier's backend read, whatever the sizes of values are, where it can. An answer that is a number is
        the length of a value at the start of a buffer.

        Raises:
            BackendError: The medium failed.
        """
        if not isinstance(backend, ReadsShorter):
            return await backend.read(keys, into)
        if self._recipe.codec:
            return self._without_others(backend, keys, await backend.read_any(keys, into))
        answers: list[int | ReadResult] = [*await backend.read(keys, into)]
        # Others may compress what they store here.
        again = [number for number, answer in enumerate(answers) if answer is ReadResult.CORRUPT]
        if again and len(answers) == len(keys):
            found = await backend.read_any([keys[number] for number in again], [into[number] for number in again])
            for number, answer in zip(again, found, strict=True):
                answers[number] = answer
        return self._without_others(backend, keys, answers)

    def _without_others(
        self, backend: StorageBackend, keys: Sequence[ChunkKey], answers: Sequence[int | ReadResult]
    ) -> Sequence[int | ReadResult | Unreadable]:
        """What others store under such a name, and is longer than it could be here, is no damage."""
        if isinstance(backend, Scannable) or len(answers) != len(keys):
            return answers
        return [Unreadable.OTHER_PAGES if answer is ReadResult.CORRUPT else answer for answer in answers]

    def is_anothers(self, key: ChunkKey) -> bool:
        """Whether what is there under a name was of no use just now."""
        since = self._others.get(key)
        return since is not None and asyncio.get_running_loop().time() - since < OTHERS

    async def check(self, load: Load, answer: object) -> ReadResult | None:
        """What an answer of `read` comes to, when what was read has been decoded where it lies: HIT if it is a plain
        and sealed frame now."""
        entry, slot = load.entry, load.slot
        if answer is ReadResult.HIT:
            answer = slot.frame.nbytes
        if isinstance(answer, Unreadable):
            return self._left(entry.chunk_key, answer)
        if isinstance(answer, bool) or not isinstance(answer, int):
            return answer if isinstance(answer, ReadResult) else None
        if not 0 < answer <= slot.frame.nbytes:
            return ReadResult.CORRUPT
        try:
            read, seconds = await self._framer.run(
                _timed, decode, slot.frame, answer, _subject(entry, slot), self._recipe.keys
            )
        except FrameError as damage:
            self._log.warning("corrupt", "tier %s: chunk is a miss: %s", self._name, damage)
            return ReadResult.CORRUPT
        if isinstance(read, Unreadable):
            return self._left(entry.chunk_key, read)
        slot.tenant = read
        if not self._recipe.plain:
            self._counted({"decode_seconds": seconds})
        return ReadResult.HIT

    def _left(self, key: ChunkKey, why: Unreadable) -> ReadResult:
        self._counted({why.value: 1})
        self._log.warning(why.value, "tier %s: chunk is a miss and is left where it is: %s", self._name, _WHY[why])
        if why is Unreadable.OTHER_PAGES:
            self._others[key] = asyncio.get_running_loop().time()
            self._others.move_to_end(key)
            if len(self._others) > MOST_OTHERS:
                self._others.popitem(last=False)
        return ReadResult.MISS


def _subject(entry: Entry, slot: Slot) -> Subject:
    return Subject(slot.form, entry.space.digest, entry.parent, entry.pages)


def _timed(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, float]:
    started = time.perf_counter()
    return call(*args, **kwargs), time.perf_counter() - started
