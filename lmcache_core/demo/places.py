"""Where the demonstration keeps what it may need again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """The user's folder for things that can be made again: `$XDG_CACHE_HOME/lmcache-core`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lmcache-core"
