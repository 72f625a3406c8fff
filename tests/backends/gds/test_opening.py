"""What users write, which mode comes of it, and what is told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.gds import GdsBackend, GdsOptions
from lmcache_backends.gds import library as library_module
from lmcache_backends.gds.tally import Tally
from lmcache_backends.nfs import NfsBackend, NfsOptions
from lmcache_backends.nfs.directory import open_root
from lmcache_core import Cache
from lmcache_core.config import InvalidSetting, load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.iocalls import IoCalls
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import (
    Abortable,
    CostlyProbes,
    CountsEvents,
    Describes,
    DeviceDirect,
    Lists,
    ReadResult,
    ReadsShorter,
    RemembersUse,
    WriteResult,
)
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.gds.kit import framed, opened, options, value
from tests.backends.gds.standin import CompatMode, StandIn
from tests.backends.nfs.kit import opened as opened_as_nfs
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_TOKENS, namespace, retrieve

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "backends" / "gds.md"
SIZE = 64 * 2**10


def test_the_plugin_is_found_by_its_name() -> None:
    plugin = load_backend("gds")
    assert plugin.options_type is GdsOptions
    backend = plugin.create(convert({"path": "/nvme/kv", "compat": "never", "capacity": "1TiB"}, GdsOptions))
    for capability in (CostlyProbes, CountsEvents, Describes, DeviceDirect, Lists, ReadsShorter, RemembersUse):
        assert isinstance(backend, capability)
    assert not isinstance(backend, Abortable)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "gds: path is empty; write the directory that shall hold the cache"),
        ({"path": "kv"}, "gds: path 'kv' must be absolute; write it from / on"),
        ({"path": "/"}, "gds: path is /; write a directory for the cache alone, as in /mnt/kv"),
        ({"ttl": "0s"}, "gds: ttl must be 1s or more"),
        ({"compat": "off"}, "tiers[0].compat: 'off' is not possible; write one of auto, always, never"),
        ({"host_memory": "cufile"}, "tiers[0].host_memory: 'cufile' is not possible; write one of plain, kvikio"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    wanted = {"path": "/mnt/kv"} | changes
    file = tmp_path / "node.yaml"
    lines = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in wanted.items())
    file.write_text(f"tiers:\n  - backend: gds\n{lines}")
    (key,) = changes
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{3 + list(wanted).index(key)}: ")
    assert message in str(caught.value)


def told_without(*modules: str, path: Path, **variables: str) -> str:
    code = f"""
import asyncio, sys
for name in {modules!r}:
    sys.modules[name] = None
from lmcache_backends.gds import GdsBackend, GdsOptions
try:
    asyncio.run(GdsBackend(GdsOptions(path={str(path)!r})).open())
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


def test_what_is_not_installed_is_named_when_it_is_needed(path: Path) -> None:
    assert told_without("kvikio", path=path) == (
        "ConfigError gds: KvikIO is not installed; pip install 'lmcache-core[gds]'\n"
    )
    assert not path.exists()


@pytest.mark.usefixtures("real")
def test_what_kvikio_lacks_is_named(path: Path) -> None:
    told = told_without("kvikio._lib.defaults", path=path)
    assert told.startswith("ConfigError gds: KvikIO ")
    told = told_without("numpy", "libkvikio", path=path)
    assert re.fullmatch(
        r"ConfigError gds: KvikIO cannot be loaded: .+; install what it lacks, or another build of it\n", told
    )


