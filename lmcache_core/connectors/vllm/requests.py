"""Requests of the engine as the scheduler's side follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_core.client import Client, Held
from lmcache_core.keys import PageHasher, make_seed, page_extras

__all__ = ["EngineRequest", "Marks", "Tracked"]


class EngineRequest(Protocol):
    """What is asked of vLLM's `Request`."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Marks:
    """What besides its tokens tells the KV of a request from that of others."""

    salt: tuple[str, ...] = ()
    """The node's, then the request's."""
    adapter: str | None = None
    """LoRA: name and content."""
    spans: tuple[tuple[int, int, str], ...] = ()
    """Images, audio: first token, number of tokens, content hash."""

    def hasher(self, page_tokens: int) -> PageHasher:
        """Begin the keys of a request."""
        salt, *more = self.salt or ("",)
        extra = {f"salt {number}": each for number, each in enumerate(more) if each}
        return PageHasher(page_tokens, make_seed(salt=salt or None, adapter=self.adapter, extra=extra))


@dataclass(eq=False)
class Tracked:
    """One request.

    Raises:
        LayoutError: Its tokens or marks cannot be hashed.
    """

    request: EngineRequest
    marks: Marks
    page_tokens: int
    load: bool = True
    """Whether it may be loaded at all."""
    save: bool = True
    most_tokens: int | None = None
    """Tokens to load at most."""
    places: Sequence[str] | None = None
    """Tiers to load from and to store to."""
    hasher: PageHasher = field(init=False)
    held: Held | None = None
    base: int = 0
    """Pages in front of what is held, which the engine had itself."""
    held_at: float = 0.0
    missed_at: float | None = None
    """When it was last found that nothing can be had."""
    missed_base: int = 0
    """From which page on."""
    asked: Future[Any] | None = None
    asked_until: float = 0.0
    counted: bool = False
    """The node has counted its lookup."""
    hit: int = 0
    """Tokens that the engine had itself when it last asked."""
    local: int = 0
    """The same, when it was last told of more."""
    loaded: int = 0
    """Tokens that it begins with by a load of ours; 0 where there was none since it got its blocks."""
    weighed: bool = False
    """It has been decided how much of what is held is loaded."""
    patience: float = 0.0
    """Seconds that the load may take."""
    declined: bool = False
    """What would not pay was left out, and has been counted."""
    slow: Mapping[str, int] = field(default_factory=dict)
    """Pages of what is held that are not in host memory, by tier."""
    loading: bool = False
    now: bool = False
    """What was promised is to be loaded within the step."""
    saved: int = 0
    """Pages that are stored, or being stored."""
    gone: bool = False
    """The engine is done with it."""

    def __post_init__(self) -> None:
        self.hasher = self.marks.hasher(self.page_tokens)
        self.hash()

    def let_go(self, client: Client) -> None:
        """End its lease."""
        held, self.held = self.held, None
        if held is not None:
            client.release(held)

    @property
    def held_end(self) -> int:
        """End of what is held, in pages from the prompt's start; 0 if nothing is."""
        return 0 if self.held is None else self.base + self.held.pages

    @property
    def keys(self) -> list[bytes]:
        """Of the whole pages that are known."""
        return self.hasher.keys

    def hash(self) -> int:
        """Hash tokens that are new. Returns how many are known."""
        known = self.hasher.tokens
        total = self.request.num_tokens
        if total > known:
            extras = page_extras(self.marks.spans, self.page_tokens) if self.marks.spans and not known else None
            self.hasher.extend(list(self.request.all_token_ids[known:]), extras)
        return total
