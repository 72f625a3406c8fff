"""Mistakes that are planted into the product, to see that the simulation finds them: such as somebody could make."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmcache_core import frame
from lmcache_core.breaker import Breaker
from lmcache_core.coding.coder import TierCoder
from lmcache_core.direct import DirectClient
from lmcache_core.handles import Holding
from lmcache_core.health import TierHealth
from lmcache_core.index import Index
from lmcache_core.index.decisions import Lease, Load, Write
from lmcache_core.index.loading import Loading
from lmcache_core.index.residency import Residency
from lmcache_core.probe import Prober
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.reports import Reports
from lmcache_core.tier import TierRunner

__all__ = ["PLANTS", "planted"]

Patch = tuple[Any, str, Callable[..., Any]]
"""A class or module, what is changed of it, and into what."""


def lost_release() -> list[Patch]:
    """A read that was not carried out keeps its slot."""

    def dropped(self: Loading, load: Load) -> None:
        load.entry.load = None
        self.policy.refund(load.entry)
        self.forget_if_gone(load.entry)

    return [(Loading, "dropped", dropped)]


def beaten_slot() -> list[Patch]:
    """The slot of a read that another has been faster than is used by others before it has ended."""
    part = Loading._part

    def release(self: Loading, load: Load, *, beaten: bool) -> Load | None:
        twin = part(self, load, beaten=beaten)
        if twin is not None:
            (twin if beaten else load).slot.release()
        return twin

    def keep(self: Loading, load: Load) -> None:
        assert load.beaten_of is not None
        load.beaten_of.shares[0].held -= load.entry.nbytes

    return [(Loading, "_part", release), (Loading, "_drop_beaten", keep)]


def lost_lease() -> list[Patch]:
    """A lease that ends by itself goes on keeping its chunks."""
    release = Index.release

    def forget(self: Index, lease: Lease) -> None:
        if lease.active and lease.expires <= self.clock():
            lease.used = len(lease.found.pieces)
        release(self, lease)

    return [(Index, "release", forget)]


def lost_handle() -> list[Patch]:
    """A lease that is let go of keeps its slots."""
    return [(Holding, "__del__", lambda self: None)]


def lost_shard() -> list[Patch]:
    """A client that has consumed a part keeps its slot."""

    def consume(self: DirectClient, held: Any, parts: int) -> None:
        holding: Holding = held.handle
        with self._guard.turn, self._guard.mutex:
            index = self._guard.use()
            for number in range(holding.done, holding.done + parts):
                holding.slots.pop(number, None)
            holding.done += parts
            index.consume(holding.lease, parts)

    return [(DirectClient, "consume", consume)]


def no_half_open() -> list[Patch]:
    """A breaker that has opened is never tried again."""
    return [(Breaker, "next_probe", lambda self: math.inf)]


def no_quarantine() -> list[Patch]:
    """At its deadline a read gives its slot back, though it goes on."""
    gave_up, loaded, dropped = Loading.gave_up, Loading.loaded, Loading.dropped

    def free(self: Loading, load: Load) -> bool:
        told = gave_up(self, load)
        if told:
            dropped(self, load)
        return told

    def ended(self: Loading, load: Load, result: ReadResult | None) -> bool:
        return True if load.late else loaded(self, load, result)

    def over(self: Loading, load: Load) -> None:
        if not load.late:
            dropped(self, load)

    return [(Loading, "gave_up", free), (Loading, "loaded", ended), (Loading, "dropped", over)]


def no_cap() -> list[Patch]:
    """However much is in quarantine, the tier is used on."""

    def quarantine(self: TierHealth, nbytes: int) -> None:
        self.quarantined += nbytes

    return [(TierHealth, "quarantine", quarantine)]


def no_deadline() -> list[Patch]:
    """Whoever waits for a read waits until it ends."""

    def gave_up(self: Reports, load: Load) -> None:
        with self._report() as index:
            if index is not None:
                index.gave_up(load)

    return [(Reports, "gave_up", gave_up)]


def failed_is_stored() -> list[Patch]:
    """A write that failed counts as one that worked."""
    wrote = Residency.wrote

    def praised(self: Residency, write: Write, result: WriteResult | None) -> bool:
        return wrote(self, write, result or WriteResult.STORED)

    return [(Residency, "wrote", praised)]


def no_undo() -> list[Patch]:
    """What is cleared while it is being written comes back when the write has ended."""
    wrote = Residency.wrote

    def kept(self: Residency, write: Write, result: WriteResult | None) -> bool:
        write.entry.doomed = 0
        return wrote(self, write, result)

    return [(Residency, "wrote", kept)]


def no_verify() -> list[Patch]:
    """What a tier gives is not checked."""

    async def check(self: TierCoder, load: Load, answer: object) -> ReadResult | None:
        return answer if isinstance(answer, ReadResult) else None

    return [(TierCoder, "check", check)]


def no_seal() -> list[Patch]:
    """Slots are written without their header."""
    return [(frame, "seal", lambda *_: None)]


def no_order() -> list[Patch]:
    """Changes of one key overtake each other."""

    async def wait(self: TierRunner, before: Any, batch: Any) -> None:
        pass

    return [(TierRunner, "_wait", wait)]


def endless_probe() -> list[Patch]:
    """Asking a tier never ends when it fails."""

    async def ask_tier(self: Prober, runner: TierRunner, spaces: Any, keys: Any, first_page: int) -> None:
        try:
            for space in spaces:
                await self._ask_space(runner, space, keys, first_page)
        except Exception:  # noqa: BLE001 as somebody might write it
            await asyncio.Event().wait()

    return [(Prober, "_ask_tier", ask_tier)]


def no_reset() -> list[Patch]:
    """What a tier held before it was down is believed when it comes back."""

    async def reset(self: Reports, number: int) -> None:
        pass

    return [(Reports, "reset", reset)]


PLANTS: dict[str, Callable[[], list[Patch]]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        lost_release,
        beaten_slot,
        lost_lease,
        lost_handle,
        lost_shard,
        no_half_open,
        no_quarantine,
        no_cap,
        no_deadline,
        failed_is_stored,
        no_undo,
        no_verify,
        no_seal,
        no_order,
        endless_probe,
        no_reset,
    )
}
"""By name."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The product with a mistake of `PLANTS`, or as it is without a name."""
    patches = PLANTS[name]() if name else []
    before = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, wrong in patches:
        setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        for owner, attribute, right in before:
            setattr(owner, attribute, right)