async def mode(path: Path, caplog: pytest.LogCaptureFixture, **changes: Any) -> list[str]:
    """The lines that opening it three times writes."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        backend = GdsBackend(options(path, **changes))
        for _ in range(3):
            await backend.open()
        await backend.close()
    return [record.getMessage().removeprefix(f"gds: {path}: ") for record in caplog.records]


async def test_each_mode_has_one_line_that_says_why(
    standin: StandIn, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await mode(path, caplog) == []
    monkeypatch.setattr(library_module, "_NVIDIA_FS", "/nowhere")
    assert await mode(path, caplog) == [
        "cuFile: nvidia-fs is not loaded, so cuFile itself copies through host memory where a drive cannot do without; "
        "see `gdscheck -p`"
    ]
    standin.cufile_driver.error = RuntimeError(
        "cuFile error at: /kvikio/cpp/src/driver.cpp:30: NVFS driver initialization error"
    )
    assert await mode(path, caplog) == [
        "compatibility mode: cuFile does not start (NVFS driver initialization error); see `gdscheck -p` and cufile.log"
    ]
    standin.defaults.cufile = False
    monkeypatch.setattr(library_module, "_UDEV", str(path))
    assert await mode(path, caplog) == [
        "compatibility mode: KvikIO finds no cuFile; install nvidia-cufile-cu12, or CUDA's own"
    ]
    monkeypatch.setattr(library_module, "_UDEV", "/nowhere")
    assert await mode(path, caplog) == [
        "compatibility mode: cuFile needs /nowhere, which cannot be read; in a container, --volume /nowhere:/nowhere:ro"
    ]
    standin.defaults.set("compat_mode", CompatMode.ON)
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    assert await mode(path, caplog) == ["compatibility mode: as KVIKIO_COMPAT_MODE=ON asks for"]
    assert await mode(path, caplog, compat="always") == ["compatibility mode: as `compat: always` asks for"]
    monkeypatch.setattr(library_module, "_DRIVER", "libnone.so.1")
    (line,) = await mode(path, caplog)
    assert line.startswith("compatibility mode: there is no CUDA driver (libnone.so.1: cannot open shared object file")
    assert line.endswith("moved by plain reads and writes; install NVIDIA's driver, or take nfs or disk")


async def test_never_compatibility_mode_is_refused_where_there_is_nothing_else(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path, compat="never"):
        assert standin.defaults.get("compat_mode") is CompatMode.OFF
    standin.cufile_driver.error = RuntimeError("NVFS driver initialization error")
    with pytest.raises(ConfigError, match=r"^gds: compat: never, but cuFile does not start \(NVFS driver init.*write "):
        await GdsBackend(options(path, compat="never")).open()
    monkeypatch.setattr(library_module, "_DRIVER", "libnone.so.1")
    with pytest.raises(
        ConfigError, match=r"^gds: compat: never, but there is no CUDA driver .*; or write compat: auto$"
    ):
        await GdsBackend(options(path, compat="never")).open()
    assert standin.defaults.get("compat_mode") is CompatMode.AUTO, "nothing is left of it"


async def test_one_process_has_one_mode(standin: StandIn, path: Path, tmp_path: Path) -> None:
    async with opened(path, compat="always"):
        assert standin.defaults.get("compat_mode") is CompatMode.ON
        with pytest.raises(ConfigError, match="gds: compat: auto and always cannot both be in one process"):
            await GdsBackend(options(tmp_path / "other")).open()
        async with opened(tmp_path / "third", compat="always"):
            pass
        assert standin.defaults.get("compat_mode") is CompatMode.ON
    assert standin.defaults.get("compat_mode") is CompatMode.AUTO
    async with opened(tmp_path / "other"):
        pass


@pytest.mark.parametrize("reason", ["path", "driver"])
async def test_an_opening_that_fails_leaves_nothing_to_others(
    standin: StandIn, path: Path, tmp_path: Path, reason: str
) -> None:
    """Neither what it had claimed nor what it had set."""
    (tmp_path / "file").write_text("in the way")
    at_first = dict(standin.defaults.values)
    if reason == "path":
        bad = GdsBackend(options(tmp_path / "file" / "kv", compat="always", direct="never"))
        expected: type[Exception] = InvalidSetting
    else:
        standin.cufile_driver.error = RuntimeError("NVFS driver initialization error")
        bad = GdsBackend(options(path, compat="never", direct="never"))
        expected = ConfigError
    for _ in range(2):
        with pytest.raises(expected):
            await bad.open()
        assert standin.defaults.values == at_first | {"num_threads": 8}
    standin.cufile_driver.error = None
    for compat in ("auto", "always"):
        async with opened(tmp_path / "other", compat=compat):
            pass


async def test_an_opening_that_is_cancelled_leaves_nothing_to_others(
    standin: StandIn, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hangs(*arguments: Any, **named: Any) -> int:
        begun.set()
        gate.wait()
        return open_root(*arguments, **named)

    monkeypatch.setattr("lmcache_backends.nfs.session.open_root", hangs)
    backend = GdsBackend(options(path, compat="always"))
    opening = asyncio.ensure_future(backend.open())
    await asyncio.to_thread(begun.wait)
    opening.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with opened(tmp_path / "other"):
        assert standin.defaults.get("compat_mode") is CompatMode.AUTO


async def test_a_tier_that_cannot_be_opened_again_holds_nothing_any_more(
    standin: StandIn, path: Path, tmp_path: Path
) -> None:
    async with opened(path, compat="always") as backend:
        path.rename(tmp_path / "elsewhere")
        path.write_text("in the way")
        with pytest.raises(InvalidSetting):
            await backend.open()
        async with opened(tmp_path / "other"):
            assert standin.defaults.get("compat_mode") is CompatMode.AUTO


async def test_kvikio_gets_as_many_threads_as_the_tier_has_and_keeps_more(standin: StandIn, path: Path) -> None:
    """Setting them waits for all that is under way: it is done only where it must."""
    for threads, expected, times in ((4, 4, 1), (8, 8, 2), (2, 8, 2), (8, 8, 2)):
        async with opened(path, threads=threads):
            assert standin.defaults.get("num_threads") == expected
            assert standin.defaults.changed.count("num_threads") == times


@asynccontextmanager
async def told(path: Path, caplog: pytest.LogCaptureFixture, **changes: Any) -> AsyncIterator[list[str]]:
    """An open tier, and the lines that its opening has written."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        async with opened(path, **changes):
            yield [record.getMessage().removeprefix(f"gds: {path}: ") for record in caplog.records]


