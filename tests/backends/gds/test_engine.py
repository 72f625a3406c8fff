"""An engine whose chunks come from the tier straight to its device, which is the host's memory here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_backends.gds import GdsBackend, GdsOptions
from lmcache_backends.nfs import sweep
from lmcache_core import Cache
from lmcache_core.config import Config, convert
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, ReadsBeside
from lmcache_core.service.remote import RemoteClient
from tests.backends.gds.kit import options
from tests.backends.gds.standin import Memory, StandIn
from tests.connectors.vllm.world import World, open_world, prompt
from tests.node import kv

PAST = {"past_host": True, "layerwise": True, "sync_load": 0.0}


class Anywhere(Memory):
    """Memory of a device that is wherever an engine has it."""

    def at(self, address: int, nbytes: int) -> memoryview:
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


@pytest.fixture
def anywhere(standin: StandIn) -> StandIn:
    standin.memory = Anywhere()
    return standin


def counters(world: World) -> dict[str, int]:
    return dict(DirectClient(world.node).stats().tiers[0].counters)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("anywhere")
def test_a_hit_comes_past_the_host(path: Path, ranks: int, trust: bool) -> None:
    backend = GdsBackend(options(path, trust=trust))
    with open_world(backend, options=PAST, ranks=ranks, blocks=200) as world:
        world.generate("a", prompt("abcde12"))
        world.forget("cpu")
        assert world.generate("b", prompt("abcde12")) == 80
        counted = counters(world)
        assert counted["direct_bytes_read"] >= 5 * 1024 * ranks
        assert (counted["direct_verified_bytes"] == 0) == trust
        assert counted["direct_corrupt"] == 0
        world.at_rest()


@pytest.mark.usefixtures("anywhere")
def test_a_damaged_file_is_no_hit_on_either_way(path: Path) -> None:
    with open_world(GdsBackend(options(path)), options=PAST, blocks=200) as world:
        world.generate("a", prompt("abcdef"))
        world.forget("cpu")
        damaged = 0
        for file in path.rglob("*"):
            if file.is_file() and file.stat().st_size > 4096:
                with file.open("r+b") as opened:
                    opened.seek(4096 + 100)
                    byte = opened.read(1)
                    opened.seek(-1, 1)
                    opened.write(bytes([byte[0] ^ 1]))
                damaged += 1
        assert damaged == 3
        assert world.generate("b", prompt("abcdef")) == 0
        assert counters(world)["direct_corrupt"] >= 1
        world.at_rest()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("anywhere")
def test_workers_in_other_processes_read_beside_the_node(path: Path, ranks: int, tmp_path: Path) -> None:
    with open_world(GdsBackend(options(path)), options=PAST, ranks=ranks, blocks=200, socket=tmp_path) as world:
        world.generate("a", prompt("abcde12"))
        world.forget("cpu")
        assert world.generate("b", prompt("abcde12")) == 80
        counts = DirectClient(world.node).stats().counts
        assert counts["past_host_bytes"]["t0"] == 5 * 1024 * ranks
        assert "read_bytes" not in counts, "nothing came to the pool"
        world.at_rest()


@pytest.mark.usefixtures("anywhere")
def test_a_client_opens_what_the_node_s_file_says(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings of the tier come to the other process, where nothing is swept."""
    swept: list[sweep.Sweeper] = []

    class Seen(sweep.Sweeper):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            swept.append(self)

    monkeypatch.setattr("lmcache_backends.nfs.session.Sweeper", Seen)
    tier = {
        **{"backend": "gds", "name": "drive", "path": str(path), "capacity": "64MiB", "ttl": "7d", "threads": 3},
        **{"direct": "never", "trust": True, "read_timeout": "3s", "breaker": {"failures": 7}},
    }
    config = {
        "chunk_tokens": kv.CHUNK_TOKENS,
        "page_tokens": kv.PAGE_TOKENS,
        "cpu": {"capacity": "4MiB"},
        "tiers": [tier],
        "socket": str(tmp_path / "node"),
    }
    memory = (ctypes.c_char * (4 * kv.PAGE_BYTES))()
    with Cache.open(config, kv.namespace()) as cache:
        kv.store(cache, "abcd")
        cache.clear(["cpu"])
        client = RemoteClient(config["socket"], Config(call_timeout=10.0), past_host=True)  # type: ignore[arg-type]
        readers = client._readers
        assert readers is not None
        kv.until(lambda: not readers.opening)
        told, meant = readers._readers[0]._config, cache.client.node.config.tiers[0]  # type: ignore[attr-defined]
        assert msgspec.structs.replace(told, options=meant.options) == meant
        assert convert(told.options, GdsOptions) == meant.options
        held = client.hold(client.register(kv.namespace()), cache.prompt(kv.tokens("abcd")).keys)
        found = client.past_host(held, 0)
        assert found is not None
        assert (found.tier, found.nbytes) == ("drive", len(memory))
        reading = client.read_past_host(found, ctypes.addressof(memory), fail)
        assert reading.ended.result(5) == [ReadResult.HIT]
        assert bytes(memory) == b"".join(bytes(kv.page(key)) for key in cache.prompt(kv.tokens("abcd")).keys)
        client.release(held)
        client.close()
        assert len(swept) == 1, "by the node"


def fail(address: int, into: memoryview) -> None:
    raise AssertionError("the tier is trusted")


def test_it_can_be_read_beside(path: Path) -> None:
    backend = GdsBackend(options(path, trust=True, threads=3))
    assert isinstance(backend, ReadsBeside)
    assert backend.reader()._gds == backend._gds


async def test_what_is_opened_beside_the_node_makes_nothing(path: Path, standin: StandIn) -> None:
    reader = GdsBackend(options(path)).reader()
    with pytest.raises(BackendError, match="is not there for this process, which reads beside its node; mount it here"):
        await reader.open()
    assert not path.exists()
    await reader.close()
