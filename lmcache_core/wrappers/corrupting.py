"""Values that come back wrong, as media and bugs make them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, NamedTuple, get_args

from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, StorageBackend, WriteResult
from lmcache_core.wrappers.base import A, Wrapper

__all__ = ["Corrupted", "Corrupting", "Kind"]

Kind = Literal["flip", "truncate", "stale", "swap"]
"""`flip`: one bit is another. `truncate`: a read that ended early; the rest of the buffer is as it was before.
`stale`: the value of another key of the same size, read or written here earlier. `swap`: two values of the same size in
one batch have changed places."""

_REMEMBERED = 16


class Corrupted(NamedTuple):
    """One value that was handed out wrong."""

    key: ChunkKey
    kind: Kind


class Corrupting(Wrapper):
    """Reports HIT like `inner`, with wrong bytes in the buffer. Which and how follows from the seed.

    Each value listed in `corrupted` really differs from what `inner` read. A kind that is not possible for a value
    (nothing to swap with) is passed over for another; a value that none is possible for is left alone.
    """

    def __init__(
        self,
        inner: StorageBackend,
        kinds: Collection[Kind] = get_args(Kind),
        *,
        probability: float = 1.0,
        seed: object = 0,
    ) -> None:
        super().__init__(inner)
        self.active = True
        """While False, values are left alone. May be changed at any time, as may the others."""
        self.kinds = kinds
        self.probability = probability
        self.corrupted: list[Corrupted] = []
        self._rng = random.Random(f"{seed!r}")
        self._seen: dict[ChunkKey, bytes] = {}

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        for chunk in chunks:
            self._remember(chunk.key, bytes(chunk.data))
        return await super().write(chunks)

    async def reading(
        self,
        verb: str,
        keys: Sequence[ChunkKey],
        into: Sequence[memoryview],
        call: Callable[[], Awaitable[list[A]]],
    ) -> list[A]:
        before = [bytes(buffer) for buffer in into]
        results = await super().reading(verb, keys, into, call)
        into = [
            buffer if isinstance(result, ReadResult) else buffer[:result]
            for buffer, result in zip(into, results, strict=True)
        ]
        hits = [i for i, result in enumerate(results) if result is ReadResult.HIT or isinstance(result, int)]
        values = {i: bytes(into[i]) for i in hits}
        for i in hits:
            if self.active and self._rng.random() < self.probability and into[i] == values[i]:
                self._corrupt(i, keys, into, before, values)
            self._remember(keys[i], values[i])
        return results

    def _corrupt(
        self,
        i: int,
        keys: Sequence[ChunkKey],
        into: Sequence[memoryview],
        before: Sequence[bytes],
        values: dict[int, bytes],
    ) -> None:
        """Damage value `i` in one of the ways that are possible."""
        for kind in self._rng.sample(sorted(self.kinds), len(self.kinds)):
            if kind == "swap":
                others = [j for j, value in values.items() if len(value) == len(values[i]) and value != values[i]]
                others = [j for j in others if into[j] == values[j]]
                if not others:
                    continue
                j = self._rng.choice(others)
                into[i][:], into[j][:] = values[j], values[i]
                self.corrupted.append(Corrupted(keys[j], kind))
            elif not self._replace(kind, keys[i], into[i], before[i]):
                continue
            self.corrupted.append(Corrupted(keys[i], kind))
            return

    def _replace(self, kind: Kind, key: ChunkKey, buffer: memoryview, before: bytes) -> bool:
        """Damage one value; False if that is not possible."""
        value = bytes(buffer)
        if kind == "flip":
            bit = self._rng.randrange(len(value) * 8)
            buffer[bit // 8] ^= 1 << bit % 8
        elif kind == "truncate":
            end = self._rng.randrange(len(value))
            buffer[end:] = before[end : len(value)]
        else:
            others = [v for k, v in self._seen.items() if k != key and len(v) == len(value)]
            if others:
                buffer[:] = self._rng.choice(others)
        return buffer != value

    def _remember(self, key: ChunkKey, value: bytes) -> None:
        self._seen.pop(key, None)
        self._seen[key] = value
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