async def test_the_first_tier_decides_how_many_threads_kvikio_has(
    standin: StandIn, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Setting them beside transfers would leave some waiting for ever."""
    async with told(path, caplog, threads=4) as lines:
        assert lines == []
        async with told(tmp_path / "fewer", caplog, threads=3) as lines:
            assert lines == []
        async with told(tmp_path / "more", caplog, threads=8) as lines:
            assert lines == [
                "KvikIO has 4 threads for all tiers of this process, not 8: it gets them when the first of them is "
                "opened; write the same `threads` for all"
            ]
            assert standin.defaults.get("num_threads") == 4
    assert standin.defaults.changed.count("num_threads") == 1
    async with told(tmp_path / "more", caplog, threads=8) as lines:
        assert lines == []
        assert standin.defaults.get("num_threads") == 8


@pytest.mark.parametrize("verb", ["read", "write", "read_direct", "write_direct"])
async def test_threads_stay_as_they_are_beside_what_still_hangs(
    standin: StandIn,
    path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    monkeypatch.setattr("lmcache_backends.nfs.session._LAST_CALLS", 0.05)
    one = framed()
    device = standin.memory
    said = (
        "KvikIO keeps 4 threads, not 8: what an earlier opening has begun still hangs, and setting them would stop it "
        "for good; they are set at an opening after it has ended"
    )
    async with opened(path, threads=4, host_memory="kvikio") as backend:
        await backend.write([one.plain()])
        standin.entered.acquire()
        standin.gate.clear()
        calls: dict[str, Any] = {
            "read": lambda: backend.read([one.chunk.key], [aligned_buffer(one.form.nbytes)]),
            "write": lambda: backend.write([one.plain()]),
            "read_direct": lambda: backend.read_direct(
                [one.pages(0, 0, 4, device.allocate(one.form.shard_bytes))], device.copy_back
            ),
            "write_direct": lambda: backend.write_direct([one.on(device)], device.copy_back),
        }
        call = asyncio.ensure_future(calls[verb]())
        await asyncio.to_thread(standin.entered.acquire)
    try:
        async with told(tmp_path / "more", caplog, threads=8) as lines:
            assert lines == [said]
            assert standin.defaults.get("num_threads") == 4
    finally:
        standin.gate.set()
    assert await call in ([ReadResult.HIT], [WriteResult.STORED])
    async with told(tmp_path / "more", caplog, threads=8) as lines:
        assert lines == []
        assert standin.defaults.get("num_threads") == 8


async def test_the_first_tier_decides_about_the_page_cache(
    standin: StandIn, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("auto_direct_io_read", "auto_direct_io_write")
    at_first = [standin.defaults.get(name) for name in names]
    for first, others, way in (("never", ("auto", "always"), "through"), ("auto", ("never",), "past")):
        async with told(path, caplog, direct=first) as lines:
            assert lines == []
            for direct in others:
                async with told(tmp_path / "other", caplog, direct=direct) as lines:
                    assert lines == [
                        f"direct: {direct}, but KvikIO goes {way} the page cache for all tiers of this process, as the "
                        "first of them asks for; write the same `direct` for all"
                    ]
                assert [standin.defaults.get(name) for name in names] == [first != "never"] * 2
        assert [standin.defaults.get(name) for name in names] == at_first, "put back"


async def test_a_tier_that_is_opened_again_alone_decides_anew(standin: StandIn, path: Path, tmp_path: Path) -> None:
    async with opened(path, direct="never", threads=2), opened(tmp_path / "more", threads=9) as more:
        assert standin.defaults.get("num_threads") == 2
        await more.open()
        assert standin.defaults.get("num_threads") == 2
    async with opened(tmp_path / "more", threads=9) as more:
        await more.open()
        assert standin.defaults.get("num_threads") == 9
        assert standin.defaults.get("auto_direct_io_read") is True
    assert standin.defaults.get("auto_direct_io_read") is False


async def test_what_the_environment_asks_for_and_cannot_be_is_replaced_by_compatibility_mode(
    standin: StandIn, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KvikIO itself would fail each transfer."""
    standin.cufile_driver.error = RuntimeError(
        "cuFile error at: /k/src/driver.cpp:30: NVFS driver initialization error"
    )
    for asked, though in ((CompatMode.OFF, ", though KVIKIO_COMPAT_MODE=off asks for it"), (CompatMode.AUTO, "")):
        monkeypatch.setenv("KVIKIO_COMPAT_MODE", asked.name.lower())
        standin.defaults.values["compat_mode"] = asked
        why = (
            f"compatibility mode: cuFile does not start (NVFS driver initialization error){though}; see `gdscheck -p` "
            "and cufile.log"
        )
        async with told(path, caplog) as lines:
            assert lines == [why]
            assert standin.defaults.get("compat_mode") is CompatMode.ON
            async with told(tmp_path / "other", caplog) as lines:
                assert lines == [why]
        assert standin.defaults.get("compat_mode") is asked, "put back"
    standin.cufile_driver.error = None
    async with told(path, caplog) as lines:
        assert lines == []


async def test_a_cufile_that_starts_by_now_is_used_when_the_only_tier_is_opened_again(
    standin: StandIn, path: Path
) -> None:
    standin.cufile_driver.error = RuntimeError("NVFS driver initialization error")
    async with opened(path) as backend:
        assert standin.defaults.get("compat_mode") is CompatMode.ON
        standin.cufile_driver.error = None
        await backend.open()
        assert standin.defaults.get("compat_mode") is CompatMode.AUTO


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("variable", "text"), [("KVIKIO_COMPAT_MODE", "bogus"), ("KVIKIO_NTHREADS", "x"), ("KVIKIO_TASK_SIZE", "0")]
)
def test_a_variable_that_kvikio_does_not_understand_is_named(path: Path, variable: str, text: str) -> None:
    line = told_without(path=path, **{variable: text})
    assert line.startswith(f"ConfigError gds: {variable}={text} is nothing that KvikIO takes (")
    assert line.endswith("); correct or unset it\n")
    assert "/__w/" not in line
    assert not path.exists()


