"""What a node holds and has done, counted for those who ask."""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_core.client import KeptStats, OwnerStats, SpaceStats, Stats, TierStats
from lmcache_core.index import POOL
from lmcache_core.node import Node


def node_stats(node: Node, bits: Mapping[str, int]) -> Stats:
    """State of a node now. `bits` are its places in masks, by name.

    Raises:
        ClosedError: The node has been closed.
    """
    guard = node.guard
    with guard.turn, guard.mutex:
        index = guard.use()
        kept = node.kept.entries(index)
        tiers = [
            TierStats(
                runner.config.name,
                runner.config.backend,
                runner.up,
                tier.used,
                tier.capacity,
                len(tier.policy),
                runner.queued,
                runner.health.quarantined,
                runner.health.counters(),
                "" if runner.up else runner.health.why,
                tier.rules.shared,
                tier.pace.latency if tier.pace.known else None,
                tier.pace.bandwidth if tier.pace.known else None,
            )
            for runner, tier in zip(node.runners, index.tiers, strict=True)
        ]
        return Stats(
            node.pool.capacity,
            node.pool.usable,
            node.pool.used,
            node.pool.slots,
            len(index.policy) + sum(1 for entry in index.pinned if entry.where & POOL),
            len(index.leases),
            len(index.pinned),
            sum(len(space.staged) for space in index.spaces.values()),
            node.lag,
            tiers,
            node.counts.snapshot(),
            index.frozen,
            [
                OwnerStats(
                    owner.kind,
                    owner.name,
                    {name: share.held for name, share in zip(bits, owner.shares, strict=True)},
                    owner.idle and not owner.used,
                )
                for owner in index.owners.values()
            ],
            KeptStats(len(kept), sum(entry.nbytes for entry in kept), node.kept.room(index)[0]),
            node.standalone,
        )


def space_stats(node: Node, bits: Mapping[str, int]) -> list[SpaceStats]:
    """What a node holds, by namespace and group.

    Raises:
        ClosedError: The node has been closed.
    """
    guard = node.guard
    with guard.turn, guard.mutex:
        found = list(guard.use().spaces.values())
    told = []
    for space in found:
        with guard.turn, guard.mutex:
            guard.use()
            entries = list(space.chunks.values())
            manifest = node.manifest_of(space)
        # Counted without the mutex, since there may be a million: what changes meanwhile may be in it or not.
        sizes = dict.fromkeys(bits, 0)
        for entry in entries:
            for name, bit in bits.items():
                if entry.where & bit:
                    sizes[name] += entry.nbytes
        told.append(
            SpaceStats(
                space.digest,
                manifest,
                len(entries),
                sum(len(entry.pages) for entry in entries),
                sum(1 for entry in entries if entry.pins),
                sum(1 for entry in entries if entry.leases),
                sizes,
            )
        )
    return told
