"""vLLM's own scheduler, plain and with steps in flight: no token comes of KV that is not there, whatever loads do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmcache_core.client import Grant
from tests.vllm.conftest import Models
from tests.vllm.engine import ours_of, prompt
from tests.vllm.scheduled import BLOCK, Scheduled, answers

CACHE = {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 64, "page_tokens": 16}
FIRST, SECOND = prompt(1, 600), prompt(2, 333)
PROMPTS = {"first": FIRST, "second": SECOND, "fork": FIRST[:400] + prompt(3, 90), "exact": FIRST[:512]}

Make = Callable[..., Scheduled]


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    made: list[Scheduled] = []

    def build(**options: Any) -> Scheduled:
        made.append(Scheduled(models("llama"), CACHE, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module", params=[False, True], ids=["one group", "two groups"])
def windows(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def right(models: Models, windows: bool) -> dict[str, list[int]]:
    return answers(models("llama"), PROMPTS, windows=windows)


def at_rest(engine: Scheduled) -> None:
    """Nothing is held, nothing is under way."""
    assert engine.connector._scheduler.idle
    assert engine.free_blocks == engine.blocks - 1
    stats = engine.connector._scheduler.client.stats()
    assert (stats.leases, stats.staged) == (0, 0)
    assert engine.connector.faults == ours_of(engine.worker).faults == 0


def warm(engine: Scheduled) -> None:
    for name in ("first", "second"):
        engine.ask(f"warm {name}", PROMPTS[name])
    engine.run()
    engine.forget()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("sync_load", [0.025, 0])
def test_hits_give_the_tokens_of_an_engine_without_us(
    make: Make, right: dict[str, list[int]], windows: bool, in_flight: int, sync_load: float
) -> None:
    engine = make(windows=windows, in_flight=in_flight, sync_load=sync_load)
    warm(engine)
    for name, tokens in PROMPTS.items():
        engine.ask(name, tokens)
    got = engine.run()
    assert {name: got[name] for name in right} == right
    loaded = engine.connector._scheduler.counts["loaded_tokens", "cpu"]
    assert loaded >= 600 // BLOCK * BLOCK  # others may have found it in the engine by then
    engine.forget()
    at_rest(engine)


def _lost(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker._door.client(), "join_hold", lambda number: None)


def _hangs(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = worker._door.client()
    grant = client.grant

    def hang(held: Any, start: int, ahead: int) -> list[Grant]:
        granted: list[Grant] = grant(held, start, ahead)
        # The first parts come, the others never do.
        return granted if start == 0 and ahead == 0 else [*granted[:2], Grant(None, "disk", Future())][start and 2 :]

    monkeypatch.setattr(client, "grant", hang)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("sync_load", [0.025, 0])
@pytest.mark.parametrize("fault", [_lost, _hangs])
def test_a_load_that_fails_is_computed(
    make: Make,
    right: dict[str, list[int]],
    windows: bool,
    in_flight: int,
    sync_load: float,
    fault: Callable[[Any, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(windows=windows, in_flight=in_flight, sync_load=sync_load, load_timeout=0.02)
    warm(engine)
    with monkeypatch.context() as context:
        fault(engine.worker, context)
        for name, tokens in PROMPTS.items():
            engine.ask(name, tokens)
        got = dict(engine.run())
    assert {name: got[name] for name in right} == right
    assert engine.connector._scheduler.counts["failed_tokens", ""] > 0
    engine.forget()
    at_rest(engine)
    # What was stored meanwhile is right too.
    for name, tokens in PROMPTS.items():
        engine.ask(f"again {name}", tokens)
    got = engine.run()
    assert {name: got[f"again {name}"] for name in right} == right
    engine.forget()
    at_rest(engine)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_few_blocks_and_many_requests(models: Models, make: Make, windows: bool, in_flight: int) -> None:
    prompts = {str(number): FIRST[: 40 * number] + prompt(number, 50) for number in range(1, 7)}
    expected = answers(models("llama"), prompts, 40, windows=windows)
    engine = make(windows=windows, in_flight=in_flight, blocks=50 if windows else 30)
    for turn in range(2):
        for name, tokens in prompts.items():
            engine.ask(f"{turn} {name}", tokens, 40)
        got = engine.run()
        assert {name: got[f"{turn} {name}"] for name in expected} == expected
        engine.forget()
    assert engine.scheduler.requests == {}
    at_rest(engine)


def test_events_tell_what_is_where(make: Make) -> None:
    """Whoever follows them knows of each block of the prompts on which medium it is, and what its tokens are."""
    engine = make(events=True)
    side = engine.connector._scheduler
    request = engine.ask("first", FIRST)
    engine.run()
    engine.forget()
    engine.ask("second", SECOND)
    engine.run()
    follower: dict[str, dict[Any, tuple[int, ...]]] = {"CPU": {}, "STORAGE": {}}

    def follow() -> None:
        engine.connector._scheduler.client.flush(10)
        engine.ask(f"nothing {engine.steps}", prompt(engine.steps, 5))
        engine.run()
        for event in engine.events:
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                for number, name in enumerate(event.block_hashes):
                    tokens = event.token_ids[number * BLOCK : (number + 1) * BLOCK]
                    assert follower[event.medium].setdefault(name, tuple(tokens)) == tuple(tokens)
            else:
                for name in event.block_hashes:
                    del follower[event.medium][name]
        engine.events.clear()

    follow()
    blocks = {tuple(FIRST[at : at + BLOCK]) for at in range(0, 600 - BLOCK + 1, BLOCK)}
    blocks |= {tuple(SECOND[at : at + BLOCK]) for at in range(0, 333 - BLOCK + 1, BLOCK)}
    assert set(follower["CPU"].values()) == blocks
    assert follower["STORAGE"] == {}
    named = {maybe_convert_block_hash(name) for name in request.block_hashes[: 600 // BLOCK]}
    assert named <= set(follower["CPU"])
    side.client.clear()
    follow()
    assert follower == {"CPU": {}, "STORAGE": {}}
