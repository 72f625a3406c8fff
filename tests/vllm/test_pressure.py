"""More requests than the engine has room for, and requests that are given up: nothing gets mixed up, nothing stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Inside, prompt

BLOCKS = 10
TOKENS = 200
PROMPTS = {str(seed): prompt(30 + seed, 280 + 30 * seed) for seed in range(4)}
"""Each needs four blocks or five in the end, and of the engine's ten one is nobody's."""
SHORT = 6
NOTHING = {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


WAYS: dict[str, dict[str, Any]] = {
    "within a step": {"sync_load": "10s"},
    "over steps": {"sync_load": 0},
    "layer by layer": {"sync_load": "10s", "layerwise": True},
    "on streams, over steps": {"sync_load": 0, "layerwise": True},
}


@pytest.fixture(scope="module", params=WAYS)
def engine(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """With so little host memory that the disk is needed."""
    tier = {"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "1GiB"}
    cache = {"cpu": {"capacity": "6MiB"}, "tiers": [tier], "chunk_tokens": 128, "page_tokens": 128}
    made = Engine(
        models("llama"),
        cache,
        WAYS[request.param],
        num_gpu_blocks_override=BLOCKS,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    yield made
    made.close()


def test_requests_that_are_preempted_go_on_as_if_they_had_not_been(engine: Engine, plain: Plain) -> None:
    expected = plain("llama", list(PROMPTS.values()), TOKENS)
    for _ in range(2):
        answers = engine.generate(list(PROMPTS.values()), TOKENS)
        assert [answer.tokens for answer in answers] == [each.tokens for each in expected]
        assert all(answer.agrees(each) for answer, each in zip(answers, expected, strict=True))
        engine.run(Inside.forget)
    assert engine.run(Inside.metric, "num_preemptions") > 0
    assert engine.run(Inside.metric, "external_prefix_cache_hits") > 0
    assert engine.run(Inside.settled) == NOTHING


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_are_aborted_at_any_moment_leave_nothing_behind(engine: Engine, plain: Plain, seed: int) -> None:
    expected = dict(zip(PROMPTS, plain("llama", list(PROMPTS.values()), SHORT), strict=True))
    answers, aborted = engine.run(abort_some, seed)
    assert answers.keys() | aborted == PROMPTS.keys()
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: expected[name].tokens for name in answers
    }
    assert engine.run(Inside.settled) == NOTHING


def abort_some(inside: Inside, seed: int) -> tuple[dict[str, Answer], set[str]]:
    """Answer prompts, but abort some at random steps; then let the engine do what it still has to."""
    inside.forget()
    chosen = random.Random(seed)
    moments = {name: chosen.randrange(12) for name in chosen.sample(sorted(PROMPTS), 2 + seed % 3)}
    answers = inside.drive(PROMPTS, SHORT, lambda step: [name for name, moment in moments.items() if moment == step])
    inside.drive({"last": prompt(40, 20)}, 3)
    return answers, set(moments)
