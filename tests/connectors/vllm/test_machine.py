"""The connector's two sides in any order of events: a hypothesis state machine over an engine and a real node."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lmcache_core.client import Client
from lmcache_core.connectors.vllm import enginekv, pasthost
from lmcache_core.connectors.vllm.offloading import Offloading
from lmcache_core.connectors.vllm.plan import Load, Step
from lmcache_core.connectors.vllm.requests import Marks, Tracked
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.direct import DirectClient
from lmcache_core.errors import LayoutError
from lmcache_core.keys import PageHasher
from lmcache_core.protocols import CopyBack, DirectRead, DirectWrite, ReadResult, WriteResult
from lmcache_core.wrappers import Corrupting, Faulty, Slow, randomly
from tests.connectors.vllm import test_offloading, test_pasthost, test_worker
from tests.connectors.vllm.world import PAGE_TOKENS, World, bare, open_world, prompt
from tests.node.directshelf import DirectShelf

# Prompts that share beginnings, end inside pages and chunks, and fork inside and between them.
PROMPTS = ["ab12", "abcd", "abcde1", "abxy12", "abcdefg1234", "b1", "bcd", "1", "abcdxy", "ac1bd", "abcdefghij12"]


class ConnectorMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, steps, evictions, faults of a tier, aborts, preemptions and resets.

    The engine raises `Wrong` for an answer that was computed with other KV, and for a write where none is allowed; at
    the end all that the node holds is read and compared.
    """

    OPERATIONS = (
        ["add"] * 6
        + ["step"] * 12
        + ["run"] * 4
        + ["forget"] * 3
        + ["evict"] * 4
        + ["abort", "abort", "preempt", "reset", "clear", "clear", "settle", "lose_slots", "time_passes", "break_tier"]
        + ["mend_tier", "hang_tier"]
    )
    GROUPS: ClassVar[Sequence[str]] = ("f", "f", "k", "o", "p")
    RANKS: ClassVar[Sequence[tuple[int, int]]] = ((1, 1),)
    LATE: ClassVar[bool] = False
    PAST_HOST: ClassVar[bool] = False
    SOCKET: ClassVar[bool] = False

    @initialize(
        group=st.integers(0, 99),
        ranks=st.integers(0, 99),
        blocks=st.sampled_from([60, 80, 200]),
        budget=st.sampled_from([7, 40, 64, 1000]),
        slots=st.sampled_from([3, 8, 64]),
        sync=st.booleans(),
        local=st.booleans(),
        measured=st.booleans(),
    )
    def open(
        self, group: int, ranks: int, blocks: int, budget: int, slots: int, sync: bool, local: bool, measured: bool
    ) -> None:
        self.stack = ExitStack()
        socket = Path(self.stack.enter_context(TemporaryDirectory())) if self.SOCKET else None
        delays = [0.0, 0.0, 0.002, 0.01, 0.08]
        self.shelf = DirectShelf(["miss", "corrupt", "raise"], probability=0.2, seed=group, delays=delays)
        self.faulty = Faulty(Corrupting(self.shelf, probability=0.2, seed=group), randomly(0.3, seed=group))
        self.slow = SlowToo(self.faulty) if self.PAST_HOST else Slow(self.faulty)
        self.faulty.active = False
        groups = self.GROUPS[group % len(self.GROUPS)]
        size, replicas = self.RANKS[ranks % len(self.RANKS)]
        self.world: World = self.stack.enter_context(
            open_world(
                self.slow,
                groups=groups,
                ranks=size,
                replicas=replicas,
                blocks=blocks * len(groups) if groups != "p" else blocks // 2,
                budget=budget,
                slots=slots,
                options={"sync_load": 1e9 if sync else 0.0, "load_timeout": 5.0, "lazy_offload": self.LATE}
                | ({"past_host": True, "layerwise": True} if self.PAST_HOST else {}),
                tiers=[{"read_timeout": 0.05}],
                socket=socket,
            )
        )
        self.engine = self.world.engine
        self.engine.local_cache = local
        self.engine.measured = measured
        self.numbers = 0
        self.asked: dict[str, tuple[list[int], int, str, int]] = {}

    @rule(operation=st.sampled_from(OPERATIONS), seed=st.integers(0, 1 << 16))
    def go(self, operation: str, seed: int) -> None:
        self.rng = random.Random(seed)
        getattr(self, operation)()
        self.check_answers()

    def check_answers(self) -> None:
        for request_id in list(self.engine.done):
            tokens, count, salt, weights = self.asked.pop(request_id)
            output = self.engine.done.pop(request_id)
            assert len(output) == count
            assert weights != self.engine.weights or output == self.engine.expected(tokens, count, salt)

    # Requests

    def add(self) -> None:
        if len(self.engine.requests) >= 5:
            return
        self.numbers += 1
        request_id = f"r{self.numbers}"
        tokens, count = prompt(self.rng.choice(PROMPTS)), self.rng.choice([1, 1, 3, 20, 40])
        salt = self.rng.choice(["", "", "", "tenant"])
        self.asked[request_id] = tokens, count, salt, self.engine.weights
        self.engine.add(request_id, tokens, count, salt=salt)

    def abort(self) -> None:
        living = [each for each in self.engine.requests.values() if each.status != "finished"]
        if living:
            request_id = self.rng.choice(living).request_id
            self.engine.abort(request_id)
            del self.asked[request_id]

    def preempt(self) -> None:
        if self.engine.running:
            self.engine._preempt(self.rng.choice(self.engine.running))

    # Steps

    def step(self) -> None:
        self.engine.step()
        self.world.clock.now += 1.0
        if not self.slow._hanging_verbs:
            self.world.settle()

    def run(self) -> None:
        self.mend_tier()
        self.engine.run()
        self.world.settle()

    def settle(self) -> None:
        self.mend_tier()
        self.world.settle()

    def time_passes(self) -> None:
        self.world.clock.now += 20.0
        self.world.worker_clock.now += self.rng.choice([0.1, 6.0])

    # The node

    def forget(self) -> None:
        """Of the engine's own prefix cache, all or some."""
        share = self.rng.choice([1.0, 0.3, 0.1])
        for block in sorted(self.engine.pool.name):
            if self.rng.random() < share:
                self.engine.pool.forget(block)

    def evict(self) -> None:
        if not self.slow._hanging_verbs:
            self.world.forget("cpu")

    def clear(self) -> None:
        """An operator takes away everything, leased or not, also between the plan of a step and its execution."""
        places = self.rng.choice([None, ["cpu"], ["t0"]])
        if not self.slow._hanging_verbs:
            self.engine.between.append(lambda: DirectClient(self.world.node).clear(None, places))
            if self.rng.random() < 0.3:
                self.engine.between.pop()()

    def lose_slots(self) -> None:
        self.world.node.guard.index.frozen = self.rng.random() < 0.5

    def break_tier(self) -> None:
        self.faulty.active = True

    def hang_tier(self) -> None:
        self.slow.hang("read")

    def mend_tier(self) -> None:
        self.faulty.active = False
        self.slow.release()

    def reset(self) -> None:
        if not self.engine.reset():
            return
        for request_id, (tokens, count, salt, _) in self.asked.items():
            self.asked[request_id] = tokens, count, salt, -1

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.stack:
            self.mend_tier()
            self.engine.run()
            self.check_answers()
            assert not self.asked
            self.world.at_rest()


