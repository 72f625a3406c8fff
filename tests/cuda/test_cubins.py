"""Compiled kernels on the disk: whole or not there, whoever else writes, whatever has become of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cuda.cubins import CubinCache, default_directory

PARTS = ("source", "--option", "nvrtc 12.9")
CUBIN = bytes(range(256)) * 300


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    CubinCache(tmp_path).put("sm_90", PARTS, CUBIN)
    (path,) = tmp_path.iterdir()
    return path


def test_what_was_kept_comes_back(tmp_path: Path, entry: Path) -> None:
    assert CubinCache(tmp_path).get("sm_90", PARTS) == CUBIN
    assert entry.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("sm_80", PARTS),
        ("sm_90", ("source ", *PARTS[1:])),
        ("sm_90", ("source", "--option", "nvrtc 12.8")),
        ("sm_90", ("source--option", "nvrtc 12.9")),
        ("sm_90", ("source", "-", "-optionnvrtc 12.9")),
        ("sm_90", PARTS[:2]),
    ],
)
@pytest.mark.usefixtures("entry")
def test_another_is_not_found(tmp_path: Path, target: str, parts: tuple[str, ...]) -> None:
    assert CubinCache(tmp_path).get(target, parts) is None


@pytest.mark.parametrize("target", ["", "../sm_90", "compute_90", "sm_90/x"])
def test_a_target_that_is_none(tmp_path: Path, target: str) -> None:
    with pytest.raises(ValueError, match="is not an architecture"):
        CubinCache(tmp_path).get(target, PARTS)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 4
    path.write_bytes(raw)


def another_version(path: Path) -> None:
    path.write_bytes(b"lmcubin2" + path.read_bytes()[8:])


def bare(path: Path) -> None:
    path.write_bytes(CUBIN)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def linked(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [emptied, cut, longer, one_bit, another_version, bare, huge, linked, fifo])
def test_damage_is_a_miss_and_is_repaired(
    tmp_path: Path, entry: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(entry)
    cache = CubinCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert cache.get("sm_90", PARTS) is None
    assert str(entry) in caplog.text
    cache.put("sm_90", PARTS, CUBIN)
    assert cache.get("sm_90", PARTS) == CUBIN


def test_a_directory_in_the_place_of_an_entry_hurts_nobody(
    tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry.unlink()
    entry.mkdir()
    cache = CubinCache(tmp_path)
    cache.put("sm_90", PARTS, CUBIN)
    assert cache.get("sm_90", PARTS) is None
    assert "cannot be kept" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_where_others_may_write_nothing_is_read(
    tmp_path: Path, entry: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(mode)
    cache = CubinCache(tmp_path)
    assert cache.get("sm_90", PARTS) is None
    assert "others may write to; chmod go-w it" in caplog.text
    entry.unlink()
    cache.put("sm_90", PARTS, CUBIN)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert CubinCache(tmp_path)._directory is None


def test_without_a_place_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for directory in (None, tmp_path / "file" / "cubins"):
        cache = CubinCache(directory)
        cache.put("sm_90", PARTS, CUBIN)
        assert cache.get("sm_90", PARTS) is None
    assert "compiled kernels are not kept" in caplog.text


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "lmcache-core/cubins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_directory() == Path("/home/somebody/.cache/lmcache-core/cubins")


WRITER = """
import sys
from pathlib import Path
from lmcache_cuda.cubins import CubinCache
cache, cubin = CubinCache(Path(sys.argv[1])), bytes(range(256)) * 4000
print("ready", flush=True)
sys.stdin.readline()
seen = 0
for _ in range(40):
    found = cache.get("sm_90", ["parts"])
    assert found in (None, cubin), "half an entry"
    seen += found is not None
    cache.put("sm_90", ["parts"], cubin)
print(seen)
"""


def test_processes_that_write_the_same_entry_never_see_half_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        out, err = writer.communicate(timeout=60)
        assert err == ""
        assert int(out) >= 39
    assert len(list(tmp_path.iterdir())) == 1
