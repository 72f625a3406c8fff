"""Ranks of one engine fill and read their parts of a chunk; a scheduler begins and ends the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.client import Client, Held, Model, Storing
from lmcache_core.config import Config, CpuConfig
from lmcache_core.errors import UsageError
from lmcache_core.keys import page_keys
from lmcache_core.node import Node
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer
from tests.node.kv import CHUNK_FRAME, CHUNK_TOKENS, PAGE_BYTES, PAGE_TOKENS, namespace, tokens, until

RANKS = 2
KEYS = page_keys(tokens("abcdefgh"), PAGE_TOKENS)


class Engine:
    """A scheduler and its ranks, each at the node's socket by itself."""

    def __init__(self, path: Path) -> None:
        config = Config(CHUNK_TOKENS, PAGE_TOKENS, call_timeout=10.0)
        self.scheduler: Client = RemoteClient(str(path), config)
        self.ranks = [RemoteClient(str(path), config, shard=rank) for rank in range(RANKS)]
        self.model: Model = self.scheduler.register(namespace(shards=RANKS))

    def begin(self) -> tuple[Storing, int]:
        storing = self.scheduler.begin_store(self.model, KEYS)
        return storing, self.scheduler.share(storing)

    def join(self, rank: int, number: int) -> Storing:
        joined = self.ranks[rank].join_store(number)
        assert joined is not None
        return joined

    def fill(self, rank: int, joined: Storing, number: int) -> None:
        room = joined.rooms[number]
        room.target[:] = part(rank, room.part.first, room.part.pages)
        self.ranks[rank].filled(room)

    def pages(self) -> int:
        return self.scheduler.lookup(self.model, KEYS).pages

    def close(self) -> None:
        for client in (self.scheduler, *self.ranks):
            client.close()


def part(rank: int, first: int, pages: int) -> bytes:
    """What a rank holds of those pages."""
    return b"".join(bytes([16 * rank + page]) * PAGE_BYTES for page in range(first, first + pages))


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(Config(CHUNK_TOKENS, PAGE_TOKENS, CpuConfig(capacity=6 * CHUNK_FRAME))) as node:
        yield node


@pytest.fixture
def engine(node: Node, tmp_path: Path) -> Iterator[Engine]:
    node.servers.append(NodeServer(node, str(tmp_path / "s")))
    engine = Engine(tmp_path / "s")
    yield engine
    engine.close()
    until(lambda: not node.pool.slots or node.pool.slots == len(node.guard.index.policy))
    assert not node.shared


def test_a_chunk_can_be_read_once_all_ranks_have_filled_their_part(engine: Engine) -> None:
    storing, number = engine.begin()
    joined = [engine.join(rank, number) for rank in range(RANKS)]
    for chunk in range(2):
        engine.fill(0, joined[0], chunk)
        assert engine.pages() == 4 * chunk
        engine.fill(1, joined[1], chunk)
        until(lambda chunk=chunk: engine.pages() == 4 * (chunk + 1))  # type: ignore[misc]
    for rank in range(RANKS):
        assert engine.ranks[rank].finish_store(joined[rank]).pages == 8
    assert engine.scheduler.finish_store(storing).pages == 8
    held = engine.scheduler.hold(engine.model, KEYS)
    number = engine.scheduler.share(held)
    for rank, client in enumerate(engine.ranks):
        mine = client.join_hold(number)
        assert isinstance(mine, Held)
        grants = client.grant(mine, 0, 8)
        assert [bytes(grant.source or b"") for grant in grants] == [part(rank, 0, 4), part(rank, 4, 4)]
        client.consume(mine, 2)
        client.release(mine)
    engine.scheduler.release(held)
    until(lambda: engine.ranks[0].join_hold(number) is None)


