"""Whatever goes wrong in us, the engine answers every request, and rightly."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.worker import WorkerSide
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Failed, Inside, prompt

WARM = prompt(50, 300)
THERE = 256
TOKENS = 4
SIDES = {"_scheduler": SchedulerSide, "_worker": WorkerSide}
RESCUE = {"break_promise", "give_up", "give_up_on", "refused", "take_loads", "turn_off"}
"""What is called when something has gone wrong. Twice at a time is not tested."""
AT_OTHER_TIMES = {"close", "is_foreign", "register", "reset", "store_late"}
METHODS = [
    (side, name)
    for side, kind in SIDES.items()
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") and name not in RESCUE | AT_OTHER_TIMES
]
CASES = [
    pytest.param(side, name, done, id=f"{side.strip('_')} {name} {when}")
    for side, name in METHODS
    for done, when in [(False, "instead"), (True, "afterwards")]
]


@pytest.fixture(scope="module", params=["10s", 0], ids=["within a step", "over steps"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    cache = {"page_tokens": 128, "chunk_tokens": 256, "cpu": {"capacity": "512MiB"}}
    made = Engine(models("llama"), cache, {"sync_load": request.param})
    made.generate([WARM], TOKENS)
    yield made
    made.close()


@pytest.mark.parametrize(("side", "name", "done"), CASES)
def test_a_method_that_raises_costs_time_only(engine: Engine, plain: Plain, side: str, name: str, done: bool) -> None:
    """Of a prompt that is there, one that is not, and a third that comes when all is well again."""
    cold = prompt(1000 + 2 * METHODS.index((side, name)) + done, 200)
    expected = plain("llama", [WARM, cold], TOKENS)
    try:
        answers, calls, again = engine.run(with_a_fault, side, name, done, cold)
    except Failed:
        engine.restart()
        engine.generate([WARM], TOKENS)
        raise
    assert [answers["warm"].agrees(expected[0]), answers["cold"].agrees(expected[1])] == [True, True]
    assert calls > 0
    assert (again.agrees(expected[0]), again.cached) == (True, THERE)


def with_a_fault(
    inside: Inside, side: str, name: str, done: bool, cold: list[int]
) -> tuple[dict[str, Answer], int, Answer]:
    """Answer prompts while a method raises at each call, in place of what it does or afterwards."""
    target = getattr(inside.connector if side == "_scheduler" else inside.worker, side)
    method = getattr(target, name)
    calls = 0

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if done:
            method(*args, **kwargs)
        raise RuntimeError(f"{name} is made to fail")

    inside.forget()
    setattr(target, name, spoilt)
    try:
        answers = inside.drive({"warm": WARM, "cold": cold}, TOKENS)
    finally:
        delattr(target, name)
    inside.drive({"settle": prompt(51, 20)}, TOKENS)
    inside.forget()
    return answers, calls, inside.drive({"again": WARM}, TOKENS)["again"]
