"""Which blocks have come to a medium and which have left it, in the engine's own terms, for routers that follow them.

The node tells of chunks by the keys of their pages. What an engine's blocks in a page are called is known of the
requests that this engine has had; pages of others are told of once a request of this engine shares them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_core.client import Model
from lmcache_core.connectors.vllm.requests import EngineRequest, Tracked
from lmcache_core.direct import DirectClient
from lmcache_core.index import Change
from lmcache_core.namespace import GroupKind

__all__ = ["MOST_PAGES", "BlockEvent", "EventBook", "Follower", "Names", "Page"]

MOST_PAGES = 50_000
"""Pages whose blocks are remembered, unless more is asked for; of those that were used least lately nothing is told any
more."""


class Page(NamedTuple):
    """What the engine calls a page of a request."""

    block_hashes: tuple[Any, ...]
    parent: Any
    """Hash of the block in front of it; None at the start."""
    tokens: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None


class BlockEvent(NamedTuple):
    """Blocks have come to a place, or have left it."""

    page: Page
    place: str
    stored: bool


class EventBook:
    """Follows one cache group.

    Args:
        names: Of the places.
        most: Pages whose blocks are remembered.
    """

    def __init__(self, names: Mapping[int, str], most: int = MOST_PAGES) -> None:
        self._names = names
        self._most = most
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._there: dict[bytes, Counter[int]] = {}
        """Of each page, how many chunks at a place hold it."""
        self._told: set[tuple[bytes, int]] = set()
        self._events: list[BlockEvent] = []

    def learn(self, keys: Sequence[bytes], pages: Iterable[Page]) -> None:
        """These pages are called so."""
        for key, page in zip(keys, pages, strict=True):
            if key in self._pages:
                self._pages.move_to_end(key)
                continue
            self._pages[key] = page
            for place, chunks in self._there.get(key, {}).items():
                if chunks:
                    self._tell(key, place, stored=True)
        while len(self._pages) > self._most:
            key, _ = self._pages.popitem(last=False)
            self._told -= {(key, place) for place in self._names}

    def knows(self, key: bytes) -> bool:
        """Whether it is known what a page is called."""
        return key in self._pages

    def apply(self, changes: Iterable[Change]) -> None:
        """The node has told of changes."""
        for change in changes:
            for key in change.pages:
                there = self._there.setdefault(key, Counter())
                there[change.place] += 1 if change.there else -1
                if there[change.place] > 0:
                    self._tell(key, change.place, stored=True)
                else:
                    del there[change.place]
                    self._tell(key, change.place, stored=False)
                    if not there:
                        del self._there[key]

    def _tell(self, key: bytes, place: int, *, stored: bool) -> None:
        page = self._pages.get(key)
        if page is None or stored == ((key, place) in self._told):
            return
        (self._told.add if stored else self._told.discard)((key, place))
        self._events.append(BlockEvent(page, self._names[place], stored))

    def take(self) -> list[BlockEvent]:
        """Events since this was last asked, the oldest first."""
        events, self._events = self._events, []
        return events


Names = Callable[[EngineRequest, int, int], Iterable[Page]]
"""What the engine calls the pages `[first, end)` of a request."""


class Follower:
    """Tells of the blocks of a model: of one cache group, that which keeps all of a prompt if there is one. Remembers
    `most` pages."""

    def __init__(self, client: DirectClient, model: Model, names: Names, most: int = MOST_PAGES) -> None:
        kinds = [group.kind for group in model.namespace.groups]
        self._group = kinds.index(GroupKind.FULL) if GroupKind.FULL in kinds else 0
        self._client = client
        self._model = model
        self._names = names
        self._watch = client.watch(model, self._group)
        self._book = EventBook(client.place_names, most)

    def learn(self, tracked: Tracked, pages: int) -> None:
        """Remember what the engine calls the first pages of a request."""
        first = pages
        while first > 0 and not self._book.knows(tracked.keys[first - 1]):
            first -= 1
        if first < pages:
            self._book.learn(tracked.keys[first:pages], self._names(tracked.request, first, pages))

    def events(self) -> list[BlockEvent]:
        """What has come to a place or left it since this was last asked."""
        self._book.apply(self._watch.take())
        return self._book.take()

    def close(self) -> None:
        """Follow no more."""
        self._client.unwatch(self._model, self._watch, self._group)
