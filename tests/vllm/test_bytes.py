"""Blocks that are loaded hold, bit for bit, what was computed: tokens alone can't tell, as attention knows no order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt
from tests.vllm.models import BLOCK, KINDS, WINDOW

POISON = 7.0
"""In blocks that are nobody's. Finite: on a CPU, masked places of a partly filled block take part in sums."""
PROMPT = prompt(11, 1500)
OTHER = prompt(12, 700)
INEXACT = {"deepseek"}
"""vLLM's MLA on CPUs comes to other numbers when part of a prompt lies in blocks already, whoever put it there; so it turns
its own prefix cache off for such models. That the blocks are equal can still be told."""
WAYS: Mapping[str, Mapping[str, Any]] = {"within a step": {"sync_load": "10s"}, "over steps": {"sync_load": 0}}


class Case(Engine):
    """An engine of a kind, with pages of two blocks or more."""

    def __init__(self, models: Models, kind: str, way: str) -> None:
        self.kind, self.block = kind, BLOCK[kind]
        self.page = max(64, 2 * self.block)
        cache = {"page_tokens": self.page, "chunk_tokens": 2 * self.page, "cpu": {"capacity": "256MiB"}}
        super().__init__(models(kind), cache, WAYS[way])


@pytest.fixture(scope="module", params=[(kind, way) for kind in KINDS for way in WAYS], ids=" ".join)
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Case]:
    made = Case(models, *request.param)
    yield made
    made.close()


def test_loaded_blocks_are_those_that_were_stored(engine: Case, plain: Plain) -> None:
    (expected,) = plain(engine.kind, [PROMPT])
    there = len(PROMPT) // engine.page * engine.page
    found = engine.run(blocks_before_and_after, PROMPT, OTHER, there)
    if engine.kind not in INEXACT:
        assert [each.agrees(expected) for each in found["answers"]] == [True, True]
    assert found["answers"][1].cached == there
    # A window group keeps blocks of the window only, and needs one less than them in front of the next token.
    counts = {"full": there // engine.block, "window": (WINDOW - 1) // engine.block}
    assert found["groups"] == {kind: {"equal": counts[kind], "differ": 0} for kind in found["groups"]}
    assert ("window" in found["groups"]) == (engine.kind == "gemma")
    assert found["moved"] > 0


def test_blocks_in_use_stay_as_they_are(engine: Case, plain: Plain) -> None:
    """A hit behind what the engine has itself may begin inside a page: blocks before it are not written to."""
    start = PROMPT[: engine.page + engine.block + 5]
    (expected,) = plain(engine.kind, [PROMPT])
    found = engine.run(own_blocks_under_a_hit, PROMPT, start, engine.page + engine.block)
    assert engine.kind in INEXACT or found["answer"].agrees(expected)
    assert found["cached"] == len(PROMPT) // engine.page * engine.page
    assert found["kept"] > 0
    assert found["changed"] == 0


class Watch:
    """Notes the blocks of each request that ends, and what lies in them."""

    def __init__(self, inside: Inside) -> None:
        connector = inside.connector
        forward = inside.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        config = inside.core.scheduler.kv_cache_config
        self.kinds = [
            "window" if "SlidingWindow" in type(group.kv_cache_spec).__name__ else "full"
            for group in config.kv_cache_groups
        ]
        self.layers = [[_tensor(forward[name]) for name in group.layer_names] for group in config.kv_cache_groups]
        self.blocks = config.num_blocks
        self.tokens = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self.ids: list[list[list[int]]] = []
        self.bytes: list[list[torch.Tensor]] = []
        for name in ("request_finished", "request_finished_all_groups"):
            setattr(connector, name, self._watched(getattr(connector, name)))

    def _watched(self, method: Any) -> Any:
        def finished(request: Any, block_ids: Any) -> Any:
            ids = [block_ids] if block_ids and isinstance(block_ids[0], int) else list(block_ids)
            self.ids.append([list(each) for each in ids])
            self.bytes.append([self.read(number, each) for number, each in enumerate(ids)])
            return method(request, block_ids)

        return finished

    def read(self, group: int, ids: list[int]) -> torch.Tensor:
        """The bytes of blocks of a group, `[block, layer and byte]`."""
        rows = [
            layer.reshape(self.blocks, -1)[torch.tensor(ids)].view(torch.uint8).clone() for layer in self.layers[group]
        ]
        return torch.cat(rows, dim=1)

    def poison(self) -> None:
        """Overwrite all that the engine has, which must be nobody's."""
        for layers in self.layers:
            for layer in layers:
                layer.fill_(POISON)


def _tensor(layer: Any) -> torch.Tensor:
    kv = layer.kv_cache
    tensor: torch.Tensor = kv[0] if isinstance(kv, list | tuple) else kv
    return tensor


def blocks_before_and_after(inside: Inside, asked: list[int], other: list[int], cached: int) -> dict[str, Any]:
    """Compute, forget, poison, load into other blocks; compare block by block."""
    watch = Watch(inside)
    (first,) = inside.generate([asked])
    inside.forget()
    inside.generate([other], lmcache_skip_store=True)
    inside.forget()
    watch.poison()
    (second,) = inside.generate([asked])
    groups: dict[str, dict[str, int]] = {}
    moved = 0
    for number, kind in enumerate(watch.kinds):
        before, after = watch.ids[0][number], watch.ids[-1][number]
        counted = groups.setdefault(kind, {"equal": 0, "differ": 0})
        tokens = watch.tokens[number]
        for place in range(cached // tokens):
            if before[place] and after[place]:
                same = torch.equal(watch.bytes[0][number][place], watch.bytes[-1][number][place])
                counted["equal" if same else "differ"] += 1
                moved += before[place] != after[place]
    return {"answers": [first, second], "groups": groups, "moved": moved}


def own_blocks_under_a_hit(inside: Inside, asked: list[int], start: list[int], own: int) -> dict[str, Any]:
    """Have the engine keep a start of a prompt, then load the rest behind it."""
    inside.generate([asked])
    inside.forget()
    watch = Watch(inside)
    watch.poison()
    inside.generate([start], lmcache_skip_load=True)
    (answer,) = inside.generate([asked])
    kept = changed = 0
    for number in range(len(watch.kinds)):
        tokens = watch.tokens[number]
        for place in range(own // tokens):
            block = watch.ids[0][number][place]
            if block and block == watch.ids[1][number][place]:
                kept += 1
                changed += not torch.equal(watch.bytes[0][number][place], watch.read(number, [block])[0])
    return {"answer": answer, "cached": answer.cached, "kept": kept, "changed": changed}
