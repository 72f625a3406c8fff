"""A host-memory medium for vLLM's `OffloadingConnector`, whose own needs a GPU: the least that it asks for, in torch.

Blocks are copied on the engine's thread. There is no bound and no eviction, so it is as fast as such a medium can be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

__all__ = ["HostMemory"]


class _Keys(LoadStoreSpec):  # type: ignore[misc, unused-ignore]
    def __init__(self, keys: Iterable[Any]) -> None:
        self.keys = list(keys)


class _Manager(OffloadingManager):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self._there: set[Any] = set()
        self._coming: set[Any] = set()

    def lookup(self, key: Any, context: Any) -> LookupResult:
        if key in self._there:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._coming else LookupResult.MISS

    def prepare_load(self, keys: Collection[Any], context: Any) -> _Keys:
        return _Keys(keys)

    def prepare_store(self, keys: Collection[Any], context: Any) -> PrepareStoreOutput:
        new = [key for key in keys if key not in self._there and key not in self._coming]
        self._coming.update(new)
        return PrepareStoreOutput(new, _Keys(new), [])

    def complete_store(self, keys: Collection[Any], context: Any, success: bool = True) -> None:
        self._coming.difference_update(keys)
        if success:
            self._there.update(keys)

    def on_new_request(self, context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def reset_cache(self) -> None:
        self._there.clear()


class _Worker(OffloadingWorker):  # type: ignore[misc, unused-ignore]
    def __init__(self, caches: Any, chunk_blocks: int) -> None:
        self._tensors = [each.tensor for each in caches.tensors]
        self._chunk_blocks = chunk_blocks
        self._chunks: dict[Any, list[torch.Tensor]] = {}
        self._done: list[TransferResult] = []

    def submit_store(self, job: int, source: Any, target: Any) -> bool:
        for number, key in enumerate(target.keys):
            ids = source.block_ids[number * self._chunk_blocks : (number + 1) * self._chunk_blocks]
            self._chunks[key] = [tensor[torch.from_numpy(ids.astype(np.int64))] for tensor in self._tensors]
        self._done.append(TransferResult(job, True, 0, 0.0))
        return True

    def submit_load(self, job: int, source: Any, target: Any) -> bool:
        ids = target.block_ids.astype(np.int64)
        skipped = target.block_indices[0] % self._chunk_blocks
        place = 0
        for key in source.keys:
            count = min(self._chunk_blocks - skipped, len(ids) - place)
            blocks = torch.from_numpy(ids[place : place + count])
            for tensor, chunk in zip(self._tensors, self._chunks[key], strict=True):
                tensor[blocks] = chunk[skipped : skipped + count]
            place += count
            skipped = 0
        self._done.append(TransferResult(job, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, jobs: Any) -> None:
        return


class HostMemory(OffloadingSpec):  # type: ignore[misc, unused-ignore]
    """See the module. Named to vLLM by `spec_name` and `spec_module_path`."""

    def get_manager(self) -> OffloadingManager:
        return _Manager()

    def get_worker(self, caches: Any) -> OffloadingWorker:
        return _Worker(caches, self.blocks_per_chunk)
