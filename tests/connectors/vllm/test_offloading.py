"""KV that is stored late: when, what, and what is never stored; over an engine and a real node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_core.connectors.vllm.blocks import EngineBlocks
from lmcache_core.connectors.vllm.counters import Counts
from lmcache_core.connectors.vllm.offloading import EVERY, Offloading, Piece, runs
from lmcache_core.direct import DirectClient
from lmcache_core.errors import LayoutError
from lmcache_core.planning.stalls import smallest_window
from tests.connectors.vllm.world import World, open_world, prompt

LATE = {"lazy_offload": True}


def stored_pages(world: World) -> int:
    with world.node.guard.mutex:
        return sum(len(entry.pages) for space in world.index.spaces.values() for entry in space.chunks.values())


def test_nothing_is_stored_while_the_engine_has_other_blocks_to_take() -> None:
    with open_world(options=LATE, blocks=400) as world:
        for number, text in enumerate(["abcd12", "efgh", "abcd12", "ijkl"]):
            world.generate(f"r{number}", prompt(text), 20)
        assert stored_pages(world) == 0
        assert world.engine.loaded.total() == 0
        world.at_rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_engine_has_given_up_is_loaded(ranks: int) -> None:
    """80 blocks are 320 tokens: of 8 prompts of 64 tokens the first are gone when they come again."""
    texts = ["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx", "yzab", "cdef"]
    with open_world(options=LATE, blocks=80, ranks=ranks) as world:
        for number, text in enumerate(texts):
            assert world.generate(f"first {number}", prompt(text)) == 0
        for number, text in enumerate(texts):
            local = sum(  # of the last token there is never anything to load
                name in world.engine.pool.cached for name in [(0, key) for key in _hashes(world, prompt(text))[3:63:4]]
            )
            loaded = world.generate(f"again {number}", prompt(text))
            assert loaded >= 63 - 4 * local - 16, "but for what a page is cut to"
        assert world.engine.loaded.total() > 300
        assert world.scheduler.counts["lost_tokens", ""] == 0
        world.at_rest()


def _hashes(world: World, tokens: list[int]) -> list[int]:
    request = world.engine.add("hashed", tokens)
    hashes = list(world.engine.hashes(request))
    world.engine.abort("hashed")
    return hashes


def test_the_rest_is_loaded_behind_what_the_engine_has_kept() -> None:
    """An engine gives up the end of a prompt first: the node has that alone, and it is found."""
    text = "abcdefghijklmnopqrstuvwxyz"
    with open_world(options=LATE, blocks=180) as world:
        world.generate("a", prompt(text))
        for number, other in enumerate(["qrst", "uvwx", "yzab", "cdef", "ghij"]):
            world.generate(f"r{number}", prompt(other))
        request = world.engine.add("again", prompt(text))
        local, _ = world.engine._look_up(request)
        assert 128 < local < 400, "the beginning is there, the end is not"
        client, model = DirectClient(world.node), world.scheduler._model
        assert model is not None
        assert client.lookup(model, world.keys(prompt(text)), quiet=True).pages == 0, "the node has no beginning"
        world.engine.run()
        assert world.engine.loaded["again"] == 26 * 16 - local - 1, "the last token is computed"
        world.at_rest()


def test_what_is_used_again_is_not_copied_again() -> None:
    with open_world(options=LATE, blocks=80) as world:
        for _ in range(4):
            for number, text in enumerate(["abcd", "efgh", "ijkl"]):
                world.generate(f"{number}", prompt(text))
        assert world.scheduler.counts["stored_tokens", ""] <= 3 * 64
        copied = DirectClient(world.node).stats().counts.get("dropped_chunks", {})
        assert not sum(copied.values())
        world.at_rest()


def test_blocks_in_use_are_stored_too_where_few_are_free() -> None:
    """A request that takes nearly all blocks: what follows it takes them before its end could be planned for."""
    with open_world(options=LATE, blocks=40) as world:
        world.generate("a", prompt("abcdefgh"), 4)
        world.generate("b", prompt("ijklmnop"), 4)
        assert world.generate("a again", prompt("abcdefgh"), 4) >= 96
        world.at_rest()


def test_what_the_engine_takes_unstored_is_counted() -> None:
    with open_world(options=LATE, blocks=80) as world:
        world.generate("a", prompt("abcd"))
        world.node.guard.index.frozen = True  # there is no room for anything
        for number, text in enumerate(["efgh", "ijkl", "mnop", "qrst", "uvwx"]):
            world.generate(f"r{number}", prompt(text))
        assert stored_pages(world) == 0
        assert world.scheduler.counts["lost_tokens", ""] >= 64
        world.node.guard.index.frozen = False
        world.at_rest()


def test_a_reset_forgets_what_is_in_blocks() -> None:
    with open_world(options=LATE, blocks=80) as world:
        for number, text in enumerate(["abcd", "efgh", "ijkl"]):
            world.generate(f"r{number}", prompt(text))
        assert world.engine.reset()
        before = stored_pages(world)
        for number, text in enumerate(["mnop", "qrst"]):
            world.generate(f"s{number}", prompt(text))
        for epoch, group in list(world.spaces.values()):
            assert (epoch, group) in {(0, 0), (1, 0)}
        assert stored_pages(world) >= before
        assert world.generate("again", prompt("abcd")) == 0
        world.at_rest()


def test_a_step_that_went_wrong_is_not_stored_late() -> None:
    """A load within a step fails, what the step computes behind it is nonsense, and the request is gone before that is
    made good. The engine keeps the blocks for what they should have been, as vLLM does."""
    with open_world(options=LATE, blocks=80, evicts=False) as world:
        world.generate("a", prompt("ab"))
        for number, text in enumerate(["mnop", "qrst", "uvwx", "yzab", "cdef"]):
            world.generate(f"r{number}", prompt(text))
        world.forget()
        world.engine.tolerant = True
        world.engine.add("again", prompt("abgh"))
        world.engine.between.append(lambda: DirectClient(world.node).clear())
        world.engine.step()
        assert world.engine.invalid, "what was promised is gone"
        world.engine.abort("again")
        for number, text in enumerate(["mnop", "qrst", "uvwx", "yzab", "cdef"]):
            world.generate(f"s{number}", prompt(text))
        world.at_rest()


# By itself


class Blocks:
    """Blocks in an order, and what is in them."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.queue: list[int] = []
        self.inside: dict[int, str] = {}

    def free(self) -> Iterator[int]:
        return iter(self.queue)

    def content(self, block: int) -> str | None:
        return self.inside.get(block)

    def fill(self, text: str, *blocks: int) -> None:
        for number, block in enumerate(blocks):
            self.inside[block] = f"{text}{number}"


