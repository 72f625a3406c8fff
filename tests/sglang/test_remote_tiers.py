"""A conversation on tiers that are asked by name: all of it is found by an engine that starts anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from lmcache_core.errors import ConfigError
from tests.servers.redis import lacking, valkey
from tests.sglang.engine import prompt
from tests.sglang.tree import Tree

TURNS = (96, 112, 160, 208, 304, 384)
"""Where turns end: within chunks of 128 tokens and between them, some in the chunk in which another has ended."""
REMOTE = ["nfs", pytest.param("redis", marks=pytest.mark.skipif(bool(lacking("valkey")), reason=lacking("valkey")))]


@pytest.fixture(params=REMOTE)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 128}
    if request.param == "nfs":
        (tmp_path / "kv").mkdir()
        yield settings | {"tiers": [{"backend": "nfs", "path": str(tmp_path / "kv"), "must_be_mounted": False}]}
        return
    with valkey(tmp_path / "valkey") as server:
        yield settings | {"tiers": [{"backend": "redis", "url": server.url}]}


@pytest.mark.parametrize("window", [None, 32])
def test_a_conversation_is_found_whole_after_a_restart(cache: dict[str, Any], window: int | None) -> None:
    tokens = prompt(1, TURNS[-1])
    with Tree(cache, "page_first", window=window) as tree:
        for end in TURNS:
            want = tree.compute(tokens[:end])
        assert tree.backend.faults == 0
    with Tree(cache, "page_first", window=window) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == len(tokens)
        assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens), want, strict=True))
        assert tree.backend.faults == 0


def test_a_conversation_goes_on_after_each_restart(cache: dict[str, Any]) -> None:
    """Each engine has a turn, and all of what those before it have had."""
    tokens = prompt(1, TURNS[-1])
    want: list[torch.Tensor] = []
    for before, end in zip((0, *TURNS), TURNS, strict=False):
        with Tree(cache, "page_first") as tree:
            if before:
                assert tree.prefetch(tokens[: before + 16]) == before
                assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens[:before]), want, strict=True))
            want = tree.compute(tokens[:end])


@pytest.mark.parametrize("kept", [16, 96, 144, 256])
def test_an_engine_that_has_the_beginning_itself_finds_the_rest(cache: dict[str, Any], kept: int) -> None:
    """It asks from any page on, and tells what is in front of it."""
    tokens = prompt(1, TURNS[-1])
    with Tree(cache, "page_first") as tree:
        for end in TURNS:
            want = tree.compute(tokens[:end])
        names = tree.hashes(tokens)
    with Tree(cache, "page_first") as tree:
        pages = kept // tree.page
        told = HiCacheStorageExtraInfo(prefix_keys=names[:pages])
        host = tree.cache.cache_controller.mem_pool_host
        places = host.alloc(len(tokens) - kept)
        assert tree.backend.batch_exists(names[pages:], told) == len(names) - pages
        assert all(tree.backend.batch_get_v1(names[pages:], places, told))
        got = host.kv_buffer[:, places]  # [K, V][token][layer]
        keys, values = want[: len(want) // 2], want[len(want) // 2 :]
        for plane, wanted in zip(got, (keys, values), strict=True):
            assert all(torch.equal(plane[:, layer], each[kept:]) for layer, each in enumerate(wanted))


@pytest.mark.parametrize("flags", [{"v1": False}, {"hicache_storage_pass_prefix_keys": False}])
def test_without_the_place_of_a_run_it_is_refused(cache: dict[str, Any], flags: dict[str, Any]) -> None:
    """What would be found is the first turn, and what is asked for is often something else."""
    with pytest.raises(ConfigError, match=r"write .* without, .* and (nfs|redis) cannot$"):
        Tree(cache, "page_first", **flags)
