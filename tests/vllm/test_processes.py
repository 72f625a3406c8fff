"""Engines whose parts are in several processes, and engines that share a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.service.kit import serving
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt

PROMPT = prompt(61, 1100)
THERE = 1024
CACHE: dict[str, Any] = {"page_tokens": 128, "chunk_tokens": 256, "cpu": {"capacity": "64MiB"}}
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def computed_once(engine: Engine, plain: Plain) -> None:
    (expected,) = plain("llama", [PROMPT])
    for cached in (0, THERE, THERE):
        (answer,) = engine.generate([PROMPT])
        assert (answer.cached, answer.agrees(expected)) == (cached, True)
        engine.run(Inside.forget)


def test_an_engine_core_and_its_worker_in_processes_of_their_own(models: Models, plain: Plain) -> None:
    with Engine(models("llama"), CACHE, environment=APART) as engine:
        computed_once(engine, plain)


def test_two_ranks_hold_their_shards_of_every_chunk(models: Models, plain: Plain) -> None:
    with Engine(models("llama"), CACHE, environment=APART, tensor_parallel_size=2) as engine:
        computed_once(engine, plain)


def test_engines_that_share_a_node_share_what_they_have_computed(models: Models, plain: Plain, tmp_path: Path) -> None:
    (expected,) = plain("llama", [PROMPT])
    with serving(tmp_path, **CACHE) as (node, socket), Engine(models("llama"), {"connect": str(socket)}) as engine:
        for cached in (0, THERE):
            (answer,) = engine.generate([PROMPT])
            assert (answer.cached, answer.agrees(expected)) == (cached, True)
            engine.run(Inside.forget)
        engine.restart()
        (answer,) = engine.generate([PROMPT])
        assert (answer.cached, answer.agrees(expected)) == (THERE, True)
        engine.run(Inside.forget)
        node.kill()
        (answer,) = engine.generate([PROMPT])
        assert (answer.cached, answer.agrees(expected)) == (0, True)