class LateMachine(ConnectorMachine):
    """What is computed is stored late."""

    RANKS = ((1, 1), (1, 1), (2, 1), (2, 2))
    LATE = True


class SlowToo(Slow):
    """Has what the shelf has for devices."""

    has_device = True

    def reader(self) -> DirectShelf:
        shelf: DirectShelf = bare(self)
        return shelf.reader()

    async def read_direct(self, reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
        shelf: DirectShelf = bare(self)
        return await shelf.read_direct(reads, back)

    async def write_direct(self, writes: Sequence[DirectWrite], back: CopyBack) -> list[WriteResult]:
        shelf: DirectShelf = bare(self)
        return await shelf.write_direct(writes, back)


class PastHostMachine(ConnectorMachine):
    """What lies on the tier is read past the pool, unless that goes wrong."""

    GROUPS = ("f", "fw", "k")
    RANKS = ((1, 1), (2, 1), (2, 2))
    PAST_HOST = True


class BesideMachine(PastHostMachine):
    """The same from processes other than the node's."""

    SOCKET = True


class HybridMachine(ConnectorMachine):
    """Several cache groups."""

    GROUPS = ("fw", "fb", "fw", "wf")


class RanksMachine(ConnectorMachine):
    """Several ranks, some of which hold the same."""

    GROUPS = ("f", "fw")
    RANKS = ((2, 1), (2, 2), (4, 2))


MACHINES = [ConnectorMachine, LateMachine, PastHostMachine, BesideMachine, HybridMachine, RanksMachine]

FEW = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrink by hand: a request that never ends takes long
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=120, report_multiple_bugs=False)


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_wrong_in_any_order_of_events(machine: type[ConnectorMachine]) -> None:
    run_state_machine_as_test(machine, settings=FEW)


