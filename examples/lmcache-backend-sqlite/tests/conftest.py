"""A blocking call on the event loop stalls every tier of the node, so here it fails the test that makes it."""

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx("lmcache_backend_sqlite"):
        yield
