"""KV in the layout that engines share: it is what the model computes, and comes back into the blocks of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmcache_core.keys import page_keys
from tests.vllm.blocks import blocks_before_and_after, own_blocks_under_a_hit
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import Engine, Failed, Inside, prompt

LONG = prompt(61, 1100)
AFTER = prompt(62, 600)
START = LONG[:400]
LAYERS, HEADS, SIZE, PAGE = 4, 4, 64, 128
CACHE: dict[str, Any] = {
    "layout": "canonical",
    "page_tokens": PAGE,
    "chunk_tokens": 2 * PAGE,
    "cpu": {"capacity": "128MiB"},
}


@pytest.fixture(scope="module", params=["10s", 0], ids=["within a step", "over steps"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    made = Engine(models("llama"), CACHE, {"sync_load": request.param})
    yield made
    made.close()


def stored(inside: Inside, tokens: list[int]) -> bytes:
    """The pages of a prompt as they lie in the pool."""
    side = inside.connector._scheduler
    keys = page_keys(tokens, PAGE)
    held = side.client.hold(side._model, keys)
    parts: list[bytes] = []
    while len(parts) < len(held.parts):
        parts += [bytes(grant.source) for grant in side.client.grant(held, len(parts), 0)]
    side.client.release(held)
    return b"".join(parts)


def test_it_is_what_the_model_computes(engine: Engine, models: Models) -> None:
    """`[page][layer][K, V][token][head][dim]`, K with its positions, by the keys of the plain chain."""
    pages = len(LONG) // PAGE
    engine.generate([LONG])
    found = torch.frombuffer(bytearray(engine.run(stored, LONG)), dtype=torch.float32)
    found = found.view(pages, LAYERS, 2, PAGE, HEADS, SIZE)
    model = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32)
    with torch.no_grad():
        computed = model(torch.tensor([LONG]), use_cache=True).past_key_values
    for number in range(LAYERS):
        layer = computed.layers[number]
        for plane, tensor in enumerate((layer.keys, layer.values)):
            right = tensor[0, :, : pages * PAGE].transpose(0, 1).reshape(pages, PAGE, HEADS, SIZE)
            assert (found[:, number, plane] - right).abs().max() < 1e-4
            assert right.abs().max() > 0.05


def test_it_comes_back_bit_for_bit(engine: Engine, plain: Plain) -> None:
    there = 1100 // PAGE * PAGE
    found = engine.run(blocks_before_and_after, LONG, AFTER, there)
    assert found["answers"][1].agrees(plain("llama", [LONG])[0])
    assert found["answers"][1].cached == there
    assert (found["equal"], found["differ"]) == ({"full": there // 128}, 0)
    assert found["moved"] > 0


def test_blocks_in_use_stay_as_they_are(engine: Engine, plain: Plain) -> None:
    found = engine.run(own_blocks_under_a_hit, LONG, START, 384)
    assert found["answer"].agrees(plain("llama", [LONG])[0])
    assert (found["answer"].cached, found["kept"], found["changed"]) == (1100 // PAGE * PAGE, 3, 0)


@pytest.mark.parametrize("kind", ["gemma", "deepseek"])
def test_what_cannot_be_shared_is_refused(models: Models, kind: str) -> None:
    with pytest.raises(
        Failed, match="layout: canonical cannot be had of this engine: windows, recurrent states or lat"
    ):
        Engine(models(kind), CACHE, {})