async def test_what_lacks_for_devices_is_told_when_the_tier_is_opened(
    standin: StandIn, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.defaults.cufile = False
    monkeypatch.setattr(library_module, "_GPUS", ("/nowhere/gpu", "/nowhere/other"))
    async with told(path, caplog) as lines:
        assert lines == [
            "compatibility mode: there is a CUDA driver, but no GPU is to be seen (/nowhere/gpu is missing); give this "
            "process one, as `--gpus all` does in a container, or take nfs or disk"
        ]
    monkeypatch.setattr(library_module, "_FDS", "/nowhere/fd")
    one = framed()
    async with opened(path) as backend:
        with pytest.raises(
            BackendError, match="/nowhere/fd cannot be read, by which KvikIO is given open files; mount"
        ):
            await backend.write_direct([one.on(standin.memory)], standin.memory.copy_back)
        await backend.write([one.plain()])
        assert await value(backend, one.chunk.key, one.form.nbytes) == one.frame
    with pytest.raises(ConfigError, match=r"compat: never, but /nowhere/fd cannot be read"):
        await GdsBackend(options(path, compat="never")).open()


@pytest.mark.parametrize("direct", ["auto", "never"])
async def test_the_page_cache_is_passed_by_unless_it_is_wanted(standin: StandIn, path: Path, direct: str) -> None:
    async with opened(path, direct=direct):
        for name in ("auto_direct_io_read", "auto_direct_io_write"):
            assert standin.defaults.get(name) is (direct == "auto")


async def test_without_a_driver_host_memory_works_and_a_device_is_refused(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "_DRIVER", "libnone.so.1")
    one = framed()
    async with opened(path, host_memory="kvikio") as backend:
        assert await backend.write([one.plain()]) == [WriteResult.STORED]
        assert await value(backend, one.chunk.key, one.form.nbytes) == one.frame
        for call in (
            backend.read_direct([one.pages(0, 0, 1, 4096)], standin.memory.copy_back),
            backend.write_direct([one.on(standin.memory)], standin.memory.copy_back),
        ):
            with pytest.raises(BackendError, match=r"there is no CUDA driver .*; until then read through host memory"):
                await call
    assert standin.calls == []


async def test_host_memory_is_moved_by_what_was_asked_for(standin: StandIn, path: Path) -> None:
    chunk = make_chunk(make_key(1), SIZE)
    async with opened(path) as backend:
        await backend.write([chunk])
        assert await value(backend, chunk.key, SIZE) == chunk.data
        assert standin.calls == []
    async with opened(path, host_memory="kvikio") as backend:
        await backend.write([chunk])
        assert await value(backend, chunk.key, SIZE) == chunk.data
        assert standin.calls == [("pwrite", False, SIZE, 0, 1), ("pread", False, SIZE, 0, 1)]


async def test_nfs_and_gds_read_what_each_has_stored(path: Path, standin: StandIn) -> None:
    ours, theirs = make_chunk(make_key(1), SIZE), make_chunk(make_key(2), SIZE)
    async with opened(path) as gds, opened_as_nfs(path) as nfs:
        await gds.write([ours])
        await nfs.write([theirs])
        assert await gds.contains([theirs.key]) == await nfs.contains([ours.key]) == [True]
        assert await value(gds, theirs.key, SIZE) == theirs.data


async def test_a_path_that_is_not_shared_is_refused_only_on_demand(standin: StandIn, path: Path) -> None:
    with pytest.raises(BackendError, match=f"gds: {path}: nothing shared is mounted there"):
        await GdsBackend(options(path, must_be_mounted=True)).open()
    async with opened(path):
        assert path.is_dir()


STORES = """
import sys
from lmcache_core import Cache
from tests.node.kv import namespace, store
with Cache.open(sys.argv[1], namespace()) as cache:
    assert store(cache, "abcdefghij")
"""


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("host_memory", ["plain", "kvikio"])
def test_what_one_process_stores_another_finds(tmp_path: Path, host_memory: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\n"
        f"page_tokens: {PAGE_TOKENS}\n"
        f"cpu: {{capacity: {max(2**20, 16 * CHUNK_FRAME)}}}\n"
        f"tiers:\n  - backend: gds\n    path: {tmp_path}/kv\n    host_memory: {host_memory}\n"
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
        assert isinstance(tier.options, GdsOptions)
    told = set(re.findall(r"`([a-z_]+)`", text + (PAGE.parent / "nfs.md").read_text()))
    assert [name for name in Tally().counts() if name not in told] == []


async def test_an_opening_that_failed_lets_go_of_all_though_it_is_cancelled_then(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a node is closed while a tier cannot be opened."""
    path.write_text("in the way")
    closing, gate, closed = asyncio.Event(), asyncio.Event(), []
    before = IoCalls.close

    async def close(self: IoCalls, patience: float) -> None:
        closing.set()
        await gate.wait()
        await before(self, patience)
        closed.append(self)

    monkeypatch.setattr(IoCalls, "close", close)
    opening = asyncio.ensure_future(NfsBackend(NfsOptions(path=str(path), must_be_mounted=False)).open())
    await closing.wait()
    opening.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(closed) == 1
