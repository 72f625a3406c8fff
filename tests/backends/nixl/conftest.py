"""Tests of this package need NIXL, and nothing else."""

from __future__ import annotations

import pytest

from lmcache_backends.nixl.mover import library
from lmcache_core.errors import ConfigError


@pytest.fixture
def nixl() -> None:
    """Skips where there is no NIXL."""
    try:
        library()
    except ConfigError as error:
        pytest.skip(str(error))
