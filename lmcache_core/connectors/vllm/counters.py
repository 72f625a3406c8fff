"""What the connector counts, for vLLM's own log lines and `/metrics`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

__all__ = ["COUNTERS", "Counts", "joined", "metric_name"]

COUNTERS: Mapping[str, tuple[str, str]] = {
    "loaded_tokens": ("Prompt tokens whose KV was loaded, by the tier it came from", "tier"),
    "load_seconds": ("Seconds from the start of loads to their end", ""),
    "saved_seconds": ("Seconds that computing the loaded tokens would have taken, as measured on others", ""),
    "failed_tokens": ("Prompt tokens that were promised and could not be loaded; they were computed", ""),
    "declined_tokens": ("Prompt tokens that were not loaded since computing them is faster, by their tier", "tier"),
    "stored_tokens": ("Tokens whose KV was stored in the node's host memory", ""),
    "dropped_tokens": (
        "Tokens whose KV was not stored: there was no room for it at once, or the node was away",
        "",
    ),
    "lost_tokens": (
        "Tokens whose KV the engine gave up before it was stored, with lazy_offload",
        "",
    ),
    "refused_options": ("Requests whose kv_transfer_params cannot be used; nothing was loaded or stored for them", ""),
    "faults": ("Exceptions that were kept from the engine", ""),
}
"""Of each its text, and the name of its label if it has one."""

Counts = defaultdict[tuple[str, str], float]
"""By name and label."""


def metric_name(name: str) -> str:
    """The name at vLLM's `/metrics`, without the `_total` that is put behind it."""
    return f"vllm:lmcache_core_{name}"


def joined(counts: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Counts as plain data: `name` or `name label`."""
    return {f"{name} {label}".strip(): amount for (name, label), amount in counts.items() if amount}
