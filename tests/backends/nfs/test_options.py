"""Options that cannot work are refused with what to write instead, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.nfs.naming import Maker, is_temporary
from lmcache_backends.nfs.options import NfsOptions
from lmcache_core.config import InvalidSetting, load_config
from lmcache_core.errors import ConfigError
from lmcache_core.names import object_name
from lmcache_core.testing import make_key


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"path": ""}, "path is empty; write the directory"),
        ({"path": "kv"}, "path 'kv' must be absolute; write it from / on"),
        ({"path": "filer:/export/kv"}, "path 'filer:/export/kv' is an export; mount it"),
        ({"path": "nfs://filer/export"}, "is an export; mount it, and write the directory that it is mounted at"),
        ({"path": "/mnt/\0"}, "has a character that no name of a file can have"),
        ({"path": "/mnt/\ud800"}, "has a character that no name of a file can have"),
        ({"path": "//"}, "path is /; write a directory for the cache alone"),
        ({"path": "/mnt/.."}, "path is /; write a directory for the cache alone"),
        ({"ttl": 0.5}, "ttl must be 1s or more; leave it out, or write 7d"),
        ({"sweep_interval": 0.0}, "sweep_interval must be 1s or more; write 5m"),
        ({"touch_interval": 0.1}, "touch_interval must be 1s or more; write 1h"),
    ],
)
def test_what_cannot_work_is_refused(written: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        NfsOptions(**{"path": "/mnt/kv"} | written)
    assert said in str(raised.value)
    assert str(raised.value).startswith("nfs: ")
    assert raised.value.key == (next(iter(written)),)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pth: /mnt/kv", "unknown key 'pth' in tiers[0]; did you mean 'path'?"),
        ("path: kv", ":3: nfs: path 'kv' must be absolute"),
        ("path: /mnt/kv\n    direct: maybe", "tiers[0].direct"),
        ("path: /mnt/kv\n    threads: 0", "tiers[0].threads"),
        ("path: /mnt/kv\n    ttl: 7 weeks", "there is no unit 'weeks'"),
        ("path: /mnt/kv\n    capacity: 10T", "write TiB (powers of 1024) or TB (powers of 1000)"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(f"tiers:\n  - backend: nfs\n    {line}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{file}:")


def test_two_tiers_in_one_directory_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(
        "tiers:\n  - {backend: nfs, name: a, path: /mnt/kv}\n  - {backend: nfs, name: b, path: /mnt/x/../kv/}\n"
    )
    with pytest.raises(ConfigError, match=r"'/mnt/kv' is already the path of tiers\[0\]"):
        load_config(file)


def test_a_home_directory_and_units_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/kv")
    file = tmp_path / "tiers.yaml"
    file.write_text("tiers: [{backend: nfs, path: ~/kv, capacity: 10TiB, ttl: 7d, touch_interval: 30m}]\n")
    options = load_config(file).config.tiers[0].options
    assert isinstance(options, NfsOptions)
    assert (options.directory(), options.capacity) == ("/home/kv/kv", 10 * 2**40)
    assert (options.ttl, options.touch_interval) == (7 * 86400, 1800)


@pytest.mark.parametrize("host", ["gpu-17.cluster.example", "x" * 300, "Ünï-cödé", "", "...", "a/b"])
def test_names_are_bounded_and_known_again(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Whatever the host is called."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    maker, other = Maker(), Maker()
    name = object_name(make_key(1))
    made = [each.temporary(name) for each in (maker, other) for _ in range(100)]
    assert len(set(made)) == 200
    for each in made:
        directory, _, last = each.rpartition("/")
        assert directory == name.rpartition("/")[0]
        assert len(last) < 200
        assert is_temporary(last)
        assert last.count(".") == 2, "GlusterFS places a name of this form as it will be called"
