"""A digest of a checkpoint by its files: cheap, and the same wherever they lie.

Read are the small files that say what the weights mean, and of each file of weights its size, its start, its end and
pieces in between. A fine-tune changes all of them; a change of a few bytes in the middle of a large file may go unseen.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_core.errors import LayoutError
from lmcache_core.keys import digest_fields

__all__ = ["adapter_digest", "checkpoint_config", "checkpoint_digest", "file_digest", "nobody_elses"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".npz")
MEANING = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json", "params.json")
PIECE = 1 << 16
PIECES = 62
"""Pieces of a file between its start and its end, evenly spread."""
WHOLE = 8 << 20
"""Files up to this size are read as a whole."""
NAME_THEM = "name the weights with weights_id"


def checkpoint_digest(path: str, revision: str | None = None, folder: str | None = None) -> str:
    """Digest of the checkpoint in a directory, in a file, or of that name in the Hugging Face cache, as hex.

    Args:
        path: Or name.
        revision: Of those with a name.
        folder: Of the Hugging Face cache, if it is another than usual.

    Raises:
        LayoutError: It is not there, or has no weights.
    """
    place = _local(path, revision, folder, NAME_THEM)
    files = dict(_files(place))
    if not any(name.endswith(WEIGHTS) for name in files):
        raise LayoutError(
            f"{place} has no weights that can be told from others ({', '.join(WEIGHTS)}); name them with weights_id"
        )
    return digest_fields("lmcache-core checkpoint 1", files).hex()


def checkpoint_config(path: str, revision: str | None = None, folder: str | None = None) -> dict[str, Any]:
    """What the `config.json` of a checkpoint says, which is in a directory or of that name in the Hugging Face cache.

    Raises:
        LayoutError: There is none that can be read.
    """
    advice = "its config.json is needed here, even where weights_id names the weights"
    place = _local(path, revision, folder, advice)
    try:
        found = json.loads((place / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"the configuration of the model in {place} cannot be read: {error}; {advice}") from error
    if not isinstance(found, dict):
        raise LayoutError(f"the configuration of the model in {place} is no mapping")
    return found


def file_digest(path: str, what: str) -> str:
    """Digest of a file's content, as hex. `what` is what names it, for people.

    Raises:
        LayoutError: It cannot be read.
    """
    try:
        return _sampled(Path(path)).hex()
    except OSError as error:
        raise LayoutError(
            f"{what}: {path} cannot be read, and KV depends on what is in it: {error.strerror}"
        ) from error


def adapter_digest(path: str) -> str:
    """Digest of a LoRA adapter's directory, read once for each state of its files.

    Raises:
        LayoutError: It is not there, or has no weights.
    """
    place = _local(path, None, None, "put it there, or leave it out")
    found = _relevant(place)
    if not any(each.name.endswith(WEIGHTS) for each in found):
        raise LayoutError(f"the adapter in {place} has no weights that can be told from others: {', '.join(WEIGHTS)}")
    return _adapter(str(place), tuple((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in found))


@functools.lru_cache(1024)
def _adapter(path: str, state: object) -> str:
    return digest_fields("lmcache-core adapter 1", dict(_files(Path(path)))).hex()


def nobody_elses() -> str:
    """In place of a digest, for weights that no other process has."""
    return f"random {secrets.token_hex(16)}"


def _local(path: str, revision: str | None, folder: str | None, advice: str) -> Path:
    if os.path.exists(path):
        return Path(path)
    try:
        from huggingface_hub import snapshot_download  # which is there where an engine is
    except ImportError as error:
        raise LayoutError(f"{path} is not on this machine, and huggingface_hub is not installed; {advice}") from error
    try:
        return Path(snapshot_download(path, revision=revision, cache_dir=folder, local_files_only=True))
    except Exception as error:  # the library has a dozen kinds
        raise LayoutError(f"{path} is not on this machine: {error}; {advice}") from error


def _relevant(place: Path) -> list[Path]:
    found = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.is_file())
    return [
        each
        for each in found
        if each.name in MEANING or each.name.endswith(WEIGHTS) or each.name.endswith(".index.json")
    ]


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    try:
        for each in _relevant(place):
            yield each.name if place.is_dir() else f"file{each.suffix}", _sampled(each)
    except OSError as error:
        raise LayoutError(f"the weights in {place} cannot be read: {error}; name them with weights_id") from error


def _sampled(path: Path) -> bytes:
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(b"%d " % size)
    with open(path, "rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            last = size - PIECE
            for number in range(PIECES + 2):
                file.seek(last * number // (PIECES + 1))
                digest.update(file.read(PIECE))
    return digest.digest()
