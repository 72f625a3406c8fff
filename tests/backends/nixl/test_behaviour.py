"""What users write, what lies there, and what is told when it cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.nixl import NixlBackend, NixlOptions
from lmcache_backends.nixl.tally import Tally
from lmcache_core import Cache
from lmcache_core.config import load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.names import object_name
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import Abortable, CostlyProbes, CountsEvents, ReadResult, ReadsShorter, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, retrieve

KIB, MIB = 2**10, 2**20
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "backends" / "nixl.md"


def test_the_plugin_is_found_by_its_name() -> None:
    plugin = load_backend("nixl")
    assert plugin.options_type is NixlOptions
    backend = plugin.create(convert({"path": "/mnt/kv", "parameters": {"use_uring": "true"}}, NixlOptions))
    for capability in (CostlyProbes, CountsEvents, ReadsShorter):
        assert isinstance(backend, capability)
    assert not isinstance(backend, Abortable)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "path '' is no directory; write one for the cache alone"),
        ({"path": "kv"}, "path 'kv' must be absolute; write it from / on"),
        ({"path": "/"}, "path is /; write a directory for the cache alone, as in /mnt/kv"),
        ({"plugin": "posix!"}, "plugin 'posix!' is no name of a plugin; write it as in POSIX"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    wanted = {"path": "/mnt/kv"} | changes
    file = tmp_path / "node.yaml"
    lines = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in wanted.items())
    file.write_text(f"tiers:\n  - backend: nixl\n{lines}")
    (key,) = changes
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{3 + list(wanted).index(key)}: nixl: ")
    assert message in str(caught.value)


async def refusal(**settings: Any) -> tuple[type[Exception], str]:
    """What opening with these options raises."""
    backend = NixlBackend(NixlOptions(**settings))
    with pytest.raises((ConfigError, BackendError)) as caught:
        await backend.open()
    await backend.close()
    return caught.type, str(caught.value)


@pytest.mark.usefixtures("nixl")
async def test_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    kind, line = await refusal(path=str(tmp_path), plugin="NOSUCH")
    assert kind is ConfigError
    assert line.startswith("nixl: plugin NOSUCH is not one that this NIXL has; it has ")
    assert line.endswith("; POSIX always can")
    kind, line = await refusal(path=str(tmp_path), plugin="UCX")
    assert (kind, line[:42]) == (ConfigError, "nixl: plugin UCX cannot move files here; i")
    kind, line = await refusal(path=str(tmp_path), parameters={"use_uring": "maybe"})
    assert kind is ConfigError
    assert line.startswith("nixl: plugin POSIX does not start with these parameters (")
    file = tmp_path / "file"
    file.touch()
    assert await refusal(path=f"{file}/kv") == (
        BackendError,
        f"nixl: {file}/kv: Not a directory; see to the file system and to who may write there; the tier tries again by "
        "itself",
    )


def test_what_is_not_installed_is_named_when_it_is_needed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
sys.modules["nixl"] = sys.modules["nixl_cu12"] = sys.modules["nixl_cu13"] = None
from lmcache_backends.nixl import NixlBackend, NixlOptions
try:
    asyncio.run(NixlBackend(NixlOptions(path={str(tmp_path)!r})).open())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ConfigError nixl: NIXL is not installed; pip install 'lmcache-core[nixl]'\n"


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("parameters", [{}, {"use_uring": "true"}, {"use_posix_aio": "true"}])
async def test_values_are_moved_by_each_kind_of_queue(tmp_path: Path, parameters: dict[str, str]) -> None:
    backend = NixlBackend(NixlOptions(path=str(tmp_path), parameters=parameters))
    await backend.open()
    chunks = [make_chunk(make_key(number), nbytes) for number, nbytes in enumerate((4 * KIB, MIB, 20 * MIB))]
    assert await backend.write(chunks) == [WriteResult.STORED] * 3
    buffers = [aligned_buffer(chunk.data.nbytes) for chunk in chunks]
    assert await backend.read([chunk.key for chunk in chunks], buffers) == [ReadResult.HIT] * 3
    for chunk, buffer in zip(chunks, buffers, strict=True):
        assert (tmp_path / object_name(chunk.key)).read_bytes() == chunk.data == buffer
    assert backend.counters()["bytes_written"] == sum(chunk.data.nbytes for chunk in chunks)
    await backend.close()


@pytest.mark.usefixtures("nixl")
async def test_what_crashes_have_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    old, new = unfinished / "old", unfinished / "new"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    backend = NixlBackend(NixlOptions(path=str(tmp_path)))
    await backend.open()
    await backend.close()
    assert [each.name for each in unfinished.iterdir()] == ["new"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.needs_root
@pytest.mark.usefixtures("nixl")
async def test_a_full_file_system_stores_nothing_and_loses_nothing(small: Path) -> None:
    backend = NixlBackend(NixlOptions(path=str(small)))
    await backend.open()
    chunks = [make_chunk(make_key(number), MIB) for number in range(12)]
    results = [result for chunk in chunks for result in await backend.write([chunk])]
    assert results.count(WriteResult.STORED) >= 6
    assert results[-1] is WriteResult.FULL
    assert await backend.write([make_chunk(chunks[0].key, 9 * MIB)]) == [WriteResult.FULL]
    buffer = aligned_buffer(MIB)
    assert await backend.read([chunks[0].key], [buffer]) == [ReadResult.HIT]
    assert buffer == chunks[0].data
    assert list((small / "unfinished").iterdir()) == []
    assert backend.counters()["full"] == results.count(WriteResult.FULL) + 1
    await backend.close()


@pytest.mark.usefixtures("nixl")
async def test_a_file_that_ends_in_the_middle_of_a_read_fails_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = NixlBackend(NixlOptions(path=str(tmp_path), threads=1))
    await backend.open()
    chunk = make_chunk(make_key(1), MIB)
    assert await backend.write([chunk]) == [WriteResult.STORED]
    file = tmp_path / object_name(chunk.key)
    real = os.fstat

    def stale(fd: int) -> os.stat_result:
        """The size that it had until just now."""
        known = real(fd)
        os.truncate(file, 4 * KIB)
        return os.stat_result((*known[:6], MIB, *known[7:10]))

    monkeypatch.setattr("lmcache_backends.nixl.files.os.fstat", stale)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BackendError, match="reading from a file by POSIX failed"):
        await backend.read([chunk.key], [aligned_buffer(MIB)])
    assert len(os.listdir("/proc/self/fd")) == open_before
    await backend.close()


STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefghij")
"""


