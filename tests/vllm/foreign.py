"""A connector of somebody else's for `Scheduled`: its loads are within the step, and may fail. It stores nothing, as it
knows what the KV is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.vllm.scheduled import BLOCK, MODULUS

__all__ = ["Foreign", "foreign_config"]


def foreign_config(*requests: str, fails: bool) -> dict[str, Any]:
    """Settings by which it loads these requests."""
    return {
        "kv_connector": "Foreign",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"requests": list(requests), "fails": fails},
    }


class _Load(NamedTuple):
    tokens: Sequence[int]
    first: int
    end: int
    blocks: Sequence[int]


class _Meta(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    def __init__(self, loads: list[_Load]) -> None:
        self.loads = loads


class Foreign(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.wanted = set(extra["requests"])
        self.fails = extra["fails"]
        self.loads: list[_Load] = []
        self.bad: set[int] = set()

    # Scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        end = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
        return (max(0, end - num_computed_tokens) if request.request_id in self.wanted else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.wanted.remove(request.request_id)
            end = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
            (ids,) = blocks.get_block_ids()
            self.loads.append(_Load(list(request.prompt_token_ids), end - num_external_tokens, end, list(ids)))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self.loads = self.loads, []
        return _Meta(loads)

    # Worker's side

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta: Any = self._get_connector_metadata()
        for tokens, first, end, blocks in meta.loads:
            if self.fails:
                self.bad |= set(blocks[first // BLOCK : end // BLOCK])
            total = 0
            for place in range(end):
                last = (31 * total + 7 * tokens[place] + place) % MODULUS
                total += last
                for layer, cache in enumerate(self.caches if place >= first else ()):
                    cache[blocks[place // BLOCK], 0, place % BLOCK] = float(5 if self.fails else last + layer)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None
