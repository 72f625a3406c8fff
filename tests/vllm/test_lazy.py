"""KV that is stored only when vLLM is about to give its blocks to others: real scheduler and real engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt
from tests.vllm.scheduled import BLOCK, Scheduled, answers
from tests.vllm.test_scheduled import _hangs, _lost, at_rest

CACHE = {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 64, "page_tokens": 16}
SHARED = prompt(1, 300)
PROMPTS = {str(number): SHARED[: 60 * (number % 5)] + prompt(number, 120) for number in range(12)}

ANSWER = 20

Make = Callable[..., Scheduled]


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    made: list[Scheduled] = []

    def build(**options: Any) -> Scheduled:
        made.append(Scheduled(models("llama"), CACHE, lazy_offload=True, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def right(models: Models) -> dict[str, list[int]]:
    return answers(models("llama"), PROMPTS, ANSWER)


def ask_all(engine: Scheduled, turn: str, seed: int) -> dict[str, list[int]]:
    """All prompts, a few at a time, in some order."""
    chosen = random.Random(seed)
    names = chosen.sample(sorted(PROMPTS), len(PROMPTS))
    while names:
        for name in [names.pop() for _ in range(min(len(names), chosen.randint(1, 4)))]:
            engine.ask(f"{turn} {name}", PROMPTS[name], ANSWER)
        engine.run()
    return {name: engine.answers[f"{turn} {name}"] for name in PROMPTS}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("sync_load", [0.025, 0])
def test_what_is_given_up_comes_back(make: Make, right: dict[str, list[int]], in_flight: int, sync_load: float) -> None:
    """60 blocks are 960 tokens, the prompts and answers twice as many."""
    engine = make(in_flight=in_flight, sync_load=sync_load, blocks=60)
    for turn in range(3):
        assert ask_all(engine, str(turn), turn) == right
    counts = engine.connector._scheduler.counts
    assert counts["loaded_tokens", "cpu"] > 1000
    assert counts["lost_tokens", ""] + counts["dropped_tokens", ""] <= 8 * BLOCK
    engine.forget()
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nothing_is_stored_while_vllm_has_other_blocks_to_take(
    make: Make, right: dict[str, list[int]], in_flight: int
) -> None:
    engine = make(in_flight=in_flight, blocks=400)
    for turn in range(2):
        assert ask_all(engine, str(turn), turn) == right
    side = engine.connector._scheduler
    assert side.client.stats().chunks == 0
    assert side.counts["loaded_tokens", "cpu"] == 0
    engine.forget()
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("fault", [_lost, _hangs])
def test_loads_that_fail_leave_nothing_wrong_behind(
    make: Make,
    right: dict[str, list[int]],
    in_flight: int,
    fault: Callable[[Any, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(in_flight=in_flight, blocks=60, load_timeout=0.02)
    assert ask_all(engine, "first", 1) == right
    with monkeypatch.context() as context:
        fault(engine.worker, context)
        assert ask_all(engine, "failing", 2) == right
    assert engine.connector._scheduler.counts["failed_tokens", ""] > 0
    for turn in range(2):
        assert ask_all(engine, f"later {turn}", 3 + turn) == right
    engine.forget()
    at_rest(engine)


def test_a_model_with_windows_is_stored_at_once(models: Models, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(windows=True)
    assert "lazy_offload cannot be had: the model keeps not all of a prompt in blocks of one kind" in caplog.text
    engine.ask("a", SHARED)
    engine.run()
    assert engine.connector._scheduler.counts["stored_tokens", ""] > 0
    engine.forget()
    at_rest(engine)


@pytest.mark.parametrize("how", [{}, {"layerwise": True}, {"sync_load": 0}], ids=str)
def test_a_real_engine(models: Models, plain: Plain, how: dict[str, Any]) -> None:
    """12 prompts of 512 tokens in 20 blocks of 128: each comes back, some of it from vLLM, the rest from us."""
    prompts = [prompt(900 + number, 512) for number in range(12)]
    expected = plain("llama", prompts, 4)
    engine = Engine(
        models("llama"),
        {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 128, "page_tokens": 128},
        {"lazy_offload": True, **how},
        num_gpu_blocks_override=20,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    try:
        for turn in range(3):
            for each, right in zip(prompts, expected, strict=True):
                (answer,) = engine.generate([each], 4)
                assert answer.agrees(right)
                assert turn == 0 or answer.cached in (384, 511, 512), "as the load is within the step or beside it"
        assert engine.run(Inside.metric, "external_prefix_cache_hits") > 2 * 8 * 384
        assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}
        counts = engine.run(counted)
        assert counts.get("lost_tokens", 0) == 0
        assert counts["stored_tokens"] <= 12 * 512, "each at most once"
    finally:
        engine.close()


def counted(inside: Inside) -> dict[str, float]:
    """What the connector has counted."""
    return {name: amount for (name, _), amount in inside.connector._scheduler.counts.items()}
