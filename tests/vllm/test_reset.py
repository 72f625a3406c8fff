"""New weights in place of old ones: after `reset_prefix_cache(reset_connector=True)` nothing old is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Inside, prompt

WARM, COLD = prompt(110, 1200), prompt(111, 900)
THERE = {"warm": 1152, "cold": 896}
TOKENS = 6
NOTHING = {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


@pytest.fixture(scope="module", params=["10s", 0], ids=["within a step", "over steps"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    cache = {"page_tokens": 128, "chunk_tokens": 1024, "cpu": {"capacity": "256MiB"}}
    # Prompts take several steps, and a chunk more than one: some is computed before a reset and some after it.
    made = Engine(models("llama"), cache, {"sync_load": request.param}, max_num_batched_tokens=512)
    yield made
    made.close()


def scale(inside: Inside, factor: float) -> None:
    """Change weights in place: those of a norm, as vLLM keeps others in a form of its own on CPUs."""
    model = inside.core.model_executor.driver_worker.worker.get_model()
    model.model.layers[1].input_layernorm.weight.data.mul_(factor)


def with_other_weights(inside: Inside, factor: float) -> list[Answer]:
    """Answers with old weights, with new ones after the reset, the same from the cache, and from neither."""
    (old,) = inside.generate([WARM], TOKENS)
    scale(inside, factor)
    assert inside.llm.reset_prefix_cache(reset_connector=True)
    (new,) = inside.generate([WARM], TOKENS)
    inside.forget()
    (again,) = inside.generate([WARM], TOKENS)
    inside.forget()
    (apart,) = inside.generate([WARM], TOKENS, load=False, store=False)
    scale(inside, 1 / factor)
    assert inside.llm.reset_prefix_cache(reset_connector=True)
    return [old, new, again, apart]


def test_new_weights_answer_by_themselves_and_then_from_the_cache(engine: Engine, plain: Plain) -> None:
    old, new, again, apart = engine.run(with_other_weights, 2.0)
    assert old.agrees(plain("llama", [WARM], TOKENS)[0])
    assert not old.agrees(apart)
    assert [new.agrees(apart), again.agrees(apart)] == [True, True]
    assert [new.cached, again.cached, apart.cached] == [0, THERE["warm"], 0]


def reset_amid(inside: Inside, step: int, running: bool) -> dict[str, Any]:
    """Ask for a prompt that is there and one that is not, and reset while they are answered."""
    inside.llm.reset_prefix_cache(reset_connector=True)
    inside.generate([WARM], TOKENS)
    inside.forget()
    resets = []

    def before(number: int) -> list[str]:
        if number == step:
            resets.append(inside.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True))
        return []

    answers = inside.drive({"warm": WARM, "cold": COLD}, TOKENS, before)
    inside.drive({"settle": prompt(112, 20)}, 2)
    held = inside.settled()
    inside.forget()
    later = inside.drive({"warm": WARM, "cold": COLD}, TOKENS)
    inside.forget()
    last = inside.drive({"warm": WARM, "cold": COLD}, TOKENS)
    return {"resets": resets, "held": held, "answers": [answers, later, last]}


@pytest.mark.parametrize(("step", "running"), [(1, False), (3, False), (5, False), (4, True), (6, True)])
def test_a_reset_while_requests_run_ends_what_they_would_store_and_load(
    engine: Engine, plain: Plain, step: int, running: bool
) -> None:
    """They are answered, and what they compute on, after KV of before, is nobody's: it may be of both weights."""
    expected = dict(zip(("warm", "cold"), plain("llama", [WARM, COLD], TOKENS), strict=True))
    found = engine.run(reset_amid, step, running)
    assert found["resets"] == [running]  # vLLM keeps blocks that are in use
    assert found["held"] == NOTHING
    for answers in found["answers"]:
        assert {name: answers[name].agrees(each) for name, each in expected.items()} == {"warm": True, "cold": True}
    later, last = ({name: answer.cached for name, answer in each.items()} for each in found["answers"][1:])
    assert later == {"warm": 0, "cold": 0}
    assert last == THERE
