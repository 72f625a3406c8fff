"""An engine for tests that follows vLLM's contract: blocks, chunked prefill, decode, preemption, a prefix cache of its
own, loads within a step and beside it. It knows no model.

The KV of a token follows from all tokens up to it, so any byte in a wrong place shows. One number of each head is noise
of the very computation: so a block that is written again shows as well, even with the right bytes. Blocks that are
handed out hold poison.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmcache_core.connectors.vllm.enginekv import Geometry
from lmcache_core.connectors.vllm.plan import Report, Step
from lmcache_core.connectors.vllm.requests import Marks
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.worker import WorkerSide

CONTENT = 8
"""Numbers of a head and token: K and V of three, poison or not, and noise."""
VOCABULARY = 50
NULL = 0

Array: TypeAlias = "NDArray[Any]"


class Wrong(AssertionError):
    """The connector has made the engine compute with other KV, or has written where it must not."""


@dataclass(frozen=True)
class Layers:
    """A cache group of the model."""

    block_tokens: int = 4
    window: int | None = None
    count: int = 2
    heads: int = 2
    kernel_blocks: int = 1
    dims: str = "bhtd"

    def memory(self, blocks: int) -> Array:
        tokens = self.block_tokens // self.kernel_blocks
        return np.zeros((self.count, blocks * self.kernel_blocks, self.heads, tokens, CONTENT), np.int16)

    def geometry(self, memory: Array) -> Geometry:
        return Geometry(list(memory), self.dims, self.block_tokens, self.kernel_blocks)

    def first_needed(self, computed: int) -> int:
        """The first token that the next one looks at, and so those that follow."""
        return 0 if self.window is None else max(0, computed - self.window + 1)


def chain(tokens: Sequence[int], seed: int, known: list[int]) -> list[int]:
    """For each token what stands for all up to it; `known` is the beginning."""
    last = known[-1] if known else seed
    for token in tokens[len(known) :]:
        last = (last ^ (token + 1)) * 0x9E3779B97F4A7C15 % (1 << 64)
        last ^= last >> 29
        known.append(last)
    return known


def kv(hashes: Array, group: int, layers: Layers, shard: int) -> Array:
    """The KV of tokens, `[token, layer, head, content]`, but for the noise."""
    first = np.uint64(1 + 1000 * (10 * group + shard))
    places = np.arange(layers.count * layers.heads * CONTENT, dtype=np.uint64) + first
    mixed = hashes.astype(np.uint64)[:, None] * np.uint64(0xBF58476D1CE4E5B9) ^ places * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(40)).astype(np.uint16).view(np.int16).reshape(-1, layers.count, layers.heads, CONTENT)


def page_of(hashes: Array, group: int, layers: Layers, shard: int) -> Array:
    """A page as the node keeps it, `[layer, block, head, token, content]`, but for the noise."""
    tokens = layers.block_tokens // layers.kernel_blocks
    flat = kv(hashes, group, layers, shard).reshape(-1, tokens, layers.count, layers.heads, CONTENT)
    return flat.transpose(2, 0, 3, 1, 4)


@dataclass(eq=False)
class Request:
    """What vLLM's `Request` tells connectors, and what its scheduler keeps of one."""

    request_id: str
    all_token_ids: list[int] = field(repr=False)
    max_tokens: int = 1
    salt: str = ""
    num_computed_tokens: int = 0
    status: str = "waiting"
    blocks: list[list[int]] = field(default_factory=list, repr=False)
    hashes: list[int] = field(default_factory=list, repr=False)
    loading: list[set[int]] = field(default_factory=list)
    """Blocks that a load may write now, by group."""
    kept: int = 0
    """Tokens of them that were there before."""
    external: int = 0
    """Tokens that were last promised to be loaded."""
    preemptions: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


