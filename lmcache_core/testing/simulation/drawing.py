"""What a run is of, drawn: tiers, settings of nodes, and models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.config import BreakerConfig, Config, CpuConfig, ShareConfig, TierConfig
from lmcache_core.namespace import Namespace
from lmcache_core.testing.simulation.content import CHUNK_BYTES, CHUNK_PAGES, PAGE_TOKENS, namespace

__all__ = ["DrawnTier", "draw_config", "draw_namespaces", "draw_tier"]


@dataclass(frozen=True, slots=True)
class DrawnTier:
    """A tier of all nodes of a run.

    Args:
        config: Its settings.
        local: Whether each node has a medium of its own, which can be listed; else all share one, which cannot.
        abortable, costly_probes: What a backend that is not local says of itself.
        room: Bytes that the medium has; None for no bound.
    """

    config: TierConfig
    local: bool
    abortable: bool
    costly_probes: bool
    room: int | None


def draw_tier(rng: random.Random, number: int) -> DrawnTier:
    """A tier. Its times are short beside what a bad medium takes."""
    capacity = rng.choice((None, None, None, 2, 4, 8))
    room = rng.choice((None, None, None, 2, 6))
    cooldown = rng.choice((0.01, 0.05, 0.3))
    breaker = BreakerConfig(
        failures=rng.choice((1, 2, 3, 50)), cooldown=cooldown, max_cooldown=cooldown * rng.choice((1, 4, 16))
    )
    config = TierConfig(
        backend="simulated",
        name=f"t{number}",
        capacity=capacity and capacity * CHUNK_BYTES,
        write=rng.choice(("through", "through", "through", "through", "evict", "evict", "never")),
        admit=rng.choice(("always", "always", "always", "second-touch")),
        policy=rng.choice(("lru", "lru", "s3fifo")),
        min_prompt=rng.choice((0, 0, 0, 5 * PAGE_TOKENS)),
        promote=rng.random() < 0.7,
        read_timeout=rng.choice((0.02, 0.1, 0.5, 2.0)),
        write_timeout=rng.choice((0.05, 0.2, 1.0, 5.0)),
        concurrency=rng.choice((1, 1, 2, 4)),
        hedge=rng.random() < 0.5,
        quarantine=rng.choice((1, 2, 4)) * CHUNK_BYTES,
        breaker=breaker,
    )
    local, abortable, costly = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
    return DrawnTier(config, local, abortable, costly, room and room * CHUNK_BYTES)


def draw_config(rng: random.Random, tiers: Sequence[DrawnTier]) -> Config:
    """Settings of a node: a pool of few chunks, and leases that end soon."""
    shares: tuple[ShareConfig, ...] = ()
    if rng.random() < 0.2:
        shares = (ShareConfig(tenant="x", weight=2.0, cpu=2 * CHUNK_BYTES),)
    pool = CpuConfig(
        capacity=rng.choice((2, 4, 8, 16, 32)) * CHUNK_BYTES,
        policy=rng.choice(("lru", "s3fifo")),
    )
    return Config(
        chunk_tokens=CHUNK_PAGES * PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        cpu=pool,
        tiers=tuple(tier.config for tier in tiers),
        shares=shares,
        share_timeout=rng.choice((2.0, 3600.0)),
        lease_timeout=rng.choice((0.5, 2.0, 10.0)),
        log_interval=1.0,
    )


def draw_namespaces(rng: random.Random) -> list[Namespace]:
    """The model that most engines have, and another."""
    kinds = rng.choice(("f", "f", "f", "f", "fw", "fs", "fws"))
    shards = rng.choice((1, 1, 1, 2))
    return [namespace(kinds, shards), namespace("f", shards, "other")]
