"""A plan: for a model, an engine and some links, what loading prefixes takes beside computing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lmcache_core.planning.forms import Engine, Link, Shape, crossover

__all__ = ["NamedLink", "Plan", "Row"]


class NamedLink(NamedTuple):
    """A link as it is shown."""

    name: str
    link: Link
    concurrency: int | None = None
    """How many chunks were under way at once where it was measured."""


class Row(NamedTuple):
    """A prefix of one length."""

    tokens: int
    compute_s: float
    load_s: tuple[float, ...]
    """Over each link."""


@dataclass(frozen=True)
class Plan:
    """All that it follows from; the rest is worked out."""

    shape: Shape
    engine: Engine
    links: Sequence[NamedLink]
    chunk_tokens: int
    lengths: Sequence[int]

    @property
    def chunk_bytes(self) -> float:
        """Of a chunk at the start of a prompt."""
        return self.shape.kv_bytes(self.chunk_tokens)

    def crossovers(self) -> list[float | None]:
        """L* of each link."""
        return [crossover(self.shape, self.engine, each.link, self.chunk_tokens) for each in self.links]

    def row(self, tokens: int) -> Row:
        """A prefix of any length."""
        loads = (each.link.load_seconds(self.shape, tokens, self.chunk_tokens) for each in self.links)
        return Row(tokens, self.engine.seconds(self.shape, tokens), tuple(loads))

    def rows(self) -> list[Row]:
        """A row for each length."""
        return [self.row(tokens) for tokens in self.lengths]

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs: bytes, seconds, tokens, FLOP."""
        return {
            "model": {
                "kv_bytes_per_token": self.shape.kv_bytes_per_token,
                "parameters": self.shape.parameters,
                "layers": [asdict(each) for each in self.shape.layers],
            },
            "chunk": {"tokens": self.chunk_tokens, "bytes": self.chunk_bytes},
            "engine": {"peak": self.engine.peak, "mfu": self.engine.mfu},
            "links": [
                {
                    "name": each.name,
                    "bandwidth": each.link.bandwidth,
                    "latency": each.link.latency,
                    "concurrency": each.concurrency,
                    "chunk_share": each.link.share(self.chunk_bytes),
                    "n90": each.link.size_for(0.9),
                    "n95": each.link.size_for(0.95),
                    "crossover": found,
                }
                for each, found in zip(self.links, self.crossovers(), strict=True)
            ],
            "lengths": [
                {
                    "tokens": row.tokens,
                    "compute_s": row.compute_s,
                    "load_s": {each.name: seconds for each, seconds in zip(self.links, row.load_s, strict=True)},
                }
                for row in self.rows()
            ],
        }