@pytest.mark.usefixtures("nixl")
def test_what_one_process_stores_another_finds(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\n"
        f"page_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: nixl\n    path: {tmp_path}/kv\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", STORES, str(file)], check=True, cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == ""
    with Cache.open(file, namespace()) as cache:
        assert retrieve(cache, "abcdefghij") == 10
        assert retrieve(cache, "abcdxy") == 4
        assert retrieve(cache, "zz") == 0


def test_the_page_has_examples_that_load_and_every_counter() -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert examples
    for example in examples:
        (tier,) = load_config(example).config.tiers
        assert isinstance(tier.options, NixlOptions)
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert [name for name in Tally().counts() if name not in told] == []


@pytest.mark.usefixtures("nixl")
async def test_many_at_once(tmp_path: Path) -> None:
    backend = NixlBackend(NixlOptions(path=str(tmp_path), threads=8))
    await backend.open()
    chunks = [make_chunk(make_key(number), 256 * KIB) for number in range(64)]
    await asyncio.gather(*(backend.write([chunk]) for chunk in chunks))
    buffers = [aligned_buffer(256 * KIB) for _ in chunks]
    reads = [backend.read([chunk.key], [buffer]) for chunk, buffer in zip(chunks, buffers, strict=True)]
    assert await asyncio.gather(*reads) == [[ReadResult.HIT]] * 64
    assert all(buffer == chunk.data for chunk, buffer in zip(chunks, buffers, strict=True))
    await backend.close()
