"""Layer by layer in a real engine: each layer is waited for before it is computed, and stored after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Inside, prompt

PROMPT = prompt(81, 1500)
THERE = 1500 // 128 * 128


def watch(inside: Inside) -> None:
    """Note from now on what the engine says of layers, and what is submitted for them."""
    from lmcache_core.connectors.vllm.worker import WorkerSide
    from lmcache_transfer.streams import Load, Store

    notes: list[tuple[str, str]] = []
    inside.notes = notes  # type: ignore[attr-defined]
    wait, computed = WorkerSide.wait_layer, WorkerSide.layer_computed
    waits, stores = Load.wait, Store.computed

    def wait_layer(self: Any, name: str) -> None:
        notes.append(("comes to", name))
        wait(self, name)

    def layer_computed(self: Any, name: str) -> None:
        notes.append(("computed", name))
        computed(self, name)

    def load_wait(self: Any, layer: Any) -> bool:
        notes.append(("waits for", str(layer.layer)))
        return waits(self, layer)

    def store_computed(self: Any, layer: Any) -> None:
        notes.append(("stores", str(layer.layer)))
        stores(self, layer)

    WorkerSide.wait_layer, WorkerSide.layer_computed = wait_layer, layer_computed  # type: ignore[method-assign]
    Load.wait, Store.computed = load_wait, store_computed  # type: ignore[method-assign]


def notes_of(inside: Inside) -> list[tuple[str, str]]:
    """What has been noted, in order."""
    notes: list[tuple[str, str]] = list(inside.notes)  # type: ignore[attr-defined]
    inside.notes.clear()  # type: ignore[attr-defined]
    return notes


@pytest.fixture
def engine(models: Models) -> Any:
    made = Engine(models("llama"), {"cpu": {"capacity": "256MiB"}}, {"layerwise": True, "sync_load": "10s"})
    yield made
    made.close()


def test_every_layer_in_its_turn(engine: Engine, plain: Plain) -> None:
    (expected,) = plain("llama", [PROMPT])
    engine.run(watch)
    assert engine.generate([PROMPT], 1)[0].cached == 0
    first = engine.run(notes_of)
    layers = [name for what, name in first if what == "computed"]
    assert len(layers) == len(set(layers)) >= 2
    per_layer = [[("comes to", name), ("computed", name), ("stores", str(n))] for n, name in enumerate(layers)]
    assert first == [note for layer in per_layer for note in layer]
    engine.run(Inside.forget)
    (answer,) = engine.generate([PROMPT])
    assert (answer.cached, answer.agrees(expected)) == (THERE, True)
    again = engine.run(notes_of)[: 3 * len(layers)]
    per_layer = [[("comes to", name), ("waits for", str(n)), ("computed", name)] for n, name in enumerate(layers)]
    assert again == [note for layer in per_layer for note in layer]
    assert engine.run(Inside.settled) == {"requests": 0, "busy": 0, "leases": 0, "staged": 0}
