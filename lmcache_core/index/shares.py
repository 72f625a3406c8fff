"""Whose the room of a place is: for each owner an order of eviction, the bytes it holds, and its quota.

An owner is a tenant, or the model of the chunks that no tenant has stored. When room is wanted, chunks of the owner go
that holds most for its weight, counting what is wanted to the one that asks; and nobody takes from an owner that holds
less than itself. So each of those that want more gets an equal part of what the others leave (max-min fairness), to
within a chunk, and idle room is anybody's. An owner that has used nothing for long has no part: its chunks go first.

With one owner all this is its order of eviction and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmcache_core.index.policy import Policy, PolicyName, make_policy

if TYPE_CHECKING:
    from lmcache_core.index.entries import Entry

OwnerKind = Literal["tenant", "model", "unclaimed"]

MOST_SKIPPED = 256
"""Candidates of one owner that may be passed over in one search for room: a search must end soon even if everything is
held."""


@dataclass(frozen=True, slots=True)
class ShareRules:
    """What one owner is due.

    Args:
        kind, name: The owner.
        weight: Its part, beside the parts of others.
        quotas: Most bytes it may hold, by the name of the place.
    """

    kind: OwnerKind
    name: str
    weight: float = 1.0
    quotas: Mapping[str, int] = field(default_factory=dict)


class Owner:
    """Who chunks count for. Compared and hashed by identity."""

    __slots__ = ("idle", "kind", "name", "shares", "since", "used", "weight")

    def __init__(self, kind: OwnerKind = "unclaimed", name: str = "", weight: float = 1.0) -> None:
        self.kind = kind
        self.name = name
        self.weight = weight
        self.shares: list[Share] = []
        """The host pool's, then each tier's."""
        self.used = True
        """Something of it has been stored or looked up since the last tick."""
        self.since = 0.0
        """The last tick at which it was used."""
        self.idle = False
        """At the last tick that was long ago."""

    @property
    def empty(self) -> bool:
        """Whether it holds nothing anywhere."""
        return not any(share.held for share in self.shares)


class Share:
    """What one owner has of one place."""

    __slots__ = ("aside", "held", "order", "owner", "quota")

    def __init__(self, owner: Owner, order: Policy, quota: int | None) -> None:
        self.owner = owner
        self.order = order
        """Those of its chunks that may leave."""
        self.held = 0
        """Bytes of its chunks: those that are read or written just now, and in the pool pinned and staged ones, too."""
        self.aside = 0
        """Bytes of these that have been chosen to leave, while more are looked for."""
        self.quota = quota

    def level(self, more: int = 0) -> float:
        """What it holds, and `more`, for its weight; of an owner that is idle it is beyond all measure."""
        owner = self.owner
        return math.inf if owner.idle and not owner.used else (self.held - self.aside + more) / owner.weight

    def over(self, more: int) -> int:
        """Bytes that must go before `more` are within its quota; 0 or less when they are."""
        return 0 if self.quota is None else self.held + more - self.quota


class Shares:
    """The owners of one place. A `Policy` of all their chunks, and the account of what each holds.

    Args:
        place: Number of the place: which of an owner's `shares` is that of here.
        policy: Order of eviction of each owner's chunks.
    """

    def __init__(self, place: int, policy: PolicyName) -> None:
        self.place = place
        self.shares: list[Share] = []
        self._policy = policy

    def add_owner(self, owner: Owner, quota: int | None = None) -> None:
        """Take in an owner, which has been taken in by all places before this one."""
        assert len(owner.shares) == self.place
        share = Share(owner, make_policy(self._policy), quota)
        owner.shares.append(share)
        self.shares.append(share)

    def remove_owner(self, owner: Owner) -> None:
        """Forget an owner that holds nothing."""
        self.shares.remove(owner.shares[self.place])

    def charge(self, entry: Entry) -> None:
        """Count a chunk as held."""
        entry.owner.shares[self.place].held += entry.nbytes

    def refund(self, entry: Entry) -> None:
        """Undo `charge`."""
        entry.owner.shares[self.place].held -= entry.nbytes

    def move(self, entry: Entry, owner: Owner) -> None:
        """Count a chunk that is held here for another owner, which the caller makes its owner afterwards."""
        old, new = entry.owner.shares[self.place], owner.shares[self.place]
        old.held -= entry.nbytes
        new.held += entry.nbytes
        before = len(old.order)
        old.order.discard(entry)
        if len(old.order) < before:
            new.order.add(entry)

    # As in `Policy`

    def add(self, entry: Entry) -> None:
        """See `Policy`."""
        entry.owner.shares[self.place].order.add(entry)

    def touch(self, entry: Entry) -> None:
        """See `Policy`."""
        entry.owner.shares[self.place].order.touch(entry)

    def discard(self, entry: Entry) -> None:
        """See `Policy`."""
        entry.owner.shares[self.place].order.discard(entry)

    def defer(self, entry: Entry) -> None:
        """See `Policy`."""
        entry.owner.shares[self.place].order.defer(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """See `Policy`."""
        for share in dict.fromkeys(entry.owner.shares[self.place] for entry in entries):
            share.order.put_back([entry for entry in entries if entry.owner is share.owner])

    def __len__(self) -> int:
        return sum(len(share.order) for share in self.shares)

    def __iter__(self) -> Iterator[Entry]:
        for share in self.shares:
            yield from share.order

    def candidates(self, asking: Owner | None = None, more: int = 0) -> Iterator[Entry]:
        """See `Policy`. Those that should go when `asking` wants `more` bytes; None asks for nobody."""
        shares = self.shares
        if len(shares) > 1:
            shares = [share for share in shares if share.held]
        if len(shares) == 1 and (asking is None or asking is shares[0].owner):
            return shares[0].order.candidates()
        return self._by_share(shares, None if asking is None else asking.shares[self.place], more)

    def _by_share(self, left: list[Share], mine: Share | None, more: int) -> Iterator[Entry]:
        searches: dict[Share, _Search] = {}
        while left:
            share = _first(left, mine, more)
            if mine is not None and share is not mine and share.level() < mine.level(more):
                return
            search = searches.get(share)
            if search is None:
                search = searches[share] = _Search(share.order)
            entry = search.next()
            if entry is None:
                left.remove(share)
            else:
                yield entry


def _first(shares: Iterable[Share], mine: Share | None, more: int) -> Share:
    """The one that holds most for its weight, `mine` with `more`; of equal ones mine, else that used longest ago. A
    plain loop, since each chunk that is evicted costs one."""
    first, most = None, -1.0
    for share in shares:
        owner = share.owner
        if share is mine:
            level = share.level(more)
        elif owner.idle:
            level = share.level()
        else:
            level = (share.held - share.aside) / owner.weight
        if level > most or (
            level == most and (share is mine or (first is not mine and first and owner.since < first.owner.since))
        ):
            first, most = share, level
    assert first is not None
    return first


class _Search:
    """A search for room among the chunks of one owner."""

    __slots__ = ("_candidates", "_chunks", "_offered", "_order")

    def __init__(self, order: Policy) -> None:
        self._order = order
        self._candidates = order.candidates()
        self._chunks = len(order)
        self._offered = 0

    def next(self) -> Entry | None:
        """The next candidate, unless too many have been passed over."""
        if self._offered - (self._chunks - len(self._order)) > MOST_SKIPPED:
            return None
        entry = next(self._candidates, None)
        self._offered += entry is not None and not entry.pins
        return entry