# That the machine can fail: each of these is a mistake that a connector of this kind could make.

Patch = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[Callable[[], object], Patch]] = {}


def bug(finds: type[ConnectorMachine] | Callable[[], object]) -> Callable[[Patch], Patch]:
    """A mistake, and what finds it: a machine, or a test where that takes luck."""
    run: Callable[[], object] = finds
    if isinstance(finds, type):
        run = functools.partial(run_state_machine_as_test, finds, settings=MANY)

    def add(patch: Patch) -> Patch:
        BUGS[patch.__name__] = run, patch
        return patch

    return add


def change_loads(patch: pytest.MonkeyPatch, change: Callable[[Load], Load]) -> None:
    before = WorkerSide.start

    def start(self: WorkerSide, step: Step, *, busy: bool) -> None:
        step.loads = [change(job) for job in step.loads]
        before(self, step, busy=busy)

    patch.setattr(WorkerSide, "start", start)


@bug(ConnectorMachine)
def the_first_page_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    change_loads(patch, lambda job: replace(job, first_page=job.first_page + 1))


@bug(ConnectorMachine)
def blocks_are_off_by_one(patch: pytest.MonkeyPatch) -> None:
    change_loads(patch, lambda job: replace(job, blocks=tuple((*ids[1:], *ids[:1]) for ids in job.blocks)))


@bug(lambda: test_worker.test_a_hit_that_begins_inside_a_page_leaves_the_blocks_in_front_alone(True))
def local_blocks_are_loaded_again(patch: pytest.MonkeyPatch) -> None:
    change_loads(patch, lambda job: replace(job, skip_tokens=0))


@bug(test_worker.test_a_load_within_a_step_that_fails_is_computed_and_the_step_stores_nothing)
def spoilt_steps_are_stored(patch: pytest.MonkeyPatch) -> None:
    before = WorkerSide.save

    def save(self: WorkerSide, step: Step) -> None:
        self._spoilt = False
        before(self, step)

    patch.setattr(WorkerSide, "save", save)


@bug(ConnectorMachine)
def pages_are_stored_before_they_are_complete(patch: pytest.MonkeyPatch) -> None:
    before = SchedulerSide._plan_save

    def plan(self: SchedulerSide, step: Step, tracked: Any, tokens: int, blocks_of: Any) -> None:
        before(self, step, tracked, tokens + PAGE_TOKENS - 1, blocks_of)

    patch.setattr(SchedulerSide, "_plan_save", plan)


@bug(ConnectorMachine)
def the_engine_goes_on_before_a_load_has_ended(patch: pytest.MonkeyPatch) -> None:
    before = WorkerSide.start

    def start(self: WorkerSide, step: Step, *, busy: bool) -> None:
        before(self, step, busy=busy)
        for job in step.loads:
            if not job.now:
                self._ended.add(job.request)

    patch.setattr(WorkerSide, "start", start)


@bug(ConnectorMachine)
def the_first_bad_block_is_kept_quiet(patch: pytest.MonkeyPatch) -> None:
    before = WorkerSide.bad_blocks

    def bad_blocks(self: WorkerSide) -> set[int]:
        return set(sorted(before(self))[1:])

    patch.setattr(WorkerSide, "bad_blocks", bad_blocks)


