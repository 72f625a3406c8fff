"""The digest of a checkpoint: its files, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lmcache_core.connectors.weights import PIECE, PIECES, WHOLE, adapter_digest, checkpoint_digest
from lmcache_core.errors import LayoutError

LARGE = WHOLE + 5 * PIECE


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small file of weights and a large one that is mostly a hole."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (place / "model-1.safetensors").write_bytes(os.urandom(1000))
    (place / "model.safetensors.index.json").write_text("{}")
    (place / "README.md").write_text("whatever")
    with open(place / "model-2.safetensors", "wb") as file:
        file.truncate(LARGE)
    return place


def change(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_it_does_not_depend_on_where_the_files_lie_and_when_they_were_written(checkpoint: Path, tmp_path: Path) -> None:
    digest = checkpoint_digest(str(checkpoint))
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    os.utime(other / "config.json", (1, 1))
    (other / "README.md").write_text("another text")
    (other / "pictures").mkdir()
    assert checkpoint_digest(str(other)) == digest
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    assert checkpoint_digest(str(link)) == digest
    assert len(bytes.fromhex(digest)) == 32


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("config.json", 3),
        ("model.safetensors.index.json", 0),
        ("model-1.safetensors", 0),
        ("model-1.safetensors", 500),
        ("model-1.safetensors", 999),
        ("model-2.safetensors", 0),
        ("model-2.safetensors", PIECE - 1),
        ("model-2.safetensors", (LARGE - PIECE) * 30 // (PIECES + 1) + 7),
        ("model-2.safetensors", LARGE - PIECE),
        ("model-2.safetensors", LARGE - 1),
    ],
)
def test_a_changed_byte_where_it_looks_changes_it(checkpoint: Path, name: str, offset: int) -> None:
    digest = checkpoint_digest(str(checkpoint))
    change(checkpoint / name, offset)
    assert checkpoint_digest(str(checkpoint)) != digest


def test_size_names_and_number_of_files_count(checkpoint: Path) -> None:
    digests = [checkpoint_digest(str(checkpoint))]
    with open(checkpoint / "model-2.safetensors", "r+b") as file:
        file.truncate(LARGE + 1)
    digests.append(checkpoint_digest(str(checkpoint)))
    (checkpoint / "model-1.safetensors").rename(checkpoint / "model-3.safetensors")
    digests.append(checkpoint_digest(str(checkpoint)))
    (checkpoint / "model-3.safetensors").unlink()
    digests.append(checkpoint_digest(str(checkpoint)))
    assert len(set(digests)) == 4


def test_a_file_of_its_own_is_a_checkpoint_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    assert checkpoint_digest(str(tmp_path / "a.gguf")) == checkpoint_digest(str(tmp_path / "b.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"Weights")
    assert checkpoint_digest(str(tmp_path / "a.gguf")) != checkpoint_digest(str(tmp_path / "b.gguf"))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LayoutError, match=r"has no weights that can be told from others.*weights_id"):
        checkpoint_digest(str(tmp_path))


def test_weights_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LayoutError, match="is not on this machine"):
        checkpoint_digest(str(tmp_path / "nowhere"))


def test_weights_that_cannot_be_read_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to(checkpoint / "config.json")
    assert checkpoint_digest(str(checkpoint))  # what is no file is none of it
    if os.geteuid() == 0:
        return
    (checkpoint / "model-2.safetensors").chmod(0)
    with pytest.raises(LayoutError, match="cannot be read"):
        checkpoint_digest(str(checkpoint))


def test_an_adapter_is_told_by_what_is_in_it_also_after_it_was_changed(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    first = adapter_digest(str(tmp_path))
    assert adapter_digest(str(tmp_path)) == first
    (tmp_path / "adapter_model.safetensors").write_bytes(b"another one")
    assert adapter_digest(str(tmp_path)) != first
