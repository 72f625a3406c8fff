"""Two backends that are installed for the time of a test, in metadata as any other package's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from lmcache_core.plugins import load_backend

SOURCE = '''
    """Backends that keep nothing."""
    from typing import ClassVar
    import msgspec
    from lmcache_core.hookspecs import hookimpl
    from lmcache_core.units import ByteSize, Duration, Secret

    class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        connections: int = 4
        """Sockets kept open."""

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        one_per_process: ClassVar = ("mode",)
        path: str
        """Directory of the chunks."""
        capacity: ByteSize
        """Bytes it may hold."""
        direct: bool = True
        """Bypass the page cache."""
        segment: ByteSize = 2**30
        """Bytes of one file."""
        patience: Duration | None = None
        """Longest wait."""
        mode: str = "fast"

        def __post_init__(self):
            if self.segment > self.capacity:
                raise ValueError("segment is larger than capacity; write a smaller segment")

    class RemoteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        url: str
        """Where it listens."""
        tokens: list[Secret] = []
        """More passwords."""
        password: Secret = ""
        """Password, if the url has none."""
        nodes: str | list[str] = []
        """More addresses."""
        labels: dict[str, str] = {}
        """Free text."""
        pool: Pool = Pool()
        """Connections."""

        def __post_init__(self):
            if self.pool.connections < 0:
                raise ValueError(f"no connections to {self.url} {str(self.url)!r} with {self.password!s}")

    class Backend:
        async def open(self): ...
        async def close(self): ...
        async def contains(self, keys): ...
        async def read(self, keys, into): ...
        async def write(self, chunks): ...
        async def delete(self, keys): ...

    class Local:
        @hookimpl
        def lmcache_backend_options(self):
            return Options

        @hookimpl
        def lmcache_create_backend(self, options):
            return Backend()

    class Remote:
        @hookimpl
        def lmcache_backend_options(self):
            return RemoteOptions

        @hookimpl
        def lmcache_create_backend(self, options):
            return Backend()

    local, remote = Local(), Remote()
'''


@pytest.fixture(autouse=True)
def fake_backends(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`fakedisk` and `fakeremote` are installed."""
    root = tmp_path_factory.mktemp("site")
    (root / "fake_lmcache_backends.py").write_text(dedent(SOURCE))
    info = root / "fake_lmcache_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-lmcache-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lmcache_core.backends]\nfakedisk = fake_lmcache_backends:local\nfakeremote = fake_lmcache_backends:remote\n"
    )
    monkeypatch.syspath_prepend(str(root))
    importlib.invalidate_caches()
    load_backend.cache_clear()
    yield
    load_backend.cache_clear()
    sys.modules.pop("fake_lmcache_backends", None)


@pytest.fixture(autouse=True)
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a test are named by what it calls them, and no variable of this machine reaches it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCACHE_CORE_CONFIG", raising=False)
    return tmp_path
