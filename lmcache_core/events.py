"""What a tier at work tells the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lmcache_core.index.decisions import Load, Write
from lmcache_core.protocols import ReadResult, Stored, WriteResult


class OpeningEvents(Protocol):
    """What is told by whoever opens a tier and reads from it, nothing else. Called on the event loop."""

    def measured(self, number: int, nbytes: int, seconds: float) -> None:
        """A call that read `nbytes` from a tier, hits only, took so long."""

    def opened(self, number: int) -> None:
        """A tier can be used from now on."""

    def lost(self, number: int) -> None:
        """A tier cannot be used for now."""

    async def reset(self, number: int) -> None:
        """A tier is about to be scanned: nothing is known of what it holds."""

    def scanned(self, number: int, batch: Sequence[Stored]) -> None:
        """A part of what a tier holds, least recently used first."""

    def described(self, manifests: Mapping[bytes, bytes]) -> None:
        """What a tier says of the spaces whose chunks it has been scanned for, by digest."""


class TierEvents(OpeningEvents, Protocol):
    """What a tier tells the node. Called on the event loop."""

    def loaded(self, load: Load, result: ReadResult | None, seconds: float) -> None:
        """A read has ended; None stands for a failure. `seconds` is its share of the call it was part of."""

    def patience(self, number: int, nbytes: int) -> float | None:
        """Seconds that reading so much from a tier hardly ever takes; None while that is not known."""

    def overdue(self, load: Load) -> bool:
        """A read takes longer than that: another tier may read the chunk too. Returns whether one does."""

    def dropped(self, load: Load) -> None:
        """A read was not carried out; that says nothing about the chunk."""

    def gave_up(self, load: Load) -> None:
        """The deadline of a read has passed; it goes on."""

    def wrote(self, write: Write, result: WriteResult | None, seconds: float) -> None:
        """A write has ended; None stands for a failure. `seconds` is its share of the call it was part of."""

    def late_write(self, write: Write) -> None:
        """The deadline of a write has passed; it goes on."""

    def counted(self, number: int, counts: Mapping[str, float]) -> None:
        """Something of a tier is to be counted, by names of `COUNTERS` whose label is a tier."""
