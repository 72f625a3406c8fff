"""What lies in an engine's blocks, read past the connector."""

from __future__ import annotations

from typing import Any

import torch

from tests.vllm.engine import Inside

__all__ = ["blocks_before_and_after", "own_blocks_under_a_hit"]

POISON = 7.0
"""In blocks that are nobody's. Finite: on a CPU, masked places of a partly filled block take part in sums."""
ENDS = ("request_finished", "request_finished_all_groups")


class Watch:
    """Notes the blocks of each request that ends, and what lies in them."""

    def __init__(self, inside: Inside) -> None:
        self._connector = inside.connector
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

    def __enter__(self) -> Watch:
        for name in ENDS:
            setattr(self._connector, name, self._watched(getattr(self._connector, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in ENDS:
            delattr(self._connector, name)

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
    with Watch(inside) as watch:
        (first,) = inside.generate([asked])
        inside.forget()
        inside.generate([other], store=False)
        inside.forget()
        watch.poison()
        (second,) = inside.generate([asked])
    equal = dict.fromkeys(watch.kinds, 0)
    differ = moved = 0
    for number, kind in enumerate(watch.kinds):
        before, after = watch.ids[0][number], watch.ids[-1][number]
        for place in range(cached // watch.tokens[number]):
            if before[place] and after[place]:
                same = torch.equal(watch.bytes[0][number][place], watch.bytes[-1][number][place])
                equal[kind] += same
                differ += not same
                moved += before[place] != after[place]
    return {"answers": [first, second], "equal": equal, "differ": differ, "moved": moved}


def own_blocks_under_a_hit(inside: Inside, asked: list[int], start: list[int], own: int) -> dict[str, Any]:
    """Have the engine keep a start of a prompt, then load the rest behind it."""
    inside.generate([asked])
    inside.forget()
    with Watch(inside) as watch:
        watch.poison()
        inside.generate([start], load=False)
        (answer,) = inside.generate([asked])
    kept = changed = 0
    for number in range(len(watch.kinds)):
        for place in range(own // watch.tokens[number]):
            block = watch.ids[0][number][place]
            if block and block == watch.ids[1][number][place]:
                kept += 1
                changed += not torch.equal(watch.bytes[0][number][place], watch.read(number, [block])[0])
    return {"answer": answer, "kept": kept, "changed": changed}