class Bench:
    """Two pages a chunk, one block a page."""

    def __init__(self, blocks: int = 64, losses: float = 0.01) -> None:
        self.memory = Blocks(blocks)
        self.counts = Counts(float)
        self.now = 0.0
        self.offloading = Offloading(
            self.memory,
            self.counts,
            losses=losses,
            step_tokens=16,
            page_tokens=16,
            page_blocks=1,
            chunk_pages=2,
            clock=lambda: self.now,
        )

    def learn(self, text: str, *blocks: int, first: int = 0) -> None:
        self.memory.fill(text, *blocks)
        keys = [f"{text}{number}".encode() for number in range(first + len(blocks))]
        self.offloading.learn(keys, first, first + len(blocks), blocks, None)

    def step(self, took: int = 0, seconds: float = 1.0, nonsense: frozenset[int] = frozenset()) -> list[Piece]:
        self.offloading.took(took)
        pieces = self.offloading.plan(nonsense)
        self.now += seconds
        self.offloading.ended()
        return pieces


def keys(pieces: list[Piece]) -> list[bytes]:
    return [piece.key for piece in pieces]


def test_chunks_are_offered_in_the_order_in_which_their_blocks_are_taken() -> None:
    bench = Bench()
    bench.learn("a", 1, 2, 3, 4, 5)
    bench.learn("b", 6, 7)
    bench.memory.queue = [5, 4, 3, 2, 1, 7, 6]
    assert keys(bench.step(took=4)) == [b"a4", b"a3"], "as many as may be in one step"
    assert keys(bench.step()) == [b"a1"]
    assert keys(bench.step()) == [b"b1"]
    assert bench.step() == []


def test_a_chunk_that_grows_is_one_piece() -> None:
    bench = Bench()
    bench.learn("a", 1)
    bench.learn("a", 1, 2)
    assert list(bench.offloading._pieces) == [b"a1"]
    assert bench.counts["lost_tokens", ""] == 0


