"""A real engine on the CPU: what it has forgotten comes back from storage, and it answers the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import Config, CpuConfig
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.service.server import NodeServer
from tests.node.kv import until
from tests.sglang.engine import PAGE, Answer, Engine, extra_config, prompt
from tests.sglang.models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 404
WHOLE = TOKENS // PAGE * PAGE
CACHE: dict[str, Any] = {"cpu": {"capacity": "128MiB"}, "chunk_tokens": 64}


def on_disk(folder: Path) -> dict[str, Any]:
    return CACHE | {"tiers": [{"backend": "disk", "path": str(folder / "kv"), "capacity": "1GiB"}]}


def forgotten(engine: Engine, seed: int, **more: Any) -> tuple[Answer, Answer]:
    """The answer to a prompt, and again when the engine has forgotten it."""
    first = engine.generate(prompt(seed, TOKENS), **more)
    engine.flush()
    return first, engine.generate(prompt(seed, TOKENS), **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(model: Path, place: Path) -> Iterator[Engine]:
    with Engine(model, extra_config(on_disk(place))) as made:
        yield made


def test_what_was_forgotten_comes_from_storage(engine: Engine) -> None:
    first, again = forgotten(engine, 1)
    assert (first.cached, first.storage) == (0, 0)
    assert (again.cached, again.storage, again.backend) == (WHOLE, WHOLE, "HiCacheBackend")
    assert again.tokens == first.tokens
    assert len(set(first.tokens)) > 3  # an answer that tells something


def test_a_conversation_goes_on_where_it_was(engine: Engine) -> None:
    first = engine.generate(prompt(2, TOKENS), 64)
    turn = [*prompt(2, TOKENS), *first.tokens, *prompt(3, 200)]
    longer = engine.generate(turn)
    assert longer.cached >= WHOLE
    engine.flush()
    again = engine.generate(turn)
    assert again.storage == len(turn) // PAGE * PAGE
    assert again.tokens == longer.tokens


def test_another_salt_finds_nothing_and_the_same_does(engine: Engine) -> None:
    first, again = forgotten(engine, 4, salt="a")
    assert (first.cached, again.storage) == (0, WHOLE)
    assert again.tokens == first.tokens
    engine.flush()
    assert engine.generate(prompt(4, TOKENS), salt="b").cached == 0
    assert engine.generate(prompt(4, TOKENS)).cached == 0


def test_prompts_that_come_together(engine: Engine) -> None:
    prompts = [prompt(seed, TOKENS) for seed in range(20, 26)]
    first = engine.generate_all(prompts)
    engine.flush()
    again = engine.generate_all(prompts)
    assert [answer.storage for answer in again] == [WHOLE] * 6
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def test_a_new_process_finds_it_on_disk_until_its_weights_are_changed(
    engine: Engine, model: Path, place: Path, tmp_path: Path
) -> None:
    want, _ = forgotten(engine, 5)
    engine.generate(prompt(6, TOKENS))  # so that what was stored before is on the disk
    engine.close()
    other = make_model(tmp_path / "other", seed=1)
    with Engine(model, extra_config(on_disk(place)), max_total_tokens=4096) as second:
        got = second.generate(prompt(5, TOKENS))
        assert (got.cached, got.storage) == (WHOLE, WHOLE)
        assert got.tokens == want.tokens
        second.flush()  # it refuses an update while it is storing
        done, why = second.update(other)[:2]
        assert done, why
        new, renewed = forgotten(second, 5)
        assert (new.cached, renewed.storage) == (0, WHOLE)
        assert new.tokens == renewed.tokens != got.tokens


def test_two_ranks(model: Path, tmp_path: Path) -> None:
    """Before their weights are changed and after it, when they must agree on what those are."""
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with Engine(model, extra_config(CACHE), layout="layer_first", tp_size=2, environment=threads) as ranks:
        first, again = forgotten(ranks, 8)
        assert (first.cached, again.storage) == (0, WHOLE)
        assert again.tokens == first.tokens
        ranks.flush()
        done, why = ranks.update(make_model(tmp_path / "other", seed=1))[:2]
        assert done, why
        new, renewed = forgotten(ranks, 8)
        assert (new.cached, renewed.storage) == (0, WHOLE)
        assert new.tokens == renewed.tokens != first.tokens


def test_ranks_that_find_different_pages_use_what_all_of_them_have(model: Path) -> None:
    """Each rank's calls fail by themselves, so that they disagree about most prompts: nobody waits for another one, no
    answer is another, and what all have is used."""
    faults = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.1",  # of four that a prompt needs in each of two ranks
    }
    with Engine(model, extra_config(CACHE), tp_size=2, environment=faults) as ranks:
        storage = []
        for seed in range(40, 50):
            first, again = forgotten(ranks, seed)
            assert again.tokens == first.tokens
            storage.append(again.storage)
        assert WHOLE in storage


def test_sglang_s_own_faults_on_a_node_that_runs_by_itself(model: Path, tmp_path: Path) -> None:
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.15",  # so that all of ten prompts fail once in 10,000 runs
    }
    policy = {"hicache_storage_prefetch_policy": "timeout"}  # as it is by default
    with Node(Config(64, 64, CpuConfig(capacity=128 << 20))) as node:
        node.servers.append(NodeServer(node, str(tmp_path / "s")))
        extra = extra_config({"connect": str(tmp_path / "s")})
        with Engine(model, extra, environment=faults, layout="page_head", **policy) as engine:
            storage = 0
            for seed in range(10, 20):
                first, again = forgotten(engine, seed)
                assert again.tokens == first.tokens
                storage += again.storage
            assert storage > 0
        until(lambda: DirectClient(node).stats().leases == 0)  # it has been killed
        assert DirectClient(node).stats().chunks > 0
