"""What besides its tokens tells the KV of a request from that of others: adapters, salts, images, embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.vllm.conftest import Models
from tests.vllm.engine import prompt
from tests.vllm.scheduled import BLOCK, Scheduled

CACHE = {"cpu": {"capacity": "64MiB"}, "chunk_tokens": 64, "page_tokens": 16}
TOKENS = prompt(5, 320)


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Scheduled]:
    made = Scheduled(models("llama"), CACHE)
    yield made
    made.close()


class Asker:
    """Asks the same tokens again and again."""

    def __init__(self, engine: Scheduled) -> None:
        self._engine = engine
        self._asked = 0

    def loaded(self, **marks: Any) -> int:
        """Tokens that a request with these marks finds in the node."""
        counts = self._engine.connector._scheduler.counts
        before = counts["loaded_tokens", "cpu"]
        self._asked += 1
        self._engine.ask(f"{id(self)} {self._asked}", TOKENS, **marks)
        self._engine.run()
        self._engine.forget()
        return int(counts["loaded_tokens", "cpu"] - before)


@pytest.fixture
def asker(engine: Scheduled) -> Asker:
    engine.connector._scheduler.client.clear()
    return Asker(engine)


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


ALL = len(TOKENS)


def test_another_adapter_finds_nothing_and_the_same_one_all(asker: Asker, tmp_path: Path) -> None:
    one = LoRARequest("one", 1, adapter(tmp_path / "one", b"1" * 999))
    other = LoRARequest("other", 2, adapter(tmp_path / "other", b"2" * 999))
    assert [asker.loaded(), asker.loaded()] == [0, ALL]
    assert [asker.loaded(lora_request=one), asker.loaded(lora_request=one)] == [0, ALL]
    assert [asker.loaded(lora_request=other), asker.loaded(lora_request=other)] == [0, ALL]
    assert asker.loaded() == ALL


def test_an_adapter_whose_weights_were_replaced_finds_nothing(asker: Asker, tmp_path: Path) -> None:
    lora = LoRARequest("one", 1, adapter(tmp_path / "one", b"1" * 999))
    assert [asker.loaded(lora_request=lora), asker.loaded(lora_request=lora)] == [0, ALL]
    adapter(tmp_path / "one", b"3" * 1001)
    assert [asker.loaded(lora_request=lora), asker.loaded(lora_request=lora)] == [0, ALL]


def test_an_adapter_that_cannot_be_told_from_others_is_not_cached(asker: Asker, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    lora = LoRARequest("one", 1, str(tmp_path / "empty"))
    assert [asker.loaded(lora_request=lora), asker.loaded(lora_request=lora)] == [0, 0]


def test_another_salt_finds_nothing_and_the_same_one_all(asker: Asker) -> None:
    assert [asker.loaded(cache_salt="a"), asker.loaded(cache_salt="a")] == [0, ALL]
    assert [asker.loaded(cache_salt="b"), asker.loaded()] == [0, 0]
    assert [asker.loaded(cache_salt="b"), asker.loaded()] == [ALL, ALL]


def test_another_image_at_the_same_place_is_another_prompt(engine: Scheduled) -> None:
    """Of images vLLM has placeholders, alike for all of them."""
    side = engine.connector._scheduler

    def keys(name: str, *images: tuple[str, int]) -> list[bytes]:
        features = [
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=20))
            for identifier, offset in images
        ]
        request = engine.ask(name, TOKENS, mm_features=features)
        try:
            return list(side._requests[request.request_id].keys)
        finally:
            engine.scheduler.finish_requests(name, _aborted())
            engine.run()

    cat = keys("cat", ("cat", 100))
    assert cat == keys("cat again", ("cat", 100))
    dog = keys("dog", ("dog", 100))
    first = 100 // BLOCK
    assert cat[:first] == dog[:first]
    assert not set(cat[first:]) & set(dog[first:])
    moved = keys("moved", ("cat", 101))
    assert not set(cat[first:]) & set(moved[first:])
    both, swapped = keys("both", ("cat", 100), ("dog", 200)), keys("swapped", ("dog", 100), ("cat", 200))
    assert not set(both[first:]) & set(swapped[first:])


def test_prompt_embeddings_are_not_taken_for_their_placeholders(engine: Scheduled) -> None:
    tracked = []
    for name in ("one", "other"):
        request = engine.ask(name, TOKENS, prompt_embeds=torch.zeros(len(TOKENS), 8))
        tracked.append(engine.connector._scheduler._requests[request.request_id])
        engine.scheduler.finish_requests(name, _aborted())
        engine.run()
    assert [(each.load, each.save) for each in tracked] == [(False, False)] * 2


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
