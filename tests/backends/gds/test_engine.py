"""An engine whose chunks come from the tier straight to its device, which is the host's memory here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from lmcache_backends.gds import GdsBackend
from lmcache_core.direct import DirectClient
from tests.backends.gds.kit import options
from tests.backends.gds.standin import Memory, StandIn
from tests.connectors.vllm.world import World, open_world, prompt

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
