"""The conformance kit: tests that any storage backend inherits, and what they are made of.

Needs the extra `testing` (pytest, pytest-asyncio, hypothesis); nothing else of this package does.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
    import pytest
    import pytest_asyncio  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"lmcache_core.testing needs {error.name}, which is not installed: pip install 'lmcache-core[testing]'",
        name=error.name,
    ) from error

# Only then do failures of the suite show the values they compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in (
            "cancels",
            "capabilities",
            "case",
            "data",
            "life",
            "loop",
            "model",
            "races",
            "room",
            "values",
        )
    )
)

from lmcache_core.testing.case import BackendCase, BackendFactory, RawCorrupt, RawRead, RawWrite, opened  # noqa: E402
from lmcache_core.testing.data import (  # noqa: E402
    GuardedBuffer,
    aligned_buffer,
    flip_bit,
    make_chunk,
    make_key,
    random_frame,
)
from lmcache_core.testing.model import MODEL_SETTINGS, BackendModel, run_model  # noqa: E402
from lmcache_core.testing.suite import StorageBackendTests  # noqa: E402

__all__ = [
    "MODEL_SETTINGS",
    "BackendCase",
    "BackendFactory",
    "BackendModel",
    "GuardedBuffer",
    "RawCorrupt",
    "RawRead",
    "RawWrite",
    "StorageBackendTests",
    "aligned_buffer",
    "flip_bit",
    "make_chunk",
    "make_key",
    "opened",
    "random_frame",
    "run_model",
]
