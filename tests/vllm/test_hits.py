"""What was computed once is found: how much of it, and that the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.blocks import blocks_before_and_after, own_blocks_under_a_hit
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt

LONG = prompt(1, 2200)
EXACT = prompt(2, 1024)
FORK = LONG[:900] + prompt(3, 300)
START = LONG[:400]
AFTER = prompt(4, 900)
APART = prompt(6, 600)
BITS = prompt(5, 1500)

WAYS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "within a step": (128, {"sync_load": "10s"}),
    "over steps": (128, {"sync_load": 0}),
    "within a step, pages of two blocks": (256, {"sync_load": "10s"}),
    "over steps, pages of two blocks": (256, {"sync_load": 0}),
    "layer by layer": (128, {"sync_load": "10s", "layerwise": True}),
    "on streams, over steps": (128, {"sync_load": 0, "layerwise": True}),
}

LOADED = "external_prefix_cache_hits"


class Case(Engine):
    """An engine that loads in one of the ways."""

    def __init__(self, model: Path, way: str) -> None:
        self.page, options = WAYS[way]
        self.at_once = options["sync_load"] != 0
        cache = {"page_tokens": self.page, "chunk_tokens": 2 * self.page, "cpu": {"capacity": "256MiB"}}
        super().__init__(model, cache, options)


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Case]:
    made = Case(models("llama"), request.param)
    yield made
    made.close()


def test_a_long_prompt_is_computed_once(engine: Case, plain: Plain) -> None:
    (expected,) = plain("llama", [LONG])
    (first,) = engine.generate([LONG])
    assert (first.cached, first.agrees(expected)) == (0, True)
    engine.run(Inside.forget)
    (again,) = engine.generate([LONG])
    assert (again.cached, again.agrees(expected)) == (2200 // engine.page * engine.page, True)


def test_of_a_prompt_of_whole_chunks_the_last_token_is_computed(engine: Case, plain: Plain) -> None:
    (expected,) = plain("llama", [EXACT])
    engine.generate([EXACT])
    engine.run(Inside.forget)
    (again,) = engine.generate([EXACT])
    assert (again.cached, again.agrees(expected)) == (1023 if engine.at_once else 1024, True)


def test_a_prompt_that_forks_inside_a_chunk_hits_the_pages_before(engine: Case, plain: Plain) -> None:
    (expected,) = plain("llama", [FORK])
    engine.generate([LONG])
    engine.run(Inside.forget)
    (answer,) = engine.generate([FORK])
    assert (answer.cached, answer.agrees(expected)) == (900 // engine.page * engine.page, True)


def test_a_hit_goes_on_behind_what_the_engine_has_itself(engine: Case, plain: Plain) -> None:
    """400 tokens leave three whole blocks of 128, the last of which may end inside a page."""
    start, expected = plain("llama", [START, LONG])
    engine.generate([LONG])
    engine.run(Inside.forget)
    assert engine.generate([START])[0].agrees(start)
    loaded = engine.run(Inside.metric, LOADED)
    (answer,) = engine.generate([LONG])
    assert (answer.cached, answer.agrees(expected)) == (2200 // engine.page * engine.page, True)
    assert engine.run(Inside.metric, LOADED) - loaded == answer.cached - 384


def test_loaded_blocks_are_those_that_were_stored(engine: Case) -> None:
    """Bit for bit. Tokens can't tell, as attention knows no order of what it looks at."""
    there = 1500 // engine.page * engine.page
    found = engine.run(blocks_before_and_after, BITS, AFTER, there)
    assert [each.cached for each in found["answers"]] == [0, there]
    assert found["equal"] == {"full": there // 128}
    assert found["differ"] == 0
    assert found["moved"] > 0


def test_blocks_in_use_stay_as_they_are(engine: Case, plain: Plain) -> None:
    """A hit behind what the engine has itself may begin inside a page: blocks before it are not written to."""
    found = engine.run(own_blocks_under_a_hit, LONG, START, 384)
    assert found["answer"].agrees(plain("llama", [LONG])[0])
    assert found["answer"].cached == 2200 // engine.page * engine.page
    assert (found["kept"], found["changed"]) == (3, 0)


def test_a_request_finds_what_another_has_just_stored(engine: Case, plain: Plain) -> None:
    """And two that come together are both right, whoever stores."""
    (expected,) = plain("llama", [AFTER])
    both = engine.generate([AFTER, AFTER])
    assert [each.agrees(expected) for each in both] == [True, True]
    engine.run(Inside.forget)
    both = engine.generate([AFTER, AFTER])
    assert [each.agrees(expected) for each in both] == [True, True]
    assert both[0].cached == 900 // engine.page * engine.page


def test_a_request_may_ask_for_less(engine: Case) -> None:
    asked: list[tuple[dict[str, Any], int]] = [
        ({"store": False}, 0),
        ({}, 0),
        ({"load": False}, 0),
        ({"max_load_tokens": 300}, 256),
        ({}, 512),
    ]
    for params, cached in asked:
        assert (params, engine.generate([APART], **params)[0].cached) == (params, cached)
        engine.run(Inside.forget)


def test_a_tenant_finds_its_own_only(engine: Case, plain: Plain) -> None:
    (expected,) = plain("llama", [AFTER])
    for salt, cached in [("one", 0), ("two", 0), ("one", 900 // engine.page * engine.page)]:
        (answer,) = engine.generate([AFTER], salt=salt)
        assert (answer.cached, answer.agrees(expected)) == (cached, True)
        engine.run(Inside.forget)


def test_nothing_old_is_found_after_a_reset(engine: Case, plain: Plain) -> None:
    (expected,) = plain("llama", [EXACT])
    engine.generate([EXACT])
    engine.run(reset)
    (answer,) = engine.generate([EXACT])
    assert (answer.cached, answer.agrees(expected)) == (0, True)
    engine.run(Inside.forget)
    assert engine.generate([EXACT])[0].cached >= 1023


def test_nothing_is_held_when_all_is_answered(engine: Case) -> None:
    engine.generate([LONG, EXACT, FORK])
    assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


def reset(inside: Inside) -> None:
    assert inside.llm.reset_prefix_cache(reset_connector=True)
