"""What `lmcache-core clear` deletes from tiers that other hosts use too: by their listing, whoever has stored it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lmcache_core.cli.alone import Alone
from lmcache_core.cli.disk_cache import Space, namespace_of
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import ChunkKey, Describes, Lists

__all__ = ["LIMIT", "Survey", "clear_listed", "survey"]

LIMIT = 30.0
"""Seconds that one operation may take."""
_BATCH = 256


@dataclass
class Survey:
    """What lies on a shared tier."""

    sizes: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Chunks and bytes, by the digest of their space."""
    manifests: dict[bytes, bytes] = field(default_factory=dict)

    def spaces(self) -> list[Space]:
        """The same by namespace."""
        found: dict[bytes, Space] = {}
        for digest, manifest in self.manifests.items():
            if (namespace := namespace_of(digest, manifest)) is not None:
                digests = [namespace.space(number) for number in range(len(namespace.groups))]
                if digests[0] not in found:
                    found |= dict.fromkeys(digests, Space(namespace, digests))
        for digest, (chunks, nbytes) in self.sizes.items():
            space = found.setdefault(digest, Space(None, [digest]))
            space.chunks += chunks
            space.nbytes += nbytes
        return [each for each in {id(each): each for each in found.values()}.values() if each.chunks]


def survey(tier: TierConfig) -> Survey | None:
    """What a tier holds. None if its backend does not list that.

    Raises:
        BackendError: It cannot be reached.
        ConfigError: It never can.
    """
    return asyncio.run(_survey(tier))


async def _survey(tier: TierConfig) -> Survey | None:
    alone = Alone(tier, LIMIT)
    if not isinstance(alone.backend, Lists):
        return None
    found = Survey()
    await alone.open()
    try:
        async for batch in alone.listing():
            for key, nbytes in batch:
                chunks, held = found.sizes.get(key.space, (0, 0))
                found.sizes[key.space] = (chunks + 1, held + nbytes)
        if isinstance(alone.backend, Describes):
            with suppress(BackendError):  # then spaces have no names
                found.manifests = await alone.bounded("listing models", alone.backend.manifests())
    finally:
        await alone.close()
    return found


def clear_listed(tier: TierConfig, spaces: Collection[bytes] | None) -> tuple[int, int] | None:
    """Delete all that a tier lists, or what it lists of these spaces. Returns how many chunks and bytes, None if its
    backend does not list.

    Raises:
        BackendError: It cannot be reached, or fails meanwhile.
        ConfigError: It never can be reached.
    """
    return asyncio.run(_clear_listed(tier, spaces))


async def _clear_listed(tier: TierConfig, spaces: Collection[bytes] | None) -> tuple[int, int] | None:
    alone = Alone(tier, LIMIT)
    if not isinstance(alone.backend, Lists):
        return None
    chunks = nbytes = 0
    waiting: list[ChunkKey] = []
    await alone.open()
    try:
        async for batch in alone.listing():
            for key, size in batch:
                if spaces is None or key.space in spaces:
                    waiting.append(key)
                    chunks, nbytes = chunks + 1, nbytes + size
            while len(waiting) >= _BATCH:
                await _delete(alone, waiting[:_BATCH])
                del waiting[:_BATCH]
        await _delete(alone, waiting)
    except (BackendError, ConfigError) as error:
        raise type(error)(f"{error}; {chunks - len(waiting)} chunks had been deleted") from None
    finally:
        await alone.settled(LIMIT)
        await alone.close()
    return chunks, nbytes


async def _delete(alone: Alone, keys: Sequence[ChunkKey]) -> None:
    if keys:
        await alone.delete(keys)