@bug(test_worker.test_several_loads_go_on_together)
def a_lease_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def let_go(self: Tracked, client: Client) -> None:
        forgotten.append(self.held)
        self.held = None

    forgotten: list[Any] = []
    patch.setattr(Tracked, "let_go", let_go)


@bug(ConnectorMachine)
def tenants_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Marks, "hasher", lambda self, page_tokens: PageHasher(page_tokens))


@bug(ConnectorMachine)
def a_reset_keeps_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "reset", lambda self: None)


@bug(HybridMachine)
def blocks_that_a_window_has_left_are_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(enginekv.RequestView, "has", lambda self, group, first_page, pages: True)


@bug(HybridMachine)
def the_null_block_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(enginekv, "NULL_BLOCK", -1)


@bug(RanksMachine)
def a_rank_takes_another_rank_s_part(patch: pytest.MonkeyPatch) -> None:
    def shard(self: DirectClient, shards: int) -> int:
        return max(0, shards - 1 - self.shard)

    patch.setattr(DirectClient, "_shard", shard)


@bug(LateMachine)
def blocks_are_stored_late_whatever_is_in_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offloading, "_left", lambda self, piece: piece.pages)
    patch.setattr(Offloading, "_lose", lambda self, piece: None)


@bug(test_offloading.test_a_step_that_went_wrong_is_not_stored_late)
def a_step_that_went_wrong_is_stored_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offloading, "doubt", lambda self: None)


@bug(test_offloading.test_the_rest_is_loaded_behind_what_the_engine_has_kept)
def a_hit_behind_the_engine_s_own_is_taken_for_one_from_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tracked, "held_end", property(lambda self: self.held.pages if self.held else 0))
    change_loads(patch, lambda job: replace(job, base=0))


@bug(PastHostMachine)
def what_is_no_hit_is_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pasthost.Reading, "hit", property(lambda self: True, lambda self, hit: None), raising=False)


@bug(PastHostMachine)
def a_part_is_taken_for_the_one_in_front_of_it(patch: pytest.MonkeyPatch) -> None:
    before = DirectClient.past_host
    patch.setattr(DirectClient, "past_host", lambda self, held, number: before(self, held, max(0, number - 1)))


@bug(BesideMachine)
def what_a_node_says_of_one_part_is_taken_for_another(patch: pytest.MonkeyPatch) -> None:
    before = DirectClient.find_past_host

    def find(self: DirectClient, held: Any, number: int, readable: Any) -> Any:
        return before(self, held, max(0, number - 1), readable)

    patch.setattr(DirectClient, "find_past_host", find)


@bug(test_pasthost.test_a_read_that_is_given_up_writes_where_nobody_is)
def memory_is_used_again_while_it_may_be_written_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pasthost.Reading, "leave", lambda self, memory: memory.give(self.taken))


@bug(test_pasthost.test_memory_is_used_again_when_it_has_been_copied_from)
def memory_is_used_again_while_it_may_be_copied_from(patch: pytest.MonkeyPatch) -> None:
    before = pasthost.PastHostLoad.consumed

    def consumed(self: pasthost.PastHostLoad, parts: int) -> Callable[[], None]:
        before(self, parts)()
        return lambda: None

    patch.setattr(pasthost.PastHostLoad, "consumed", consumed)


@bug(test_pasthost.test_what_comes_to_the_pool_while_it_is_read_is_copied_from_there)
def all_that_was_read_is_taken_for_copied(patch: pytest.MonkeyPatch) -> None:
    before = pasthost.PastHostLoad.consumed

    def consumed(self: pasthost.PastHostLoad, parts: int) -> Callable[[], None]:
        self._granted.update(self._readings)
        return before(self, parts)

    patch.setattr(pasthost.PastHostLoad, "consumed", consumed)


@pytest.mark.parametrize("name", BUGS)
def test_the_machine_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, patch = BUGS[name]
    patch(monkeypatch)
    # A tier's deadlines are real time, so what has failed once may go another way when it is tried again.
    with pytest.raises((AssertionError, LayoutError, KeyError, Flaky)):
        run()
