"""Closed forms: what a transfer takes, what a prefill takes, and from which length on loading is the faster one.

Bytes, seconds, tokens and FLOP (a multiplication and an addition are two). MFU is the part of a processor's peak that a
model reaches (Chowdhery et al., PaLM, 2022, appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmcache_core.errors import UsageError

__all__ = ["Engine", "Layers", "Link", "Shape", "crossover", "loading_pays"]

LONGEST = 1e12
"""Tokens; a crossover beyond is none."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that share one kind of attention."""

    count: int
    kv_bytes: int
    """Of a token in one layer, both K and V."""
    width: int
    """Sum over query heads of the sizes of a key and of a value: an attended pair takes twice as many FLOP a layer."""
    window: int | None = None
    """A token sees this many, itself among them; None: all before it."""

    def held(self, tokens: float) -> float:
        """Tokens of a prompt whose KV there is at its end."""
        return tokens if self.window is None else min(tokens, self.window)

    def pairs(self, tokens: float) -> float:
        """Pairs of tokens that attend to each other in a causal prefill, L²/2 to leading order."""
        held = self.held(tokens)
        return held * held / 2 + (tokens - held) * held


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides the size of its KV and the work of a prefill."""

    layers: tuple[Layers, ...]
    parameters: float
    """That each token is multiplied with: of a mixture of experts the active ones; neither the embedding, which is
    looked up, nor the head, which only the last token of a prompt needs."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token adds: 2 x layers x KV heads x head size x bytes a number; with MLA layers x (latent + RoPE
        part) x bytes a number (DeepSeek-V2, 2024, section 2.1). Layers with a window count, until it is full."""
        return sum(each.count * each.kv_bytes for each in self.layers)

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of a prefix: what restoring it has to load."""
        return sum(each.count * each.kv_bytes * each.held(tokens) for each in self.layers)

    def linear_flop(self, tokens: float) -> float:
        """FLOP of a prefill's matrix products with weights: 2 a parameter and token (Kaplan et al., 2020, table 1)."""
        return 2 * self.parameters * tokens

    def attention_flop(self, tokens: float) -> float:
        """FLOP of a prefill's products of queries with keys, and of scores with values: 2 x width a pair and layer.
        With causal attention there are L²/2 pairs, which gives 2 x layers x d x L² for d = heads x head size. (PaLM,
        appendix B, has twice that: it leaves out the mask.)"""
        return sum(2 * each.count * each.width * each.pairs(tokens) for each in self.layers)

    def prefill_flop(self, tokens: float) -> float:
        """FLOP of a prefill from nothing."""
        return self.linear_flop(tokens) + self.attention_flop(tokens)


@dataclass(frozen=True, slots=True)
class Engine:
    """What computes.

    Raises:
        UsageError: There is no such thing.
    """

    peak: float
    """FLOP a second of all its processors together."""
    mfu: float
    """What of it a prefill reaches, above 0 and at most 1."""

    def __post_init__(self) -> None:
        _positive("the peak of an engine", self.peak)
        if not 0 < self.mfu <= 1:
            raise UsageError(f"an MFU is above 0 and at most 1, not {self.mfu!r}")

    def seconds(self, shape: Shape, tokens: float) -> float:
        """What a prefill of a prompt takes: its FLOP by MFU x peak."""
        return shape.prefill_flop(tokens) / (self.mfu * self.peak)


