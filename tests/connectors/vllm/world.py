"""An engine and a node behind it, opened for a test, and what must hold of them at the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lmcache_core.client import AHEAD, Client, Held
from lmcache_core.config import BreakerConfig, Config, CpuConfig, TierConfig
from lmcache_core.connectors.vllm.options import Options
from lmcache_core.connectors.vllm.plan import Facts
from lmcache_core.connectors.vllm.requests import Marks
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.direct import DirectClient
from lmcache_core.index.index import Index
from lmcache_core.keys import PageHasher
from lmcache_core.namespace import Group, GroupKind, Namespace
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend
from lmcache_core.service import beside
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from tests.connectors.vllm.engine import CONTENT, Engine, Layers, Wrong, page_of
from tests.node.kv import until

PAGE_TOKENS = 16
CHUNK_TOKENS = 32
FRAME = 4096 + 8192
"""At least what a chunk takes in the pool."""
LAYERWISE: bool | None = None
"""How workers copy, unless a test says so."""
QUICK = BreakerConfig(failures=2, cooldown=0.01, max_cooldown=0.05)
GROUPS = {
    "f": Layers(),
    "w": Layers(window=24),
    "k": Layers(kernel_blocks=2, heads=3),
    "o": Layers(dims="bhoo"),
    "b": Layers(block_tokens=8, window=40, count=1),
    "p": Layers(block_tokens=16),
}


class Clock:
    """Seconds that pass when they are asked for, a little each time, and otherwise when a test says so."""

    def __init__(self, tick: float = 1e-5) -> None:
        self.now = 1000.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Watched:
    """A client that counts its calls, and what of what it was given has not been given back."""

    def __init__(self, client: Client) -> None:
        self.inner: Any = client
        self.calls: dict[str, int] = {}
        self.holding: list[Held] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            got = value(*args, **kwargs)
            if name == "hold":
                self.holding.append(got)
            if name == "release":
                self.holding = [held for held in self.holding if held is not args[0]]
            return got

        return call

    def called(self, name: str) -> int:
        """How often, since this was last asked."""
        return self.calls.pop(name, 0)


@dataclass
class World:
    """See the module."""

    engine: Engine
    scheduler: SchedulerSide
    workers: list[WorkerSide]
    client: Watched
    node: Node
    clock: Clock
    """Of the scheduler's side."""
    worker_clock: Clock
    warnings: list[str]
    spaces: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Of each space the engine's weights and the group."""

    @property
    def index(self) -> Index:
        return self.node.guard.index

    def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> int:
        """Run one request, check its answer, and let what it stores arrive. Returns the tokens loaded for it."""
        loaded = self.engine.generate(request_id, prompt, max_tokens, **more)
        assert self.engine.done[request_id] == self.engine.expected(prompt, max_tokens, more.get("salt", ""))
        self.settle()
        return loaded

    def settle(self) -> None:
        """Let copies, reads and writes end."""
        for worker in self.workers:
            if worker._kv is not None and worker._kv.streams is not None:
                stores, loads = worker._kv.streams.store([]), worker._kv.streams.load([])
                stores.end().result(10)  # copies end in their order
                loads.done.result(10)
                stores.close()
                loads.close()
        assert DirectClient(self.node).flush(20)

    def forget(self, *places: str) -> None:
        """Empty the engine's own prefix cache, and the places named."""
        self.settle()
        self.engine.forget()
        if places:
            client = DirectClient(self.node)
            with self.node.guard.mutex:
                entries = [entry for space in self.index.spaces.values() for entry in space.chunks.values()]
                self.index.evict(entries, client._mask(places))
        self.settle()

    def at_rest(self) -> None:
        """Nothing is held, staged or under way, and nothing is stored that is not right."""
        assert not self.engine.requests
        self.settle()
        if self.workers[0]._options.layerwise is not None:  # what has been stored is told with a step's output
            self.engine.step()
        assert self.scheduler.idle
        self.settle()
        client = DirectClient(self.node)

        def left() -> tuple[int, ...]:
            stats = client.stats()  # what was read too late is let go of when the read has ended
            return stats.leases, stats.staged, stats.slots - stats.chunks, len(self.node.shared)

        until(lambda: left() == (0, 0, 0, 0), 3.0)
        assert not self.engine.pool.users.total()
        self.check_stored()

    def check_stored(self) -> int:
        """Compare all that the node holds with what it must be. Returns how many pages there are."""
        pages = 0
        for weights in range(self.engine.weights + 1):
            known = self._pages(weights)
            for digest, (epoch, group) in self.spaces.items():
                with self.node.guard.mutex:  # a tier may just be coming back
                    if epoch == weights and digest in self.index.spaces:
                        pages += self._check_space(digest, group, known)
        assert set(self.index.spaces) <= set(self.spaces)
        return pages

    def _pages(self, weights: int) -> dict[bytes, np.ndarray[Any, Any]]:
        """By key, what stands for the tokens of a page."""
        known = {}
        for salt, tokens, hashes in self.engine.chains(weights):
            for number, key in enumerate(self.keys(tokens, salt)):
                known[key] = np.array(hashes[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS], np.uint64)
        return known

    @staticmethod
    def keys(tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Of the pages of a prompt."""
        hasher: PageHasher = Marks(salt=("", salt)).hasher(PAGE_TOKENS)
        return hasher.extend(list(tokens))

    def _check_space(self, digest: bytes, group: int, known: Mapping[bytes, Any]) -> int:
        space = self.index.spaces[digest]
        pages = 0
        for entry in space.chunks.values():
            frames = [] if entry.slot is None else [entry.slot.frame]
            for runner in self.node.runners:
                values = getattr(bare(runner.backend), "values", {})
                found = list(values.items())
                frames += [memoryview(value) for key, (_, value) in found if key == (digest, entry.key)]
            form = space.form(len(entry.pages))
            for frame in frames:
                for shard in range(space.known.shards):
                    start = form.header_bytes + shard * form.shard_bytes
                    for number, key in enumerate(entry.pages):
                        place = start + number * form.page_bytes
                        if key not in known:
                            raise Wrong("a page is stored that nobody has computed")
                        page = np.frombuffer(frame[place : place + form.page_bytes], np.int16)
                        expected = page_of(known[key], group, self.engine.groups[group], shard)
                        if not np.array_equal(page.reshape(expected.shape)[..., :-1], expected[..., :-1]):
                            raise Wrong(f"page {number} of a chunk of group {group}, shard {shard}, is stored wrong")
                    pages += len(entry.pages)
        return pages


def bare(backend: Any) -> Any:
    """A backend without its wrappers."""
    while hasattr(backend, "inner"):
        backend = backend.inner
    return backend


def describe(groups: Sequence[Layers], facts: Facts, page_tokens: int, shards: int) -> Namespace:
    """The namespace of the engine's KV."""
    made = []
    first = 0
    for layers, nbytes in zip(groups, facts.block_layer_bytes, strict=True):
        made.append(
            Group(
                kind=GroupKind.FULL if layers.window is None else GroupKind.WINDOW,
                layers=tuple(range(first, first + layers.count)),
                page_layer_bytes=nbytes * page_tokens // layers.block_tokens,
                dtype="int16",
                kv_heads=layers.heads,
                head_size=CONTENT,
                planes=1,
                window_tokens=layers.window,
            )
        )
        first += layers.count
    return Namespace(
        weights="made up", groups=tuple(made), page_tokens=page_tokens, encoding=facts.encoding, shards=shards
    )


_names = itertools.count()


@contextmanager
def open_world(
    *backends: StorageBackend,
    groups: str = "f",
    ranks: int = 1,
    replicas: int = 1,
    slots: int = 64,
    socket: Path | None = None,
    page_tokens: int = PAGE_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    tiers: Sequence[dict[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    may_wait: bool = True,
    lease_seconds: float = 30.0,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Iterator[World]:
    """An engine over a node with the backends as tiers `t0`, `t1`, ... With `socket`, a directory, each side talks to
    the node through one; `more` is the engine's."""
    layers = [GROUPS[letter] for letter in groups]
    rules = []
    for number in range(len(backends)):
        rule: dict[str, Any] = {"name": f"t{number}", "breaker": QUICK}
        rules.append(TierConfig("test", **rule | (tiers[number] if number < len(tiers) else {})))
    config = Config(
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        cpu=CpuConfig(capacity=slots * FRAME),
        tiers=tuple(rules),
        call_timeout=10.0,
        **(settings or {}),
    )
    chosen = Options(**{"sync_load": 1e9, "load_slice": 4e-3, "layerwise": LAYERWISE} | dict(options or {}))
    clock, worker_clock, warnings = Clock(), Clock(1e-3), list[str]()
    with ExitStack() as stack:
        node = stack.enter_context(Node(config, backends))
        stack.enter_context(
            patch.object(beside, "make_reader", lambda tier: bare(backends[int(tier.name[1:])]).reader())
        )
        if socket is not None:
            path = str(socket / f"v{next(_names)}")
            node.servers.append(NodeServer(node, path))

        def connect(shard: int, *, past_host: bool = False) -> Client:
            if socket is None:
                return DirectClient(node, shard=shard)
            ahead = 0 if chosen.past_host else AHEAD
            client = RemoteClient(path, config, shard=shard, past_host=past_host, ahead=ahead)
            stack.callback(client.close)
            until(lambda: client._readers is None or not client._readers.opening)
            return client

        spaces: dict[bytes, tuple[int, int]] = {}
        client = Watched(connect(0))
        scheduler = SchedulerSide(
            client,
            chosen,
            lambda facts: describe(layers, facts, page_tokens, ranks // replicas),
            page_tokens=page_tokens,
            block_tokens=[each.block_tokens for each in layers],
            ranks=ranks,
            may_wait=may_wait and len(layers) == 1,
            lease_seconds=lease_seconds,
            warn=lambda kind, text: warnings.append(f"{kind}: {text}"),
            clock=clock,
        )
        clients = [connect(rank // replicas, past_host=chosen.past_host) for rank in range(ranks)]
        workers = [
            WorkerSide(
                chosen,
                functools.partial(clients.__getitem__, rank),
                writes=rank % replicas == 0,
                warn=lambda kind, text: warnings.append(f"{kind}: {text}"),
                clock=worker_clock,
            )
            for rank in range(ranks)
        ]
        engine = Engine(scheduler, workers, layers, replicas=replicas, **more)
        if chosen.lazy_offload:
            scheduler.store_late(engine.told, engine.budget)
        world = World(engine, scheduler, workers, client, node, clock, worker_clock, warnings, spaces)
        note_spaces(world)
        for worker in workers:
            stack.callback(worker.close)
        yield world


def note_spaces(world: World) -> None:
    """Note of each space with which weights it was registered."""
    register: Callable[[Namespace], Any] = world.client.register

    def noting(namespace: Namespace) -> Any:
        for group in range(len(namespace.groups)):
            world.spaces[namespace.space(group)] = (world.engine.weights, group)
        return register(namespace)

    world.client.__dict__["register"] = noting


def prompt(text: str, each: int = PAGE_TOKENS) -> list[int]:
    """Token ids: each letter is a page of that letter, each digit a single token."""
    tokens: list[int] = []
    for letter in text:
        tokens += [ord(letter) % 50] if letter.isdigit() else [(ord(letter) + place) % 50 for place in range(each)]
    return tokens