def test_a_rank_that_dies_leaves_no_half_chunk(engine: Engine, node: Node) -> None:
    storing, number = engine.begin()
    joined = [engine.join(rank, number) for rank in range(RANKS)]
    engine.fill(0, joined[0], 0)
    engine.fill(1, joined[1], 0)
    engine.fill(0, joined[0], 1)
    until(lambda: engine.pages() == 4)
    engine.ranks[1].close()
    assert engine.ranks[0].finish_store(joined[0]).pages == 4
    assert engine.scheduler.finish_store(storing).pages == 4
    assert engine.pages() == 4
    until(lambda: node.pool.slots == 1)


def test_room_that_a_rank_still_fills_is_used_for_nothing_else(engine: Engine, node: Node) -> None:
    storing, number = engine.begin()
    joined = engine.join(0, number)
    assert engine.scheduler.finish_store(storing).pages == 0  # given up while rank 0 copies
    assert node.pool.slots == 2
    assert engine.ranks[1].join_store(number) is None
    engine.fill(0, joined, 0)
    engine.ranks[0].finish_store(joined)
    until(lambda: node.pool.slots == 0)
    assert engine.pages() == 0


def test_the_end_of_a_scheduler_ends_its_store(engine: Engine, node: Node) -> None:
    _, number = engine.begin()
    joined = engine.join(0, number)
    engine.scheduler.close()
    until(lambda: not node.shared)
    assert node.pool.slots == 2
    engine.ranks[0].finish_store(joined)
    until(lambda: node.pool.slots == 0)


def test_a_part_is_reported_once(engine: Engine, node: Node) -> None:
    _, number = engine.begin()
    first, second = engine.join(0, number), engine.join(0, number)
    engine.fill(0, first, 0)
    engine.fill(0, second, 0)  # refused, since it has no answer it is not heard of
    assert engine.ranks[1].lookup(engine.ranks[1].register(namespace(shards=RANKS)), KEYS).pages == 0
    engine.ranks[0].finish_store(first)
    engine.ranks[0].finish_store(second)


def test_what_all_ranks_hold_alike_is_written_by_the_first(node: Node, tmp_path: Path) -> None:
    node.servers.append(NodeServer(node, str(tmp_path / "s")))
    engine = Engine(tmp_path / "s")
    engine.model = engine.scheduler.register(namespace())
    storing, number = engine.begin()
    first, second = engine.join(0, number), engine.join(1, number)
    assert (len(first.rooms), len(second.rooms)) == (2, 0)
    for chunk in range(2):
        engine.fill(0, first, chunk)
    engine.ranks[0].finish_store(first)
    engine.ranks[1].finish_store(second)
    assert engine.scheduler.finish_store(storing).pages == 8
    held = engine.scheduler.hold(engine.model, KEYS)
    mine = engine.ranks[1].join_hold(engine.scheduler.share(held))
    assert mine is not None
    assert bytes(engine.ranks[1].grant(mine, 0, 8)[0].source or b"") == part(0, 0, 4)
    engine.ranks[1].release(mine)
    engine.scheduler.release(held)
    engine.close()


def test_a_rank_beyond_the_shards_is_refused(node: Node, tmp_path: Path) -> None:
    node.servers.append(NodeServer(node, str(tmp_path / "s")))
    engine = Engine(tmp_path / "s")
    storing, number = engine.begin()
    third = RemoteClient(str(tmp_path / "s"), Config(CHUNK_TOKENS, PAGE_TOKENS, call_timeout=10.0), shard=2)
    model = third.register(namespace(shards=RANKS))
    held = engine.scheduler.hold(engine.model, KEYS)
    lease = engine.scheduler.share(held)
    engine.scheduler.release(held)
    for ask in (
        lambda: third.join_store(number),
        lambda: third.begin_store(model, KEYS),
        lambda: third.hold(model, KEYS),
    ):
        with pytest.raises(UsageError, match="a client of shard 2 cannot copy chunks of 2 shards"):
            ask()
    engine.scheduler.finish_store(storing)
    until(lambda: third.join_hold(lease) is None)
    assert (third.stats().leases, third.stats().staged, third.stats().slots) == (0, 0, 0)
    third.close()
    engine.close()
