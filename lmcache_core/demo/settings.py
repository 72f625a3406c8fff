"""The configuration of the demonstration's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["settings"]


def settings(folder: Path) -> dict[str, Any]:
    """As a YAML file would have it; the disk tier is below `folder`."""
    disk = {
        "backend": "disk",
        "path": str(folder / "kv"),
        "capacity": "2GiB",
        "min_free": "0%",
        "read_timeout": "30s",
    }
    return {"cpu": {"capacity": "1GiB"}, "tiers": [disk]}
