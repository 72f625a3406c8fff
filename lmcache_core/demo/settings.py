"""The configuration of the demonstration's cache."""

from __future__ import annotations

from typing import Any

__all__ = ["settings"]


def settings(tier: dict[str, Any]) -> dict[str, Any]:
    """As a YAML file would have it, with the settings of one tier; see `served`."""
    return {"cpu": {"capacity": "1GiB"}, "tiers": [tier | {"read_timeout": "30s"}]}