def test_of_a_piece_whose_end_is_gone_the_beginning_is_stored() -> None:
    bench = Bench()
    bench.learn("a", 1, 2)
    bench.memory.inside[2] = "something else"
    bench.memory.queue = [2, 1]
    assert keys(bench.step(took=2)) == [b"a0"]
    assert bench.counts["lost_tokens", ""] == 16


def test_blocks_that_hold_nonsense_are_not_stored() -> None:
    bench = Bench()
    bench.learn("a", 1, 2)
    bench.memory.queue = [2, 1]
    assert bench.step(took=2, nonsense=frozenset({1})) == []


def test_what_was_learned_in_a_step_that_went_wrong_is_forgotten() -> None:
    bench = Bench()
    bench.learn("a", 1, 2)
    for _ in range(4):
        bench.step()
    bench.learn("b", 3, 4)
    bench.step()
    bench.offloading.doubt()
    assert list(bench.offloading._pieces) == [b"a1"]


def test_what_cannot_be_stored_is_tried_again_later() -> None:
    bench = Bench()
    bench.learn("a", 1, 2)
    bench.memory.queue = [2, 1]
    (piece,) = bench.step(took=2)
    bench.offloading.failed(piece)
    tries = [number for number in range(3 * EVERY) if bench.step()]
    assert tries == [EVERY - 1], "and then it is under way"
    bench.offloading.stored(piece)
    assert not [number for number in range(3 * EVERY) if bench.step()]


@pytest.mark.parametrize("free", [True, False])
def test_what_is_stored_is_not_lost_and_what_is_not_is(free: bool) -> None:
    bench = Bench()
    bench.learn("a", 1, 2)
    bench.memory.queue = [2, 1] if free else []
    (piece,) = bench.step(took=2)
    bench.offloading.stored(piece)
    bench.memory.queue = [2, 1]
    assert bench.step(took=2) == ([] if free else [piece]), "whether it is still there its owner tells"
    bench.learn("b", 1, 2)
    assert bench.counts["lost_tokens", ""] == 0
    bench.learn("c", 1, 2)
    assert bench.counts["lost_tokens", ""] == 32


@pytest.mark.parametrize("good", [True, False])
def test_what_is_used_again_while_it_is_being_stored_is_stored_once(good: bool) -> None:
    """Few blocks are free, and a store takes several steps."""
    bench = Bench()
    bench.learn("a", 1, 2)
    (piece,) = bench.step(took=2)
    bench.learn("a", 1, 2)
    assert bench.step(took=2) == []
    (bench.offloading.stored if good else bench.offloading.failed)(piece)
    bench.memory.queue = [2, 1]
    assert keys(bench.step(took=2)) == [b"a1"], "whether it is still there its owner tells"
    bench.offloading.stored(piece)
    assert not bench.offloading._early


def test_what_ends_after_all_was_forgotten_is_of_no_account() -> None:
    """The same prompt again, with other weights: its keys are the same."""
    bench = Bench()
    bench.learn("a", 1, 2)
    bench.memory.queue = [2, 1]
    (piece,) = bench.step(took=2)
    bench.offloading.clear()
    bench.learn("a", 1, 2)
    (again,) = bench.step(took=2)
    bench.offloading.stored(piece)
    bench.offloading.failed(again)
    bench.learn("b", 1, 2)
    assert bench.counts["lost_tokens", ""] == 32


def test_a_piece_that_is_dropped_while_others_are_looked_at() -> None:
    """Of two prompts one begins the other; the end of the longer is gone, and what is left of it is the shorter."""
    bench = Bench()
    bench.memory.fill("x", 1, 2, 3)
    chain = [b"k0", b"k1", b"k2"]
    bench.offloading.learn(chain, 0, 2, [1, 2], None)
    bench.memory.inside[1] = "gone"
    bench.memory.queue = [2, 1]
    assert bench.step(took=2) == []
    assert bench.counts["lost_tokens", ""] == 32
    bench.memory.fill("y", 4, 5)
    bench.offloading.learn([b"m0", b"m1"], 0, 2, [4, 5], None)
    bench.offloading.learn([b"m0"], 0, 1, [4], None)
    bench.memory.inside[5] = "gone"
    bench.memory.queue = [5, 4]
    assert keys(bench.step(took=2)) == [b"m0"]


def test_hits_of_the_engine_s_own_do_not_make_a_step_copy_more() -> None:
    bench = Bench(blocks=10_000)
    bench.offloading.took(0, hits=5000)
    bench.step()
    assert bench.offloading.blocks <= 4
    assert bench.offloading._most_pages() == 2