class BlockPool:
    """Blocks of all groups under one numbering; 0 is nobody's. Those that are free still serve the prefix cache."""

    def __init__(self, blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self.users: Counter[int] = Counter()
        self.cached: dict[tuple[int, int], int] = {}
        self.name: dict[int, tuple[int, int]] = {}

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.forget(block)
            self.users[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != NULL:
                self.free.pop(block, None)
                self.users[block] += 1

    def give(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block != NULL:
                self.users[block] -= 1
                if not self.users[block]:
                    self.free[block] = None

    def cache(self, block: int, name: tuple[int, int]) -> None:
        if block != NULL and block not in self.name:
            self.name[block] = name
            self.cached.setdefault(name, block)

    def forget(self, block: int) -> None:
        name = self.name.pop(block, None)
        if name is not None and self.cached[name] == block:
            del self.cached[name]
            twin = next((each for each, other in self.name.items() if other == name), None)
            if twin is not None:
                self.cached[name] = twin


class PoolMemory:
    """What the engine tells of its blocks."""

    def __init__(self, pool: BlockPool, blocks: int) -> None:
        self.pool = pool
        self.blocks = blocks

    def free(self) -> Iterator[int]:
        return iter(self.pool.free)

    def content(self, block: int) -> object:
        return self.pool.name.get(block)


@dataclass
class Plan:
    """What one step computes."""

    tokens: dict[str, int] = field(default_factory=dict)
    sync: bool = False


class Engine:
    """See the module.

    Args:
        scheduler: The connector's side in the scheduler.
        workers: Its sides in the ranks.
        groups: Cache groups of the model.
        replicas: Ranks that hold the same.
        blocks: In the pool.
        budget: Tokens that a step computes at most.
        evicts: Whether blocks that could not be loaded leave the engine's own prefix cache at once. vLLM keeps them.
    """

    def __init__(
        self,
        scheduler: SchedulerSide,
        workers: Sequence[WorkerSide],
        groups: Sequence[Layers],
        *,
        replicas: int = 1,
        blocks: int = 64,
        budget: int = 64,
        evicts: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.workers = workers
        self.groups = groups
        self.budget = budget
        self.replicas = replicas
        self.evicts = evicts
        self.local_cache = True
        self.tolerant = False
        """Whether an answer that was computed with other KV is let pass: where that is the engine's own fault."""
        self.measured = False
        """Whether workers are told when a step begins, and so learn how long it takes."""
        self.weights = 0
        self.pool = BlockPool(blocks)
        self.told = PoolMemory(self.pool, blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: dict[str, list[int]] = {}
        self.loaded: Counter[str] = Counter()
        """Tokens that were loaded and used, by request."""
        self.invalid: list[set[int]] = []
        """Blocks that were reported as not loaded."""
        self.steps: list[Step] = []
        self.between: list[Callable[[], object]] = []
        """What happens once between the plan of the next step and its execution."""
        self.prompts: list[tuple[int, str, list[int]]] = []
        """All that was ever computed: weights, salt, tokens."""
        self._received: dict[str, set[int]] = {}
        self._rng = np.random.default_rng(7)
        # Groups of one size lie in the same memory, as vLLM lays them.
        shapes = [layers.memory(blocks).shape for layers in groups]
        self.memory: list[list[Array]] = []
        for worker in workers:
            made: dict[tuple[int, ...], Array] = {}
            for layers, shape in zip(groups, shapes, strict=True):
                made.setdefault(shape, layers.memory(blocks))
            mine = [made[shape] for shape in shapes]
            self.memory.append(mine)
            for each in made.values():
                each[:] = self._rng.integers(-(1 << 15), 1 << 15, each.shape, np.int16)
            worker.register(
                [layers.geometry(memory) for layers, memory in zip(groups, mine, strict=True)],
                "cpu",
                backend="FAKE",
                isa="",
            )

    # What users do

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, *, salt: str = "", **how: Any
    ) -> Request:
        """A request has come."""
        request = Request(request_id, list(prompt), max_tokens, salt)
        self.requests[request_id] = request
        self.waiting.append(request)
        self.scheduler.begin(request, Marks(salt=("", salt)), **how)
        return request

    def abort(self, request_id: str) -> None:
        """A user has gone."""
        request = self.requests[request_id]
        waits = request.status == "remote" and not self._received_by_all(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        self._remember(request)
        self.scheduler.end(request_id)
        if not waits:
            self._free(request)

    def reset(self) -> bool:
        """Other weights. As vLLM, only while no load is under way."""
        if any(request.loading for request in self.requests.values()):
            return False
        for request in reversed(self.running):
            self._preempt(request)
        for request in self.waiting:
            self._drop_blocks(request)
            request.num_computed_tokens = 0
        assert not self.pool.users.total(), "blocks that nobody owns"
        for block in list(self.pool.name):
            self.pool.forget(block)
        for request in self.requests.values():
            self._remember(request)
            request.hashes.clear()
        self.weights += 1
        self.scheduler.reset()
        return True

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        for block in list(self.pool.name):
            self.pool.forget(block)

    def run(self, steps: int = 400) -> None:
        """Go on until all requests are done."""
        for _ in range(steps):
            if not self.requests:
                return
            self.step()
        raise AssertionError(f"requests do not end: {self.requests}")

    def generate(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, *, salt: str = "", **how: Any
    ) -> int:
        """Run one request to its end. Returns how many tokens were loaded for it."""
        self.add(request_id, prompt, max_tokens, salt=salt, **how)
        self.run()
        return self.loaded[request_id]

    # A step

    def step(self) -> Plan:
        """Schedule, carry out, and take what came of it."""
        plan = self.schedule()
        loads = self.scheduler.take_loads()
        step = self.scheduler.step(plan.tokens, self._blocks_of)
        step.loads = loads
        step = pickle.loads(pickle.dumps(step))
        self.steps.append(step)
        while self.between:
            self.between.pop()()
        first = {each: self.requests[each].num_computed_tokens for each in plan.tokens}
        for request_id, tokens in plan.tokens.items():
            self.requests[request_id].num_computed_tokens += tokens
        wrong: set[str] = set()
        total = Report()
        bad: set[int] = set()
        failed: set[str] = set()
        ended: set[str] = set()
        for rank, worker in enumerate(self.workers):
            worker.begin(step)
            if not self.measured:
                worker._began = 0.0
            if plan.sync:
                self._start(rank, step, plan)
            wrong |= self._forward(rank, plan, first)
            if not plan.sync:
                self._start(rank, step, plan)
            before = [memory.copy() for memory in self.memory[rank]]
            worker.computed(step)
            worker.save(step)
            beside = worker._kv is not None and worker._kv.streams is not None  # loads go on meanwhile
            allowed = self._loading() if beside else [set() for _ in self.groups]
            self._unchanged(rank, before, allowed, "a save")
            mine, lost = worker.ended()
            for request_id in mine:
                self._received.setdefault(request_id, set()).add(rank)
                if len(self._received[request_id]) == len(self.workers):
                    ended.add(request_id)
            failed |= lost
            bad |= worker.bad_blocks()
            report = worker.report()
            if report is not None:
                total = total + pickle.loads(pickle.dumps(report))
        if bad:
            self.invalid.append(bad)
        self._update(plan, first, wrong, bad, failed, total, ended)
        return plan

    def _blocks_of(self, request_id: str) -> list[list[int]] | None:
        request = self.requests.get(request_id)
        return None if request is None else [list(table) for table in request.blocks]

    def _start(self, rank: int, step: Step, plan: Plan) -> None:
        before = [memory.copy() for memory in self.memory[rank]]
        self.workers[rank].start(step, busy=bool(plan.tokens))
        self._unchanged(rank, before, self._loading(), "a load")

    def _loading(self) -> list[set[int]]:
        """Blocks that are being loaded, by group."""
        allowed: list[set[int]] = [set() for _ in self.groups]
        for request in self.requests.values():
            for group, blocks in enumerate(request.loading):
                allowed[group] |= blocks
        return allowed

    def _unchanged(self, rank: int, before: list[Array], allowed: list[set[int]], what: str) -> None:
        for group, (layers, memory) in enumerate(zip(self.groups, self.memory[rank], strict=True)):
            allow = set(allowed[group])
            for other, each in enumerate(self.memory[rank]):
                if each is memory:
                    allow |= allowed[other]
            changed = np.flatnonzero((memory != before[group]).any(axis=(0, 2, 3, 4))) // layers.kernel_blocks
            strange = set(changed.tolist()) - allow
            if strange:
                raise Wrong(f"{what} has changed blocks {sorted(strange)} of group {group} on rank {rank}")

    # Scheduling

    def schedule(self) -> Plan:
        """As vLLM: those that run first, then those that wait for a load and so have blocks, then the others, who may
        have to wait for these blocks."""
        plan = Plan()
        budget = self.budget
        preempted = False
        for request in list(self.running):
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if request not in self.running or tokens <= 0:
                continue
            while not self._extend(request, request.num_computed_tokens + tokens):
                victim = self.running[-1]
                budget += plan.tokens.pop(victim.request_id, 0)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if request.status == "running":
                plan.tokens[request.request_id] = tokens
                budget -= tokens
        waiting = sorted(self.waiting, key=lambda request: request.status != "remote")
        for request in [] if preempted else waiting:
            if request.status == "remote":
                if not self._received_by_all(request):
                    continue
                self._promote(request)
            if budget <= 0:
                break
            spent = self._admit(request, plan, budget)
            if spent is None:
                break
            budget -= spent
        return plan

    def _admit(self, request: Request, plan: Plan, budget: int) -> int | None:
        """Let a request in. Returns the tokens it computes, None if there is no room."""
        local: list[list[int]] = []
        kept = external = 0
        beside = False
        computed = request.num_computed_tokens
        if not computed:
            kept, local = self._look_up(request)
            found, beside = self.scheduler.match(request.request_id, kept)
            if found is None:
                return 0
            assert found >= 0
            request.external = external = found
            computed = kept + external
            assert computed <= request.num_tokens - (not beside), "nothing is left to compute"
            assert not beside or external
        tokens = 0 if beside else min(request.num_tokens - computed, budget)
        if not self._allocate(request, local, computed, tokens, whole=beside):
            return None
        if external:
            request.kept = kept
            request.loading = [
                set(table[kept // layers.block_tokens : -(-computed // layers.block_tokens)]) - {NULL}
                for layers, table in zip(self.groups, request.blocks, strict=True)
            ]
        self.scheduler.allocated(request.request_id, [list(table) for table in request.blocks], external)
        request.num_computed_tokens = computed
        if beside:
            request.status = "remote"
            return 0
        self._cache(request, computed + tokens)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = "running"
        plan.sync |= external > 0
        plan.tokens[request.request_id] = tokens
        return tokens

    def _look_up(self, request: Request) -> tuple[int, list[list[int]]]:
        hashes = self.hashes(request)
        step = max(layers.block_tokens for layers in self.groups)
        for tokens in range((request.num_tokens - 1) // step * step, 0, -step):
            tables = []
            for group, layers in enumerate(self.groups):
                size = layers.block_tokens
                first = layers.first_needed(tokens) // size
                ends = range(size * (first + 1), tokens + 1, size)
                found = [self.pool.cached.get((group, hashes[end - 1])) for end in ends]
                if None in found or not self.local_cache:
                    break
                tables.append([NULL] * first + [block for block in found if block is not None])
            else:
                return tokens, tables
        return 0, []

    def _allocate(
        self, request: Request, local: list[list[int]], computed: int, tokens: int, *, whole: bool = False
    ) -> bool:
        if request.blocks:
            return self._extend(request, computed + tokens)
        local = local or [[] for _ in self.groups]
        needed = nulls = 0
        tables = []
        for layers, mine in zip(self.groups, local, strict=True):
            count = -(-(computed + tokens) // layers.block_tokens)
            skipped = layers.first_needed(computed) // layers.block_tokens
            nulls = max(0, skipped - len(mine))
            tables.append((nulls, max(0, count - len(mine) - nulls)))
            end = request.num_tokens if whole else computed + tokens
            needed += max(0, -(-end // layers.block_tokens) - len(mine) - nulls)
        idle = len({block for table in local for block in table if block in self.pool.free})
        if needed > len(self.pool.free) - idle - (self._promised() if whole else 0):
            return False
        for mine in local:  # of all groups, before any of them takes what is free
            self.pool.share(mine)
        for mine, (nulls, new) in zip(local, tables, strict=True):
            request.blocks.append([*mine, *[NULL] * nulls, *self._take(new)])
        for layers, table in zip(self.groups, request.blocks, strict=True):
            self._leave_behind(layers, table, computed)
        return True

    def _promised(self) -> int:
        """Blocks that requests which hold some will need for the rest of their prompts: without them, loads that wait
        for each other's blocks would wait for ever."""
        return sum(
            max(0, -(-request.num_tokens // layers.block_tokens) - len(table))
            for request in self.requests.values()
            if request.status != "finished"
            for layers, table in zip(self.groups, request.blocks, strict=False)
        )

    def _extend(self, request: Request, tokens: int) -> bool:
        for layers, table in zip(self.groups, request.blocks, strict=True):
            self._leave_behind(layers, table, request.num_computed_tokens)
        new = [
            -(-tokens // layers.block_tokens) - len(table)
            for layers, table in zip(self.groups, request.blocks, strict=True)
        ]
        if sum(max(0, each) for each in new) > len(self.pool.free):
            return False
        for table, each in zip(request.blocks, new, strict=True):
            table += self._take(max(0, each))
        self._cache(request, tokens)
        return True

    def _leave_behind(self, layers: Layers, table: list[int], computed: int) -> None:
        for number in range(min(layers.first_needed(computed) // layers.block_tokens, len(table))):
            self.pool.give([table[number]])
            table[number] = NULL

    def _take(self, count: int) -> list[int]:
        taken = self.pool.take(count)
        for memories in self.memory:
            for layers, memory in zip(self.groups, memories, strict=True):
                for block in taken:
                    there = memory[:, block * layers.kernel_blocks : (block + 1) * layers.kernel_blocks]
                    there[:] = self._rng.integers(-(1 << 15), 1 << 15, there.shape, np.int16)
        return taken

    def _cache(self, request: Request, tokens: int) -> None:
        hashes = self.hashes(request)
        for group, (layers, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
            for number in range(min(tokens, request.num_tokens) // layers.block_tokens):
                self.pool.cache(table[number], (group, hashes[(number + 1) * layers.block_tokens - 1]))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._drop_blocks(request)
        request.num_computed_tokens = 0
        request.status = "preempted"
        request.preemptions += 1
        self.waiting.insert(0, request)

    def _received_by_all(self, request: Request) -> bool:
        return len(self._received.get(request.request_id, ())) == len(self.workers)

    def _promote(self, request: Request) -> None:
        """A load beside the steps has ended."""
        del self._received[request.request_id]
        request.loading = []
        if request.num_computed_tokens:
            self._cache(request, request.num_computed_tokens)
        else:
            self._drop_blocks(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = "waiting"

    def _drop_blocks(self, request: Request) -> None:
        for table in request.blocks:
            self.pool.give(table)
        request.blocks = []

    def _free(self, request: Request) -> None:
        self._drop_blocks(request)
        request.loading = []
        self._received.pop(request.request_id, None)
        del self.requests[request.request_id]

    # Computing

    def hashes(self, request: Request) -> list[int]:
        return chain(request.all_token_ids, self._seed(self.weights, request.salt), request.hashes)

    @staticmethod
    def _seed(weights: int, salt: str) -> int:
        return weights * 1_000_003 + int.from_bytes(salt.encode(), "big") + 1

    def _forward(self, rank: int, plan: Plan, first: dict[str, int]) -> set[str]:
        """Compute tokens. Returns the requests that were computed with KV that is not theirs."""
        wrong = set()
        worker = self.workers[rank]
        names = [f"layer {n} group {group}" for group, layers in enumerate(self.groups) for n in range(layers.count)]
        for name in names if plan.tokens else ():
            worker.wait_layer(name)
        for request_id, count in plan.tokens.items():
            request, start = self.requests[request_id], first[request_id]
            right = self.right(rank, request, start)
            if not right:
                wrong.add(request_id)
            hashes = np.array(self.hashes(request)[start : start + count], np.uint64)
            for group, layers in enumerate(self.groups):
                made = kv(hashes if right else ~hashes, group, layers, rank // self.replicas)
                made[..., -1] = self._rng.integers(-(1 << 15), 1 << 15, made[..., -1].shape, np.int16)
                blocks, offsets = self._places(request, group, start, start + count)
                assert blocks.all(), "the null block is nobody's"
                self.memory[rank][group][:, blocks, :, offsets] = made
        for name in names if plan.tokens else ():
            worker.layer_computed(name)
        return wrong

    def _places(self, request: Request, group: int, start: int, end: int) -> tuple[Array, Array]:
        """Where tokens lie: blocks of the tensor, and places in them."""
        layers = self.groups[group]
        tokens = np.arange(start, end)
        size = layers.block_tokens // layers.kernel_blocks
        block = np.array(request.blocks[group], np.intp)[tokens // layers.block_tokens]
        inside = tokens % layers.block_tokens
        return block * layers.kernel_blocks + inside // size, inside % size

    def right(self, rank: int, request: Request, computed: int) -> bool:
        """Whether all that the next tokens look at is what it must be."""
        hashes = np.array(self.hashes(request), np.uint64)
        for group, layers in enumerate(self.groups):
            start = layers.first_needed(computed)
            blocks, offsets = self._places(request, group, start, computed)
            there = self.memory[rank][group][:, blocks, :, offsets]
            expected = kv(hashes[start:computed], group, layers, rank // self.replicas)
            if not blocks.all() or not np.array_equal(there[..., :-1], expected[..., :-1]):
                return False
        return True

    # What came of it

    def _update(
        self,
        plan: Plan,
        first: dict[str, int],
        wrong: set[str],
        bad: set[int],
        failed: set[str],
        report: Report,
        ended: set[str],
    ) -> None:
        assert not bad or len(self.groups) == 1, "numbers of blocks mean nothing with several groups"
        for request_id in failed:
            if self.requests[request_id].status == "remote":
                self.requests[request_id].num_computed_tokens = 0
        affected = self._invalid(bad, first)
        for request_id in plan.tokens:
            request = self.requests[request_id]
            request.loading = []
            if request_id in affected:
                continue
            if request_id in wrong and not self.tolerant:
                raise Wrong(f"{request_id} was computed with KV that is not its own")
            self.loaded[request_id] += request.external
            request.external = 0
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(self.hashes(request)[-1] % VOCABULARY)
                if len(request.output) == request.max_tokens:
                    self._finish(request)
        if plan.tokens or report or bad or ended:  # vLLM drops the output of a step in which nothing happened
            self.scheduler.ended()
        if report:
            self.scheduler.report(report)
        for request_id in ended:
            request = self.requests[request_id]
            if request.status == "finished":
                self._free(request)
            else:
                assert request.status == "remote"

    def _invalid(self, bad: set[int], first: dict[str, int]) -> set[str]:
        affected = set()
        marked: set[int] = set()
        for request in [each for each in self.waiting if each.status == "remote"] + self.running:
            if not bad:
                break
            size = self.groups[0].block_tokens
            computed = first.get(request.request_id, request.num_computed_tokens)
            table = request.blocks[0]
            hit = [number for number in range(-(-computed // size)) if table[number] in bad]
            if not hit:
                continue
            affected.add(request.request_id)
            mine = [number for number in hit if self.evicts or table[number] not in marked]
            marked |= {table[number] for number in hit}
            request.num_computed_tokens = min(mine[0] * size, computed) if mine else computed
            request.external = max(0, request.num_computed_tokens - request.kept) if request.loading else 0
            if self.evicts and request.status == "running":
                for block in table[hit[0] :]:
                    self.pool.forget(block)
        return affected - {each.request_id for each in self.waiting}

    def _finish(self, request: Request) -> None:
        self.done[request.request_id] = request.output
        self.running.remove(request)
        request.status = "finished"
        self._remember(request)
        self.scheduler.end(request.request_id)
        self._free(request)

    def _remember(self, request: Request) -> None:
        self.prompts.append((self.weights, request.salt, list(request.all_token_ids)))

    def expected(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> list[int]:
        """What a prompt is answered with."""
        tokens = list(prompt)
        known: list[int] = []
        for _ in range(max_tokens):
            tokens.append(chain(tokens, self._seed(self.weights, salt), known)[-1] % VOCABULARY)
        return tokens[len(prompt) :]

    def chains(self, weights: int) -> list[tuple[str, list[int], list[int]]]:
        """Of all that was ever computed with these weights: salt, tokens, and what stands for them."""
        return [
            (salt, tokens, chain(tokens, self._seed(weights, salt), []))
            for known, salt, tokens in self.prompts
            if known == weights
        ]
