"""Calls that block the event loop, found by `blockbuster` where it is installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lmcache_core.protocols import RemembersUse, Scannable, StorageBackend
from lmcache_core.testing.case import (
    BackendCase,
    BackendFactory,
    assert_holds,
    assert_lacks,
    opened,
    scan_all,
    write_all,
)
from lmcache_core.testing.data import make_chunk, make_key

MORE = [
    "builtins.open",
    "fcntl.flock",
    "io.open",
    "os.fdatasync",
    "os.fsync",
    "os.open",
    "os.pread",
    "os.preadv",
    "os.pwrite",
    "os.pwritev",
    "os.readv",
    "os.writev",
]
"""File I/O that blockbuster doesn't know by itself."""


class LoopTests(BackendCase):
    """A blocking call on the event loop stalls every tier of the node."""

    async def test_no_verb_blocks_the_event_loop(self, backend_factory: BackendFactory) -> None:
        blockbuster = pytest.importorskip("blockbuster", reason="blockbuster is not installed")
        chunks = [make_chunk(make_key(i), 64 * 2**10) for i in range(4)]
        backend = backend_factory()
        watch = watching(blockbuster, backend)
        watch.activate()
        try:
            async with opened(backend):
                await write_all(backend, chunks)
                await assert_holds(backend, chunks)
                await backend.delete([chunks[0].key])
                await assert_lacks(backend, [chunks[0].key], chunks[0].data.nbytes)
                if isinstance(backend, RemembersUse):
                    await backend.touch([chunks[1].key])
                if isinstance(backend, Scannable):
                    await scan_all(backend)
        finally:
            watch.deactivate()


def watching(blockbuster: Any, backend: StorageBackend) -> Any:
    """What makes blocking calls raise in the package of the backend, and in nothing else."""
    module = type(backend).__module__
    package = sys.modules.get(module.partition(".")[0], sys.modules[module])
    where = {"scanned_modules": [package], "excluded_modules": [__name__.rpartition(".")[0]]}
    watch = blockbuster.BlockBuster(**where)
    for name in MORE:
        reads_source = [("linecache.py", {"updatecache"})]  # for tracebacks in log records
        function = blockbuster.BlockBusterFunction(None, name, can_block_functions=reads_source, **where)
        watch.functions[name] = function
    return watch
