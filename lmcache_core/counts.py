"""Plain counters of what happened, the one truth that statistics and metrics are read from.

A counter is a name of `COUNTERS` with one label's value (often a tier's name). Counting is a dictionary update under
the node's mutex, so that it costs nothing worth measuring; `lmcache_core.metrics` exports it when asked.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple


class Counter(NamedTuple):
    """What a counter counts and by which label."""

    help: str
    label: str


COUNTERS = {
    "lookups": Counter("Lookups answered.", "kind"),
    "lookup_tokens": Counter("Tokens of whole pages that were looked up.", "kind"),
    "hit_tokens": Counter("Tokens that a lookup promised, by the tier they are on.", "tier"),
    "retrieved_tokens": Counter("Tokens given back to engines, by the tier they came from.", "tier"),
    "stored_tokens": Counter("Tokens taken from engines into the host pool.", "kind"),
    "present_tokens": Counter("Tokens of stores that were there already or under way.", "kind"),
    "copied_bytes": Counter("Bytes copied between engine and host pool.", "direction"),
    "copy_seconds": Counter("Seconds spent in those copies.", "direction"),
    "past_host_bytes": Counter("Bytes read from a tier into a device's memory, past the host pool.", "tier"),
    "read_chunks": Counter("Chunks read from a tier and verified.", "tier"),
    "read_bytes": Counter("Bytes of chunks read from a tier and verified, frames included.", "tier"),
    "read_seconds": Counter("Seconds that reads of a tier took, without waiting in queues.", "tier"),
    "hedged_reads": Counter("Reads that took too long and were begun on another tier too.", "tier"),
    "won_hedges": Counter("Reads begun for another tier that took too long, and done before it.", "tier"),
    "overtaking_reads": Counter("Reads of a tier instead of one in front of it that is much slower now.", "tier"),
    "written_chunks": Counter("Chunks written to a tier.", "tier"),
    "written_bytes": Counter("Bytes of chunks written to a tier, frames included.", "tier"),
    "write_seconds": Counter("Seconds that writes to a tier took, without waiting in queues.", "tier"),
    "coding_plain_bytes": Counter("Bytes of chunks that were coded for a tier, before.", "tier"),
    "coding_stored_bytes": Counter("Bytes of these chunks as they are stored.", "tier"),
    "encode_seconds": Counter("Seconds that compressing and encrypting took, on threads.", "tier"),
    "decode_seconds": Counter(
        "Seconds that decrypting and decompressing took, on threads, for tiers with a codec or a cipher.", "tier"
    ),
    "incompressible_chunks": Counter(
        "Chunks that were stored without the tier's codec, since it saves less than a tenth of them.", "tier"
    ),
    "unknown_key_chunks": Counter(
        "Chunks that are encrypted with a key that is not the tier's; each was a miss.", "tier"
    ),
    "unencrypted_chunks": Counter(
        "Chunks that are not encrypted on a tier where all must be; each was a miss.", "tier"
    ),
    "unknown_codec_chunks": Counter("Chunks of a codec that is not installed; each was a miss.", "tier"),
    "other_chunks": Counter("Chunks of another length than their name stands for here; each was a miss.", "tier"),
    "evicted_chunks": Counter("Chunks that made room for others, by the tier they left.", "tier"),
    "superseded_chunks": Counter("Tails that a longer chunk replaced, by the tier they left.", "tier"),
    "dropped_chunks": Counter("Chunks or writes to a tier that were given up.", "reason"),
    "corrupt_chunks": Counter("Chunks that were damaged or not what their key says; each was a miss.", "tier"),
    "vanished_chunks": Counter("Chunks that a tier was expected to hold and did not.", "tier"),
    "failed_reads": Counter("Reads that failed.", "tier"),
    "failed_writes": Counter("Writes that failed.", "tier"),
    "late_reads": Counter("Reads given up at their deadline.", "tier"),
    "late_writes": Counter("Writes that ended after their deadline.", "tier"),
    "opened_breakers": Counter("Times a tier was taken out of use.", "tier"),
    "expired_leases": Counter("Leases that ended by time instead of by a release.", "kind"),
    "faults": Counter("Failures that were turned into misses at the edge of an engine.", "where"),
}


class Counts:
    """Values of `COUNTERS`. Not thread-safe: guarded by the node's mutex."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], float] = defaultdict(int)

    def add(self, name: str, label: str, amount: float = 1) -> None:
        """Count `amount` (never negative) more of `name` for `label`."""
        self._values[name, label] += amount

    def get(self, name: str, label: str) -> float:
        """The value of one counter; 0 if nothing was counted."""
        return self._values.get((name, label), 0)

    def total(self, name: str) -> float:
        """The sum of a counter over its labels."""
        return sum(value for (found, _), value in self._values.items() if found == name)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """All values by name and label."""
        out: dict[str, dict[str, float]] = {}
        for (name, label), value in self._values.items():
            out.setdefault(name, {})[label] = value
        return out
