"""What is said between the processes of the demonstration, and what comes of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["BUSY", "FOLLOW_UP", "WORDS", "Answer", "DemoResult", "Life", "Measured", "Spec"]

FOLLOW_UP = "follow-up"
"""Name of the second turn; the others are called by their question."""

WORDS = {
    "cold": "without cache",
    "filling": "first time with cache",
    "memory": "same prompt, memory",
    "question": "other question, memory",
    "turn": "next turn, memory",
    "shared": "same prompt, 2nd process",
    "shared question": "other question, 2nd proc.",
    "disk": "same prompt, disk",
    "disk question": "other question, disk",
    "disk turn": "next turn, disk",
}
"""Kinds of measurement that are shown."""

BUSY = 0.5
"""A spread above which something else is using the machine."""


class Spec(msgspec.Struct, frozen=True):
    """What a worker shall do."""

    folder: str
    life: int
    tokens: int
    repeats: int
    document_tokens: int | None = None
    tier: dict[str, Any] = {}
    """Settings of the tier below memory."""
    socket: str = ""
    """Of a node that all lives share; empty where each has its own."""


class Answer(msgspec.Struct, frozen=True):
    """What the model says without a cache."""

    prompt: list[int]
    tokens: list[int]
    text: str


class Measured(msgspec.Struct):
    """One prompt, computed in one way, once or more often."""

    kind: str
    """One of `WORDS`, or `cold other`: what other questions' answers are compared with."""
    name: str
    """The question."""
    prompt_tokens: int
    cached_tokens: int
    tiers: dict[str, int]
    ttft_s: list[float]
    """Seconds to the first new token, each time."""
    tokens_equal: bool
    """Whether all tokens were those of the model alone."""
    max_logit_diff: float
    """Of the first new token's logits, to those of the model alone."""
    retrieve_s: float = 0.0
    """Seconds of the first time that went to hashing, lookup and loading."""
    store_s: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, run through the model."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def median_s(self) -> float:
        """Of the times to the first token."""
        return statistics.median(self.ttft_s)

    @property
    def range_s(self) -> float:
        """From the shortest to the longest of the times to the first token."""
        return max(self.ttft_s) - min(self.ttft_s)

    @property
    def spread(self) -> float:
        """The range as a part of the median."""
        return self.range_s / self.median_s


class Life(msgspec.Struct):
    """What a worker tells at its end."""

    measured: list[Measured]
    answers: dict[str, Answer]
    threads: int
    flushed: bool
    failures: dict[str, int]
    disk_bytes: int
    past_page_cache: bool


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found."""

    measured: tuple[Measured, ...]
    answers: dict[str, Answer]
    threads: int
    disk_bytes: int
    past_page_cache: bool
    tier: str = "disk"
    """Name of the tier below memory."""
    files: tuple[Path, ...] = field(default=())
    """What was written and is still there."""

    def words(self, kind: str) -> str:
        """A kind of measurement, for people."""
        return WORDS[kind].replace("disk", self.tier)

    def of(self, kind: str) -> list[Measured]:
        """All measurements of a kind, in order."""
        return [each for each in self.measured if each.kind == kind]

    @property
    def tokens_equal(self) -> bool:
        """Whether caching changed no token anywhere."""
        return all(each.tokens_equal for each in self.measured)

    @property
    def max_logit_diff(self) -> float:
        """The largest there was."""
        return max(each.max_logit_diff for each in self.measured)

    @property
    def busiest(self) -> Measured | None:
        """What was shown and spread most, if that is more than a quiet machine gives."""
        most = max((each for each in self.measured if each.kind in WORDS), key=lambda each: each.spread)
        return most if most.spread > BUSY else None

    @property
    def filling_is_noise(self) -> bool:
        """Whether the first time with cache, a single sample, is no further from the time without cache than samples
        of that are from each other."""
        (cold, *_), (filling, *_) = self.of("cold"), self.of("filling")
        return abs(filling.median_s - cold.median_s) <= cold.range_s

    def __int__(self) -> int:
        """The exit code of the command: 0 if all went well."""
        return 0 if self.tokens_equal else 1

    def figures(self) -> dict[str, Any]:
        """Everything measured, for programs. Times are medians in seconds."""
        cold, memory, disk = (self.of(kind)[0] for kind in ("cold", "memory", "disk"))
        question, turn, filling = (self.of(kind)[0] for kind in ("question", "turn", "filling"))
        shared = self.of("shared")
        tier = self.tier
        return {
            "tier": tier,
            "prompt_tokens": cold.prompt_tokens,
            "cold_ttft_s": cold.median_s,
            "memory_ttft_s": memory.median_s,
            f"{tier}_ttft_s": disk.median_s,
            **({"shared_ttft_s": shared[0].median_s} if shared else {}),
            "question_ttft_s": question.median_s,
            "turn_ttft_s": turn.median_s,
            "filling_ttft_s": filling.median_s,
            "memory_speedup": cold.median_s / memory.median_s,
            f"{tier}_speedup": cold.median_s / disk.median_s,
            "question_speedup": cold.median_s / question.median_s,
            "cold_spread": cold.spread,
            "memory_spread": memory.spread,
            f"{tier}_spread": disk.spread,
            "busy": self.busiest is not None,
            "filling_is_noise": self.filling_is_noise,
            "filling_retrieve_s": filling.retrieve_s,
            "filling_store_s": filling.store_s,
            "tokens_equal": self.tokens_equal,
            "max_logit_diff": self.max_logit_diff,
            "memory_computed_tokens": memory.computed_tokens,
            f"{tier}_computed_tokens": disk.computed_tokens,
            "question_uncached_tokens": question.computed_tokens,
            "turn_uncached_tokens": turn.computed_tokens,
            "new_tokens": len(self.answers[cold.name].tokens),
            "threads": self.threads,
            f"{tier}_bytes": self.disk_bytes,
            **({"disk_past_page_cache": self.past_page_cache} if tier == "disk" else {}),
            "measurements": [
                {**msgspec.structs.asdict(each), "computed_tokens": each.computed_tokens} for each in self.measured
            ],
        }
