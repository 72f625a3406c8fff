"""From the device to the host pool, to our tiers, to another tree's host pool and to its device: the same bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

from lmcache_core.config import Config, CpuConfig
from lmcache_core.connectors.sglang.pagestore import PageStore
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.service.server import NodeServer
from tests.sglang.engine import prompt
from tests.sglang.tree import Tree

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KINDS = [
    *(pytest.param(layout, False, id=f"heads-{layout}") for layout in LAYOUTS),
    *(pytest.param(layout, True, id=f"latents-{layout}") for layout in LAYOUTS[:3]),  # all that SGLang has for them
]
WAYS = list(itertools.product((True, False), repeat=2))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Any]:
    """A node of its own, for trees that come and go."""
    with Node(Config(64, 16, CpuConfig(capacity=64 << 20))) as made:
        made.servers.append(NodeServer(made, str(tmp_path / "s")))
        yield made


@pytest.fixture
def cache(node: Any, tmp_path: Path) -> dict[str, Any]:
    return {"connect": str(tmp_path / "s")}


@pytest.mark.parametrize(("layout", "latent"), KINDS)
@pytest.mark.parametrize(("stored", "read"), WAYS, ids=["v1-v1", "v1-v0", "v0-v1", "v0-v0"])
def test_bytes_are_the_same_in_another_tree(
    cache: dict[str, Any], layout: str, latent: bool, stored: bool, read: bool
) -> None:
    tokens = prompt(1, 96)
    with Tree(cache, layout, latent=latent, v1=stored) as tree:
        want = tree.compute(tokens)
    with Tree(cache, layout, latent=latent, v1=read) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == 96
        got = tree.load(tokens)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert tree.backend.faults == 0


def test_a_conversation_that_grows_is_stored_in_whole_chunks(cache: dict[str, Any], node: Any) -> None:
    tokens = prompt(1, 304)
    with Tree(cache, "page_first") as tree:
        for end in (96, 112, 208, 304):
            want = tree.compute(tokens[:end])
    assert DirectClient(node).stats().chunks == 5  # four of 64 tokens, and one of 48
    with Tree(cache, "page_first") as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == 304
        assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens), want, strict=True))


def test_layouts_do_not_meet(cache: dict[str, Any]) -> None:
    tokens = prompt(1, 96)
    for layout in LAYOUTS:
        with Tree(cache, layout) as tree:
            assert tree.prefetch(tokens) == 0
            tree.compute(tokens)


@pytest.mark.parametrize("page", [1, 4, 64])
def test_pages_of_other_sizes(cache: dict[str, Any], page: int) -> None:
    tokens = prompt(1, 192)
    with Tree(cache, "page_first", page=page) as tree:
        want = tree.compute(tokens)
    with Tree(cache, "page_first", page=page) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 64)]) == 192
        assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens), want, strict=True))


def test_without_the_keys_of_the_prefix(cache: dict[str, Any]) -> None:
    tokens = prompt(1, 304)
    with Tree(cache, "page_first", hicache_storage_pass_prefix_keys=False) as tree:
        for end in (96, 112, 208, 304):
            want = tree.compute(tokens[:end])
    with Tree(cache, "page_first", hicache_storage_pass_prefix_keys=False) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == 304
        assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens), want, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [16, 32, 40])
def test_layers_with_a_window_come_with_those_without(cache: dict[str, Any], layout: str, window: int) -> None:
    tokens = prompt(1, 160)
    with Tree(cache, layout, window=window) as tree:
        want = tree.compute(tokens)
        assert tree.backend.faults == 0
    with Tree(cache, layout, window=window) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == 160
        got = tree.load(tokens)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert tree.backend.faults == 0


def test_a_prefix_whose_window_is_gone_is_not_restored(cache: dict[str, Any]) -> None:
    tokens = prompt(1, 160)
    with Tree(cache, "page_first", window=32) as tree:
        tree.compute(tokens)
        tree.backend._stores().sidecars["swa"].clear()
        assert tree.backend.batch_exists(tree.hashes(tokens)) == 10
    with Tree(cache, "page_first", window=32) as tree:
        assert tree.prefetch([*tokens, *prompt(2, 32)]) == 0


def test_clear_and_detach(cache: dict[str, Any]) -> None:
    tokens = prompt(1, 96)
    with Tree(cache, "page_first") as tree:
        tree.compute(tokens)
        backend = tree.backend
        assert tree.cache.clear_storage_backend()
        assert tree.cache.detach_storage_backend()[0]
        assert backend.batch_exists(["0" * 64]) == 0
        assert backend.batch_get_v1(["0" * 64], torch.arange(16)) == [False]
    with Tree(cache, "page_first") as tree:
        assert tree.prefetch(tokens) == 0


@pytest.mark.parametrize("method", ["exists", "get", "set"])
def test_an_exception_of_ours_ends_no_thread_of_sglang_s(
    cache: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look up, read and store again as soon as it is over."""
    tokens = prompt(1, 96)

    def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    with Tree(cache, "page_first") as tree:
        with monkeypatch.context() as breaking:
            breaking.setattr(PageStore, method, broken)
            tree.compute(prompt(2, 96))
            tree.prefetch(tokens)
        assert all(thread.is_alive() for thread in tree.threads)
        want = tree.compute(tokens)
    with Tree(cache, "page_first") as tree:
        with monkeypatch.context() as breaking:
            breaking.setattr(PageStore, method, broken)
            assert tree.prefetch([*tokens, *prompt(3, 32)]) == (96 if method == "set" else 0)
        assert all(thread.is_alive() for thread in tree.threads)
        assert bool(tree.backend.faults) is (method != "set")
    with Tree(cache, "page_first") as tree:
        assert tree.prefetch([*tokens, *prompt(4, 32)]) == 96
        assert all(torch.equal(a, b) for a, b in zip(tree.load(tokens), want, strict=True))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own: calls that fail before they come to the backend, or come late."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    chosen = random.Random(1)  # which calls fail is the same in each run
    monkeypatch.setattr(HiCacheStorageFailureInjector, "_thread_local_random", lambda self: chosen)


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("v1", [True, False], ids=["v1", "v0"])
@pytest.mark.parametrize(("layout", "latent"), KINDS)
def test_with_sglang_s_own_faults(cache: dict[str, Any], layout: str, latent: bool, v1: bool) -> None:
    """What comes is right, no thread has died, and something comes."""
    wants = []
    with Tree(cache, layout, latent=latent, v1=v1) as tree:
        for seed in range(8):
            wants.append(tree.compute(prompt(seed, 96)))
        assert all(thread.is_alive() for thread in tree.threads)
    come = 0
    with Tree(cache, layout, latent=latent, v1=v1) as tree:
        for seed, want in enumerate(wants):
            there = tree.prefetch([*prompt(seed, 96), *prompt(99, 32)])
            come += there
            if there:
                got = tree.load(prompt(seed, 96)[:there])
                assert all(torch.equal(a, b[:there]) for a, b in zip(got, want, strict=True))
        assert all(thread.is_alive() for thread in tree.threads)
        assert tree.backend._backend.faults == 0
    assert come > 0


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_sglang_s_own_faults_and_a_window(cache: dict[str, Any], layout: str) -> None:
    wants = []
    with Tree(cache, layout, window=32) as tree:
        for seed in range(8):
            wants.append(tree.compute(prompt(seed, 96)))
        assert all(thread.is_alive() for thread in tree.threads)
    come = 0
    with Tree(cache, layout, window=32) as tree:
        for seed, want in enumerate(wants):
            there = tree.prefetch([*prompt(seed, 96), *prompt(99, 32)])
            come += there
            if there == 96:
                got = tree.load(prompt(seed, 96))
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(thread.is_alive() for thread in tree.threads)
    assert come > 0
