"""What the scheduler's side tells the workers in each step, and what they tell it; pickled by vLLM on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcache_core.namespace import Encoding

__all__ = ["Facts", "Load", "Report", "Save", "Step", "Timing"]

Blocks = tuple[tuple[int, ...], ...]
"""Ids of the engine's blocks by cache group, from the first page of a job on."""


@dataclass(frozen=True)
class Facts:
    """What only a worker knows: how the KV that it has allocated lies in memory."""

    encoding: Encoding
    block_layer_bytes: tuple[int, ...]
    """Of each group, bytes of one layer of one block on one rank."""


@dataclass(frozen=True)
class Load:
    """Bytes that a worker shall copy into blocks of a request."""

    request: str
    number: int
    """Of the lease, to join it."""
    first_page: int
    pages: int
    """End of what is to be there, in pages from the prompt's start."""
    skip_tokens: int
    """Tokens at the start of the first page whose blocks are filled already, and maybe used by others."""
    blocks: Blocks
    now: bool
    """Before this step's forward pass, which needs it; else in this step or later ones."""
    seconds: float
    """When it takes longer it is given up."""
    base: int = 0
    """The lease's first page."""


@dataclass(frozen=True)
class Save:
    """Pages that are complete when this step's forward pass is."""

    request: str
    """Empty for pages of requests that may have ended."""
    number: int
    """Of the store, to join it."""
    first_page: int
    blocks: Blocks


@dataclass
class Step:
    """Everything a worker needs to know in one step."""

    page_tokens: int
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    known: bool = True
    """The scheduler's side has the workers' facts."""
    computes: bool = False
    """The engine computes something in this step."""
    prefill_tokens: int = 0
    """Of prompts, that the step computes."""
    context_tokens: int = 0
    """Tokens in front of them, on average."""
    number: int = 0
    """Of the step, where the scheduler's side must hear that it has ended; else 0."""


@dataclass(frozen=True)
class Timing:
    """How a load went on a rank."""

    request: str
    first_page: int
    pages: tuple[tuple[str, int], ...]
    """By tier, what was copied from there."""
    page_bytes: int
    seconds: float
    """From its start to its end."""
    alone: bool
    """The engine computed nothing meanwhile."""
    missing: int
    """Pages that were promised and not there in the end."""


@dataclass
class Report:
    """What a worker has done since its last report; or several workers, added up."""

    facts: Facts | None = None
    refused: str = ""
    """Why the KV of this engine cannot be cached."""
    loaded: Counter[str] = field(default_factory=Counter)
    """By request, how many ranks have ended a load."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load has failed on a rank."""
    lost: set[int] = field(default_factory=set)
    """Blocks that a step should have had, of an engine with one cache group."""
    saved: Counter[int] = field(default_factory=Counter)
    """By store, how many ranks have ended it."""
    unsaved: set[int] = field(default_factory=set)
    """Stores of pages that turned out to be worthless."""
    timings: list[Timing] = field(default_factory=list)
    late: list[Timing] = field(default_factory=list)
    """Of loads that had ended for the engine before their copies had."""
    computed: list[tuple[int, int, float]] = field(default_factory=list)
    """Steps of prefill on the first rank: tokens, tokens in front of them, seconds."""
    gathered: list[tuple[int, float]] = field(default_factory=list)
    """Copies out of blocks on the first rank: pages, seconds."""
    ended: int = 0
    """The latest step that has ended, of those that have a number."""

    def __bool__(self) -> bool:
        told = (self.facts, self.refused, self.loaded, self.failed, self.saved, self.unsaved, self.late)
        return any(told) or any((self.computed, self.gathered, self.ended))

    def __add__(self, other: Report) -> Report:
        refused = self.refused or other.refused
        facts = self.facts or other.facts
        if self.facts and other.facts and self.facts != other.facts:
            refused = refused or "the KV of its ranks lies in different ways"
        return Report(
            facts,
            refused,
            self.loaded + other.loaded,
            self.failed | other.failed,
            self.lost | other.lost,
            self.saved + other.saved,
            self.unsaved | other.unsaved,
            self.timings + other.timings,
            self.late + other.late,
            self.computed + other.computed,
            self.gathered + other.gathered,
            max(self.ended, other.ended),
        )