def test_free_blocks_are_looked_at_only_when_some_have_been_taken() -> None:
    bench = Bench(blocks=1000)
    looks = 0
    free = bench.memory.free

    def counted() -> Iterator[int]:
        nonlocal looks
        looks += 1
        return free()

    bench.memory.free = counted  # type: ignore[method-assign]
    bench.memory.queue = list(range(500))
    for _ in range(200):
        bench.step(took=1)
    assert looks <= 200 / bench.offloading.blocks + 10


def test_blocks_without_a_name_are_not_learned() -> None:
    bench = Bench()
    bench.offloading.learn([b"k0", b"k1"], 0, 2, [1, 2], None)
    assert not bench.offloading._pieces


def test_nothing_is_kept_of_blocks_that_hold_something_else() -> None:
    """However long it goes on, no more is known than there are blocks."""
    bench = Bench(blocks=8)
    for number in range(200):
        bench.memory.fill("shared", 0)
        bench.memory.inside[1 + number % 6] = f"own {number}"
        chain = [b"shared", f"own {number}".encode()]
        bench.offloading.learn(chain, 0, 2, [0, 1 + number % 6], None)
    assert len(bench.offloading._pieces) == 6
    assert sum(len(each) for each in bench.offloading._by_block.values()) == 12
    assert bench.counts["lost_tokens", ""] == 194 * 16, "its own page of each; the shared one is in another's"


def test_the_window_follows_from_what_has_been_measured() -> None:
    bench = Bench(blocks=10_000)
    for _ in range(2 * EVERY):
        bench.step(took=8)
        bench.offloading.gathered(20, 1.0)
    assert bench.offloading.blocks == smallest_window(8, 20, 0.01, burst=8, waits=False)
    for _ in range(40 * EVERY):
        bench.step(took=8)
        bench.offloading.gathered(9, 1.0)
    larger = smallest_window(8, 9, 0.01, burst=8, waits=False)
    assert larger is not None
    assert bench.offloading.blocks == pytest.approx(larger, abs=8)
    for _ in range(40 * EVERY):
        bench.step(took=8)
        bench.offloading.gathered(4, 1.0)
    assert bench.offloading.blocks == 4 * 8, "no window is enough"


def test_a_pool_that_tells_nothing_is_refused() -> None:
    class Pool:
        num_gpu_blocks = 7

    with pytest.raises(LayoutError, match="leave lazy_offload out"):
        EngineBlocks(Pool())


def piece(text: str, first: int, pages: int, places: list[str] | None = None) -> Piece:
    keys = tuple(f"{text}{number}".encode() for number in range(first, first + pages))
    parent = f"{text}{first - 1}".encode() if first else b""
    return Piece(keys, parent, first, (), (), places, 0, 0)


def test_pieces_that_follow_each_other_are_stored_together() -> None:
    a0, a2, a4 = piece("a", 0, 2), piece("a", 2, 2), piece("a", 4, 1)
    b2, b6 = piece("b", 2, 2), piece("b", 6, 2)
    fork = Piece((b"x", b"y"), a0.key, 2, (), (), None, 0, 0)
    assert runs([a4, b6, a2, b2, a0], 2) == [[b6], [b2], [a0, a2, a4]]
    assert runs([fork, a2, a0], 2) == [[a2], [a0, fork]]
    short, behind = piece("a", 4, 1), piece("a", 5, 1)
    assert runs([short, behind], 2) == [[short], [behind]], "it is no whole chunk"
    other = piece("a", 2, 2, ["cpu"])
    assert [[each.key for each in run] for run in runs([a0, other], 2)] == [[a0.key], [other.key]]
    assert runs([], 2) == []


def test_tiers_of_those_who_share_a_piece_are_put_together() -> None:
    bench = Bench()
    bench.memory.fill("a", 1, 2)
    for places, expected in ((["cpu"], ["cpu"]), (["disk"], ["cpu", "disk"]), (None, None), (["cpu"], None)):
        bench.offloading.learn([b"a0", b"a1"], 0, 2, [1, 2], places)
        assert bench.offloading._pieces[b"a1"].places == expected


def test_what_is_used_again_is_seen_to_again() -> None:
    """The node may have given up its copy since."""
    bench = Bench()
    bench.learn("a", 1, 2)
    for _ in range(3):
        (found,) = bench.step(took=1)
        bench.offloading.stored(found)
        assert bench.step(took=1) == []
        bench.learn("a", 1, 2)
