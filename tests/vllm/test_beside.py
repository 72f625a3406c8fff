"""Beside another connector, below vLLM's `MultiConnector`: each prompt is loaded by one of them, and stored by both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.vllm.blocks import Watch
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Inside, prompt, transfer_config

PROMPT = prompt(90, 1500)
THERE = 1500 // 128 * 128
AFTER = prompt(91, 700)
MIXED = {"ours": prompt(92, 700), "theirs": prompt(93, 800), "both": prompt(94, 900), "nobody's": prompt(95, 600)}
CACHE: dict[str, Any] = {"page_tokens": 128, "chunk_tokens": 256, "cpu": {"capacity": "256MiB"}}
NOTHING = {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


class Pair(NamedTuple):
    engine: Engine
    folder: Path
    """Of what the other one has stored, if that is on a disk."""
    ours: set[str]


LOADED = {
    "example first": {"ours"},
    "example last": {"ours", "both"},
    "offloading first": set(),  # what we have is in its memory, too
    "offloading last": {"ours", "both"},
}
"""What of the mixed requests we load, as the one that is named first is asked first."""


@pytest.fixture(scope="module", params=LOADED)
def pair(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("theirs")
    others: dict[str, dict[str, Any]] = {
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        "offloading": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"spec_name": "HostMemory", "spec_module_path": "benchmarks.vllm.offloading"},
        },
    }
    name, place = request.param.split()
    connectors = [others[name] | {"kv_role": "kv_both"}, transfer_config(CACHE)]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors if place == "first" else connectors[::-1]},
    }
    engine = Engine(models("llama"), kv_transfer_config=several)
    yield Pair(engine, folder, LOADED[request.param])
    engine.close()


def counted(inside: Inside, name: str) -> int:
    return inside.metric(f"lmcache_core_{name}")


def forget_theirs(inside: Inside, folder: Path) -> None:
    """Have the other connector forget what it has stored."""
    for each in inside.core.scheduler.connector.sub_connectors:
        if each is not inside.connector:
            each.reset_cache()
    shutil.rmtree(folder)
    folder.mkdir()


def forget_ours(inside: Inside) -> None:
    inside.connector._scheduler.client.clear()


def ask_in_turn(inside: Inside, folder: Path) -> dict[str, Any]:
    """Compute a prompt, have the other load it, then us what we have stored of that, into other blocks each time."""
    forget_ours(inside)
    forget_theirs(inside, folder)
    inside.forget()
    answers: list[Answer] = []
    loaded: list[int] = []

    def ask() -> None:
        inside.forget()
        watch.poison()
        before = counted(inside, "loaded_tokens")
        answers.extend(inside.generate([PROMPT]))
        inside.generate([AFTER[: 100 + 50 * len(answers)]], store=False)  # by when the last step has been told of
        loaded.append(counted(inside, "loaded_tokens") - before)

    with Watch(inside) as watch:
        ask()
        computed = len(watch.bytes)
        forget_ours(inside)
        ask()
        forget_theirs(inside, folder)
        inside.forget()
        inside.generate([AFTER], store=False)
        ask()
    count = THERE // 128
    runs = [0, computed, computed + 3]
    same = [torch.equal(watch.bytes[0][0][:count], watch.bytes[run][0][:count]) for run in runs]
    return {"answers": answers, "loaded": loaded, "same": same, "blocks": [watch.ids[run][0][:count] for run in runs]}


def test_what_another_connector_has_loaded_is_stored_as_it_was_computed(pair: Pair, plain: Plain) -> None:
    """Bit for bit, and not before it is there."""
    (expected,) = plain("llama", [PROMPT])
    found = pair.engine.run(ask_in_turn, pair.folder)
    assert [each.cached for each in found["answers"]] == [0, THERE, THERE]
    assert [each.agrees(expected) for each in found["answers"]] == [True] * 3
    assert found["loaded"] == [0, 0, THERE]
    assert found["same"] == [True] * 3
    assert found["blocks"][0] != found["blocks"][2]
    assert pair.engine.run(Inside.settled) == NOTHING


def ask_together(inside: Inside, folder: Path) -> tuple[dict[str, Answer], dict[str, float]]:
    """Ask at once for what we have, what they have, what both have and what nobody has."""
    forget_ours(inside)
    forget_theirs(inside, folder)
    inside.forget()
    inside.generate([MIXED["theirs"], MIXED["both"]])
    forget_ours(inside)
    inside.forget()
    inside.drive({"both": MIXED["both"]})  # loaded by the other, stored by us
    inside.drive({"settle": prompt(96, 20)}, 2)
    inside.forget()
    kept = shutil.copytree(folder, folder.with_suffix(".kept"))
    inside.generate([MIXED["ours"]])
    inside.drive({"settle": prompt(96, 20)}, 2)
    shutil.rmtree(folder)
    kept.rename(folder)
    inside.forget()
    before = {name: counted(inside, name) for name in COUNTED}
    answers = inside.drive(MIXED)
    inside.drive({"settle": prompt(96, 20)}, 2)
    return answers, {name: counted(inside, name) - before[name] for name in COUNTED}


COUNTED = ("loaded_tokens", "failed_tokens", "stored_tokens", "dropped_tokens", "faults")


def test_requests_of_both_and_of_nobody_are_answered_together(pair: Pair, plain: Plain) -> None:
    expected = dict(zip(MIXED, plain("llama", list(MIXED.values())), strict=True))
    answers, new = pair.engine.run(ask_together, pair.folder)
    assert {name: answers[name].agrees(expected[name]) for name in MIXED} == dict.fromkeys(MIXED, True)
    whole = {name: len(tokens) // 128 * 128 for name, tokens in MIXED.items()}
    assert {name: answers[name].cached for name in MIXED} == whole | {"nobody's": 0}
    assert (new["failed_tokens"], new["dropped_tokens"], new["faults"]) == (0, 0, 0)
    assert new["loaded_tokens"] == sum(whole[name] for name in pair.ours)
    assert new["stored_tokens"] == whole["theirs"] + whole["nobody's"]
    assert pair.engine.run(Inside.settled) == NOTHING


def test_a_reset_of_connectors_is_ours_too(pair: Pair) -> None:
    assert pair.engine.run(reset_and_ask, pair.folder, AFTER) == (True, 0, True)


def reset_and_ask(inside: Inside, folder: Path, tokens: list[int]) -> tuple[bool, int, bool]:
    (first,) = inside.generate([tokens])
    reset = bool(inside.llm.reset_prefix_cache(reset_connector=True))
    forget_theirs(inside, folder)  # one of them cannot by itself
    (answer,) = inside.generate([tokens])
    return reset, answer.cached, answer.agrees(first)
