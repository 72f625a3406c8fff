"""Engines whose parts are in several processes, and engines that share a node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.service.kit import serving
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Inside, prompt

PROMPT = prompt(61, 1100)
THERE = 1024
CACHE: dict[str, Any] = {"page_tokens": 128, "chunk_tokens": 256, "cpu": {"capacity": "64MiB"}}
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TOLD = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Workers, in processes of their own, may be told to run functions."""


def computed_once(engine: Engine, plain: Plain) -> None:
    (expected,) = plain("llama", [PROMPT])
    for cached in (0, THERE, THERE):
        (answer,) = engine.generate([PROMPT])
        assert (answer.cached, answer.agrees(expected)) == (cached, True)
        engine.run(Inside.forget)


def test_an_engine_core_and_its_worker_in_processes_of_their_own(models: Models, plain: Plain) -> None:
    with Engine(models("llama"), CACHE, environment=APART) as engine:
        computed_once(engine, plain)


@pytest.mark.timeout(300)  # four processes start one after another
def test_two_ranks_hold_their_shards_of_every_chunk_and_a_hit_is_what_both_can_load(
    models: Models, plain: Plain
) -> None:
    with Engine(models("llama"), CACHE, environment=TOLD, tensor_parallel_size=2) as engine:
        computed_once(engine, plain)
        (expected,) = plain("llama", [PROMPT])
        for lost, computed in [(2, THERE - 512), (0, THERE)]:
            answer, again = engine.run(ask_while_one_rank_lacks, lost)
            assert answer.agrees(expected)
            assert again == computed // 128
            engine.run(Inside.forget)
            (answer,) = engine.generate([PROMPT])
            assert (answer.cached, answer.agrees(expected)) == (THERE, True)
            engine.run(Inside.forget)
        assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


def ask_while_one_rank_lacks(inside: Inside, chunk: int) -> tuple[Answer, int]:
    """Returns how many blocks were said to be missing."""
    missing: list[int] = []
    told = inside.connector.update_connector_output

    def seen(output: Any) -> None:
        missing.append(len(output.invalid_block_ids))
        told(output)

    inside.connector.update_connector_output = seen
    assert inside.llm.collective_rpc(lose, args=(chunk,)) == [False, True]
    (answer,) = inside.generate([PROMPT])
    assert inside.llm.collective_rpc(find) == [False, True]
    del inside.connector.update_connector_output
    return answer, sum(missing)


def _client_of_the_second(worker: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._door.client() if worker.rank == 1 else None


def lose(worker: Any, chunk: int) -> bool:
    """On the second rank, have a chunk and what is behind it not be there when it is to be loaded."""
    client = _client_of_the_second(worker)
    if client is None:
        return False
    grant = client.grant
    client.grant = lambda held, start, ahead: grant(held, start, ahead)[: max(0, chunk - start)]
    return True


def find(worker: Any) -> bool:
    """Undo it."""
    client = _client_of_the_second(worker)
    if client is None:
        return False
    del client.grant
    return True


def test_engines_that_answer_at_the_same_time_share_a_node(models: Models, plain: Plain, tmp_path: Path) -> None:
    """As the ranks of data parallelism do: each finds what the other has computed, and neither disturbs the other."""
    prompts = [prompt(62 + number, 600 + 100 * number) for number in range(4)]
    whole = [len(each) // 128 * 128 for each in prompts]
    expected = plain("llama", prompts)
    with (
        serving(tmp_path, **CACHE) as (_, socket),
        Engine(models("llama"), {"connect": str(socket)}) as one,
        Engine(models("llama"), {"connect": str(socket)}) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        for cached in ([[0, 0], [0, 0]], [whole[2:], whole[:2]], [whole[:2], whole[2:]]):
            asked = (prompts[:2], prompts[2:]) if cached != [whole[2:], whole[:2]] else (prompts[2:], prompts[:2])
            both = list(threads.map(lambda engine, each: engine.generate(each), (one, other), asked))
            assert [[answer.cached for answer in answers] for answers in both] == cached
            right = dict(zip(map(tuple, prompts), expected, strict=True))
            for answers, each in zip(both, asked, strict=True):
                assert all(answer.agrees(right[tuple(tokens)]) for answer, tokens in zip(answers, each, strict=True))
            one.run(Inside.forget)
            other.run(Inside.forget)
        both = list(threads.map(lambda engine: engine.generate([PROMPT]), (one, other)))
        assert [answer.agrees(plain("llama", [PROMPT])[0]) for (answer,) in both] == [True, True]
        assert [engine.run(unheld) for engine in (one, other)] == [(0, 0)] * 2


def unheld(inside: Inside) -> tuple[int, int]:
    """Requests that this engine holds something of, and leases of all engines."""
    inside.generate([prompt(70, 20)], 2)
    return inside.settled()["requests"], inside.settled()["leases"]


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