@dataclass(frozen=True, slots=True)
class Link:
    """What loads, one transfer after another: t = o + n/B for a transfer of n bytes (LogGP's o and G = 1/B, Alexandrov
    et al., 1995).

    Raises:
        UsageError: There is no such thing.
    """

    bandwidth: float
    """B, bytes a second."""
    latency: float = 0.0
    """o, seconds that a transfer takes besides its bytes."""

    def __post_init__(self) -> None:
        _positive("a bandwidth", self.bandwidth)
        if not 0 <= self.latency < math.inf:
            raise UsageError(f"a latency is a number of seconds, not {self.latency!r}")

    def seconds(self, nbytes: float) -> float:
        """Of one transfer."""
        return self.latency + nbytes / self.bandwidth

    def share(self, nbytes: float) -> float:
        """What of the bandwidth transfers of that size reach: (n/B) / (o + n/B) = n / (n + o B)."""
        return nbytes / (nbytes + self.latency * self.bandwidth)

    def size_for(self, share: float) -> float:
        """Bytes of a transfer that reaches a share of the bandwidth: n = o B share / (1 - share), so n90 = 9 o B and
        n95 = 19 o B.

        Raises:
            UsageError: The share is not between 0 and 1.
        """
        if not 0 < share < 1:
            raise UsageError(f"a share of a bandwidth is between 0 and 1, not {share!r}")
        return self.latency * self.bandwidth * share / (1 - share)

    def load_seconds(self, shape: Shape, tokens: int, chunk_tokens: int) -> float:
        """What loading a prefix takes, in chunks."""
        _positive("the tokens of a chunk", chunk_tokens)
        return self.latency * math.ceil(tokens / chunk_tokens) + shape.kv_bytes(tokens) / self.bandwidth


def loading_pays(shape: Shape, engine: Engine, link: Link, tokens: int, chunk_tokens: int) -> bool:
    """Whether loading a prefix of that length is faster than computing it."""
    return link.load_seconds(shape, tokens, chunk_tokens) < engine.seconds(shape, tokens)


def crossover(shape: Shape, engine: Engine, link: Link, chunk_tokens: int) -> float | None:
    """L*: loading whole chunks pays for prefixes that are longer. 0: for all; None: for none.

    With full attention only, F = MFU x peak, S bytes of KV a token and chunks of C tokens,

        S L / B + o L / C = (2 P L + 2 n d L²) / F,  so  L* = ((S/B + o/C) F - 2 P) / (2 n d).

    With windows both sides change their course where a window is full, and are no more than quadratic between. Loading
    becomes no dearer a token, computing no cheaper: whatever pays once pays from there on.

    Raises:
        UsageError: A chunk has no tokens.
    """
    _positive("the tokens of a chunk", chunk_tokens)
    # Between the lengths at which windows are full, computing less loading is a L² + b L + c.
    edges = sorted({float(each.window) for each in shape.layers if each.window is not None})
    for start, end in zip([0.0, *edges], [*edges, LONGEST], strict=True):
        a, b, c = _gain(shape, engine, link, chunk_tokens, start)
        if (root := _last_below(a, b, c, start, end)) is not None:
            return root
    return None


def _gain(shape: Shape, engine: Engine, link: Link, chunk_tokens: int, start: float) -> tuple[float, float, float]:
    """Coefficients of what loading saves, in seconds, where only windows of up to `start` tokens are full."""
    a, c = 0.0, 0.0
    linear = 2 * shape.parameters
    held = 0.0
    speed = engine.mfu * engine.peak
    for each in shape.layers:
        work = 2 * each.count * each.width
        if each.window is None or each.window > start:
            a += work / 2 / speed
            held += each.count * each.kv_bytes
        else:
            linear += work * each.window
            c -= work * each.window**2 / 2 / speed
            c -= each.count * each.kv_bytes * each.window / link.bandwidth
    return a, linear / speed - held / link.bandwidth - link.latency / chunk_tokens, c


def _last_below(a: float, b: float, c: float, start: float, end: float) -> float | None:
    """Where in [start, end] a L² + b L + c, which is not above 0 at the start unless that is the root, becomes so."""
    if start == 0:
        root = 0.0 if b > 0 or (b == 0 and a > 0) else (-b / a if a else math.inf)
    elif not a:
        root = -c / b if b > 0 else math.inf
    else:
        # The larger root, without taking the difference of numbers that are nearly equal
        inner = max(b * b - 4 * a * c, 0.0)
        q = math.sqrt(inner)
        root = (q - b) / (2 * a) if b <= 0 else -2 * c / (b + q)
    return max(root, start) if root <= end else None


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{what} must be more than 0, not {value!r}")
