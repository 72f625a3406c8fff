"""A tier that stops answering, or fails, under traffic: requests are answered as without us, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core.wrappers import Faulty, Slow
from tests.node.kv import until
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Answer, Engine, Inside, prompt

PROMPTS = {str(number): prompt(70 + number, 700 + 130 * number) for number in range(4)}
COLD = {"cold": prompt(80, 500), "short": prompt(81, 30)}
THERE = {name: len(tokens) // 128 * 128 for name, tokens in PROMPTS.items()}
TOKENS = 4
NOTHING = {"requests": 0, "busy": 0, "leases": 0, "staged": 0}


@pytest.fixture(scope="module", params=[("10s", "500ms"), (0, "60s")], ids=["node gives up", "connector gives up"])
def engine(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    sync_load, timeout = request.param
    tier = {
        "backend": "disk",
        "path": str(tmp_path_factory.mktemp("disk")),
        "capacity": "1GiB",
        "min_free": 0,
        "read_timeout": timeout,
        "write_timeout": timeout,
        "breaker": {"failures": 2, "cooldown": "50ms", "max_cooldown": "200ms"},
    }
    cache = {"page_tokens": 128, "chunk_tokens": 256, "cpu": {"capacity": "256MiB"}, "tiers": [tier]}
    made = Engine(models("llama"), cache, {"sync_load": sync_load, "load_timeout": "1s"})
    made.run(wrap)
    yield made
    made.close()


def runner_of(inside: Inside) -> Any:
    (runner,) = inside.connector._scheduler.client.node.runners
    return runner


def wrap(inside: Inside) -> None:
    """Have the tier freeze and fail when it is told to."""
    runner = runner_of(inside)
    faulty = Faulty(runner.backend)
    faulty.active = False
    runner.backend = Slow(faulty)
    # How long a load is waited for is its deadline here, and not what computing takes on this machine.
    inside.connector._scheduler._weighing.rates.prefill_seconds = lambda start, end: None


def on_the_disk_only(inside: Inside) -> None:
    """Have all prompts there and nowhere else."""
    client = inside.connector._scheduler.client
    until(lambda: client.stats().tiers[0].up)
    client.clear()
    inside.forget()
    inside.generate(list(PROMPTS.values()), TOKENS)
    assert client.flush(10)
    inside.forget()
    client.clear(places=["cpu"])
    assert client.stats().tiers[0].chunks > 0


def ask_while(inside: Inside, trouble: str, step: int) -> tuple[dict[str, Answer], int, dict[str, int]]:
    """Ask for everything, and have the tier freeze or fail from a step on. Returns how many calls of it that met, and
    what is held while it lasts."""
    slow = runner_of(inside).backend

    def before(number: int) -> list[str]:
        if number == step and trouble == "freezes":
            slow.hang()
        elif number == 0 and trouble == "freezes":
            slow.hang("write")  # so that it meets something, however quick the reads are
        elif number == step:
            slow.inner.active = True
        return []

    raised = slow.inner.raised.total()
    answers = inside.drive({**PROMPTS, **COLD}, TOKENS, before)
    inside.drive({"settle": prompt(82, 20)}, 2)
    met = slow.hanging if trouble == "freezes" else slow.inner.raised.total() - raised
    return answers, met, inside.settled()


def mend(inside: Inside) -> None:
    slow = runner_of(inside).backend
    slow.inner.active = False
    slow.release()


def whole(inside: Inside) -> dict[str, Any]:
    """What is used and what should be, when the tier has come back and all is over."""
    client = inside.connector._scheduler.client
    until(lambda: bool(client.stats().tiers[0].up))
    assert client.flush(10)
    inside.forget()
    stats = client.stats()
    pool = inside.core.scheduler.kv_cache_manager.block_pool
    return {
        **inside.settled(),
        "slots": stats.slots - stats.chunks,
        "quarantined": stats.tiers[0].quarantined,
        "queued": stats.tiers[0].queued,
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "faults": inside.connector.faults + inside.worker.faults,
    }


CLEAN = {**NOTHING, "slots": 0, "quarantined": 0, "queued": 0, "blocks": 0, "faults": 0}


@pytest.mark.parametrize(("trouble", "step"), [("freezes", 0), ("freezes", 2), ("fails", 0)])
def test_requests_are_answered_as_without_us_and_the_tier_is_used_again_once_it_is_well(
    engine: Engine, plain: Plain, trouble: str, step: int
) -> None:
    """Engine and node hold nothing for it in the end: no lease, no slot, no block."""
    names = [*PROMPTS, *COLD]
    expected = dict(zip(names, plain("llama", [*PROMPTS.values(), *COLD.values()], TOKENS), strict=True))
    engine.run(on_the_disk_only)
    answers, met, held = engine.run(ask_while, trouble, step)
    engine.run(mend)
    assert {name: answers[name].agrees(expected[name]) for name in names} == dict.fromkeys(names, True)
    assert met > 0
    assert (held["requests"], held["busy"], held["leases"]) == (0, 0, 0)
    assert engine.run(whole) == CLEAN
    engine.run(on_the_disk_only)
    for name, tokens in PROMPTS.items():
        (again,) = engine.generate([tokens], TOKENS)
        assert (name, again.cached, again.agrees(expected[name])) == (name, THERE[name], True)
    assert engine.run(whole) == CLEAN


def test_a_tier_that_is_slower_than_computing_is_waited_for_once_and_then_left_out(
    engine: Engine, plain: Plain
) -> None:
    """A request that it is too slow for has the prompt brought to memory for the next one."""
    if not engine.run(is_patient):
        return  # a node that gives up by itself leaves the tier alone altogether
    first, second = (PROMPTS[name] for name in ("2", "3"))
    expected = plain("llama", [first, second], TOKENS)
    engine.run(on_the_disk_only)
    answers, counted = engine.run(ask_a_slow_tier, [first, second])
    assert [each.agrees(right) for each, right in zip(answers, [*expected, expected[1]], strict=True)] == [True] * 3
    assert [each.cached for each in answers] == [0, 0, THERE["3"]]
    assert counted == [
        {"failed_tokens": THERE["2"]},
        {"declined_tokens disk": THERE["3"]},
        {"loaded_tokens cpu": THERE["3"]},
    ]
    assert engine.run(whole) == CLEAN


def is_patient(inside: Inside) -> bool:
    return bool(runner_of(inside).config.read_timeout > 10)


def ask_a_slow_tier(inside: Inside, prompts: list[list[int]]) -> tuple[list[Answer], list[dict[str, int]]]:
    """Two prompts while it does not answer, and the second again when it has. Returns what each has counted."""
    side = inside.connector._scheduler
    slow = runner_of(inside).backend
    del side._weighing.rates.prefill_seconds
    side._weighing.rates._tiers.clear()
    answers: list[Answer] = []
    counted: list[dict[str, int]] = []

    def ask(tokens: list[int]) -> None:
        inside.forget()
        before = dict(side.counts)
        answers.append(inside.drive({str(len(answers)): tokens}, TOKENS)[str(len(answers))])
        new = {" ".join(name).strip(): int(count - before.get(name, 0)) for name, count in side.counts.items()}
        counted.append({name: new[name] for name in new if name.split()[0] in COUNTED and new[name]})

    slow.hang("read")
    ask(prompts[0])
    ask(prompts[1])
    slow.release()
    assert side._weighing._warming is not None
    side._weighing._warming.result(20)
    ask(prompts[1])
    side._weighing.rates.prefill_seconds = lambda start, end: None
    return answers, counted


COUNTED = ("loaded_tokens", "failed_tokens", "declined_tokens")
