from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmcache_core import Cache
from lmcache_core.cli import main
from lmcache_core.config import Config
from lmcache_core.plugins import load_backend
from lmcache_core.service.remote import RemoteClient
from tests.cli.kv import View, make_namespace, settings
from tests.service.kit import serving

Run = Callable[..., "Ran"]


class Ran:
    """What a command answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """Standard output, which is JSON and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def call(*words: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("LMCACHE_CORE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    load_backend.cache_clear()


class AtWork(NamedTuple):
    """A node at work, and where its disk tier `disk` is."""

    socket: Path
    disk: Path
    pid: int

    def engine(self, model: str = "model-a", tenant: str = "", **settings: Any) -> Cache:
        """What an engine has of it."""
        client = RemoteClient(str(self.socket), Config(call_timeout=10.0, tenant=tenant), "engine")
        return Cache(client, make_namespace(model), **settings)

    def fill(self, *prompts: list[int], model: str = "model-a", tenant: str = "") -> None:
        """Leave the KV of prompts with it, as an engine that has ended would."""
        with self.engine(model, tenant) as cache:
            for number, tokens in enumerate(prompts):
                assert cache.store(tokens, View(len(tokens), seed=number)).wait(10)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[AtWork]:
    """`lmcache-core serve`."""
    config = settings(tmp_path / "disk", cpu="4MiB")
    with serving(tmp_path, **config) as (process, path):
        yield AtWork(path, tmp_path / "disk", process.process.pid)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[AtWork]:
    """The socket of an engine's own node."""
    path = tmp_path / "engine.sock"
    config = settings(tmp_path / "disk", cpu="4MiB", socket=str(path))
    with Cache.open(config, make_namespace("model-a")):
        yield AtWork(path, tmp_path / "disk", os.getpid())


@pytest.fixture(params=["process", "embedded"])
def node(request: pytest.FixtureRequest) -> AtWork:
    """Each kind of node."""
    at_work: AtWork = request.getfixturevalue(request.param)
    return at_work
