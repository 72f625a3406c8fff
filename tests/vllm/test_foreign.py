"""What another connector loads within a step, and what is not there then, is never stored by us as if it were."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from tests.vllm.conftest import Models
from tests.vllm.engine import prompt
from tests.vllm.foreign import foreign_config
from tests.vllm.scheduled import Scheduled, answers
from tests.vllm.test_scheduled import at_rest

CACHE = {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 64, "page_tokens": 16}
THEIRS, OURS = prompt(1, 200), prompt(2, 120)
BLOCKS = 120


@pytest.mark.parametrize("first", [True, False], ids=["they first", "we first"])
@pytest.mark.parametrize("fails", [True, False], ids=["lost", "there"])
@pytest.mark.parametrize("lazy", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside a load of ours", "alone"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_it_is_stored_when_it_is_known_to_be_there(
    models: Models, in_flight: int, beside: bool, lazy: bool, fails: bool, first: bool
) -> None:
    right = answers(models("llama"), {"theirs": THEIRS, "ours": OURS}, 6)
    theirs = foreign_config("theirs", "theirs beside", fails=fails)
    engine = Scheduled(
        models("llama"),
        CACHE,
        blocks=BLOCKS,
        in_flight=in_flight,
        others=[theirs],
        others_first=first,
        lazy_offload=lazy,
        sync_load=10.0,
    )
    try:
        engine.ask("ours before", OURS, 6)
        engine.run()
        fill(engine, lazy, 100)
        engine.forget()
        engine.ask("before", prompt(3, 200), 6)  # of which workers have something to tell
        engine.step()
        engine.ask("theirs", THEIRS, 6)
        if beside:
            engine.ask("ours", OURS, 6)
        engine.ask("theirs beside", [*THEIRS[:96], *OURS[:50]], 6)  # shares blocks with one that is loaded
        given = engine.run()
        if in_flight == 1:  # vLLM that plans ahead answers wrongly itself when what it loads within a step is lost
            assert given["theirs"] == right["theirs"]
        assert engine.connector.faults == 0
        for number in range(2):  # what has been completed is stored with a later step
            engine.ask(f"after {number}", [7, 8, 9])
            engine.run()
        fill(engine, lazy, 200)
        engine.forget()
        loaded = engine.connector._scheduler.counts["loaded_tokens", "cpu"]
        engine.ask("theirs again", THEIRS, 6)
        engine.ask("ours again", OURS, 6)
        given = engine.run()
        assert given["theirs again"] == right["theirs"]
        assert given["ours again"] == right["ours"]
        assert engine.connector._scheduler.counts["loaded_tokens", "cpu"] - loaded == 192 + 112
        at_rest(engine)
    finally:
        engine.close()


def test_a_defect_in_telling_them_apart_stores_nothing_wrong(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(side: SchedulerSide, request_id: str, computed: int) -> bool:
        raise RuntimeError("a defect")

    right = answers(models("llama"), {"theirs": THEIRS, "ours": OURS}, 6)
    others = [foreign_config("theirs", fails=True)]
    engine = Scheduled(models("llama"), CACHE, blocks=BLOCKS, others=others, sync_load=10.0)
    try:
        engine.ask("ours before", OURS, 6)
        engine.run()
        engine.forget()
        monkeypatch.setattr(SchedulerSide, "is_foreign", fails)
        for turn in ("", " again"):
            engine.ask(f"theirs{turn}", THEIRS, 6)
            engine.ask(f"ours{turn}", OURS, 6)
            given = engine.run()
            assert given[f"theirs{turn}"] == right["theirs"]
            assert given[f"ours{turn}"] == right["ours"]
            engine.forget()
        assert engine.connector.faults >= 1
    finally:
        engine.close()


@pytest.mark.parametrize("lazy", [True, False], ids=["late", "at once"])
def test_what_another_request_goes_on_from_is_not_stored(models: Models, lazy: bool) -> None:
    """Two share blocks that one of them loads. It ends before they are computed; vLLM forgets that they are lost."""
    right = answers(models("llama"), {"theirs": THEIRS}, 6)
    theirs = foreign_config("theirs", fails=True)
    engine = Scheduled(models("llama"), CACHE, blocks=BLOCKS, others=[theirs], lazy_offload=lazy)
    try:
        engine.ask("before", prompt(3, 20))
        engine.run()
        engine.ask("theirs", THEIRS, 6)
        engine.ask("beside", [*THEIRS[:96], *OURS[:50]], 6)
        engine.step()
        assert engine.scheduler.requests["beside"].num_computed_tokens == 96
        engine.scheduler.finish_requests("theirs", RequestStatus.FINISHED_ABORTED)
        engine.run()
        fill(engine, lazy, 100)
        engine.forget()
        engine.ask("again", THEIRS, 6)
        assert engine.run()["again"] == right["theirs"]
        at_rest(engine)
    finally:
        engine.close()


def fill(engine: Scheduled, lazy: bool, seed: int) -> None:
    """Have the engine give blocks away, if that is when they are stored."""
    for number in range(12 if lazy else 0):
        engine.ask(f"fill {seed + number}", prompt(seed + number, 300))
        engine.run()
