"""vLLM's real scheduler and our connector, both sides, around a model that is arithmetic.

The "KV" of a token is a number made of the token and of the KV of all tokens in front of it, as it lies in the engine's
blocks at that moment; a window layer's, of those in its window. A token is sampled from the number of the last one. So
a wrong byte anywhere gives other tokens, at once. Steps are carried out later than they are planned, as many as the
scheduler keeps in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_core.connectors.vllm import LMCacheCoreConnector
from tests.vllm.engine import ours_of, transfer_config

__all__ = ["BLOCK", "Arithmetic", "Scheduled", "answers"]

BLOCK = 16
WINDOW = 48
CONTENT = 4
LAYERS = 2
MODULUS = 1_000_003
"""Numbers below it are exact in float32."""


class _Forward(NamedTuple):
    attn_metadata: object


class _Planned(NamedTuple):
    output: Any
    starts: dict[str, int]
    blocks: dict[str, tuple[list[int], ...]]


class Arithmetic:
    """The model: tensors of KV, and what a forward pass writes to them."""

    def __init__(self, blocks: int, windows: bool) -> None:
        kinds = ["full", "window"] if windows else ["full"]
        # Nothing is ever read that has not been written, so what lies there first must be wrong.
        self.caches = {
            f"model.layers.{number * LAYERS + layer}.{kind}": torch.full((blocks, 1, BLOCK, CONTENT), 77.0)
            for number, kind in enumerate(kinds)
            for layer in range(LAYERS)
        }
        self.groups = [[name for name in self.caches if name.endswith(kind)] for kind in kinds]

    def forward(self, tokens: Sequence[int], start: int, end: int, blocks: Sequence[Sequence[int]]) -> int:
        """Compute tokens `[start, end)` of a request and return the one that comes behind them."""
        sums = []
        for number, names in enumerate(self.groups):
            first = 0 if number == 0 else max(0, start - WINDOW + 1)
            sums.append([self._read(names, blocks[number], place) for place in range(first, start)])
        last = 0
        for place in range(start, end):
            total = sum(sums[0]) + sum(sum(each[-WINDOW + 1 :]) for each in sums[1:])
            last = (31 * total + 7 * tokens[place] + place) % MODULUS
            for number, names in enumerate(self.groups):
                sums[number].append(last + number)
                block, slot = blocks[number][place // BLOCK], place % BLOCK
                assert block, "a token that is computed has a block"
                for layer, name in enumerate(names):
                    self.caches[name][block, 0, slot] = float(last + number + layer)
        return 10 + last % 3000

    def _read(self, names: Sequence[str], blocks: Sequence[int], place: int) -> int:
        block, slot = blocks[place // BLOCK], place % BLOCK
        found = {
            int(self.caches[name][block, 0, slot, each]) - layer for layer, name in enumerate(names) for each in (0, -1)
        }
        return sum(found) + 1000 * (len(found) - 1) if block else 0


class Scheduled:
    """An engine without a model runner.

    Args:
        model: A checkpoint, for its configuration.
        cache: The cache's configuration; None for an engine without us.
        blocks: Of the engine's KV cache.
        windows: Whether there is a cache group of a sliding window besides.
        events: Whether vLLM's KV events are on.
        others: Settings of further connectors, which vLLM's `MultiConnector` asks before us or after us.
        in_flight: Steps that are planned before the first of them is carried out; above 1 by vLLM's `AsyncScheduler`.
    """

    def __init__(
        self,
        model: Path,
        cache: Any,
        *,
        blocks: int = 200,
        windows: bool = False,
        in_flight: int = 1,
        events: bool = False,
        others: Sequence[dict[str, Any]] = (),
        others_first: bool = True,
        **options: Any,
    ) -> None:
        init_none_hash(sha256)
        self.model = Arithmetic(blocks, windows)
        self.blocks = blocks
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": CONTENT // 2, "dtype": torch.float32}
        specs: list[Any] = [FullAttentionSpec(**shape)]
        if windows:
            specs.append(SlidingWindowSpec(**shape, sliding_window=WINDOW))
        groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(self.model.groups, specs, strict=True)]
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
        )
        transfer = transfer_config(cache, **options)
        if others:
            all_of_them = [*others, transfer] if others_first else [transfer, *others]
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": all_of_them},
            }
        caching = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        caching.kv_cache_layout = "LBHNC"
        caching.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
            cache_config=caching,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=256,
                max_model_len=2048,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=in_flight > 1,
                disable_hybrid_kv_cache_manager=False,
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
            kv_transfer_config=None if cache is None else KVTransferConfig(**transfer),
        )
        config.scheduler_config.async_scheduling = in_flight > 1  # which it turns off where there is no executor
        kind = AsyncScheduler if in_flight > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.worker: Any = None
        if cache is not None:
            worker = MultiConnector if others else LMCacheCoreConnector
            self.worker = worker(config, KVConnectorRole.WORKER, kv)
            ours_of(self.worker)._backend = lambda: "arithmetic"
            self.worker.register_kv_caches(self.model.caches)
        self.events: list[Any] = []
        """Those of the connector."""
        if events and cache is not None:
            take = self.connector.take_events
            self.connector.take_events = lambda: self._seen(list(take()))
        self._in_flight = in_flight
        self._planned: deque[_Planned] = deque()
        self._sampled: dict[str, dict[int, int]] = {}
        """Tokens by place, which the scheduler may not have heard of yet."""
        self.answers: dict[str, list[int]] = {}
        self.steps = 0

    @property
    def connector(self) -> Any:
        """The scheduler's side, ours."""
        return ours_of(self.scheduler.connector)

    def _seen(self, events: list[Any]) -> list[Any]:
        self.events += events
        return events

    @property
    def free_blocks(self) -> int:
        """Of the engine's KV cache, without the null block."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def ask(self, name: str, tokens: Sequence[int], answer: int = 4, **marks: Any) -> Request:
        """Add a request; `marks` are further arguments of vLLM's."""
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            **{"mm_features": None, **marks},
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        self.answers[name] = []
        return request

    def step(self) -> None:
        """Plan a step, and carry out the oldest one that is due."""
        self.steps += 1
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        starts = {
            name: requests[name].num_computed_tokens - count for name, count in output.num_scheduled_tokens.items()
        }
        manager = self.scheduler.kv_cache_manager
        blocks = {name: tuple(list(ids) for ids in manager.get_block_ids(name)) for name in starts}
        self._planned.append(_Planned(output, starts, blocks))
        if len(self._planned) >= self._in_flight:
            self.carry_out()

    def carry_out(self) -> None:
        """Carry out the oldest step that has been planned, and tell the scheduler."""
        planned = self._planned.popleft()
        output, worker = planned.output, self.worker
        connector_output = None
        if worker is not None:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            forward = _Forward(object() if output.num_scheduled_tokens else None)
            if output.has_sync_kv_loads:
                worker.start_load_kv(forward)
        sampled = {name: self._compute(name, count, planned) for name, count in output.num_scheduled_tokens.items()}
        if worker is not None:
            if not output.has_sync_kv_loads:
                worker.start_load_kv(forward)
            worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
        names = list(sampled)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: number for number, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=connector_output,
            ),
        )
        for name in list(self.answers):
            request = self.scheduler.requests.get(name) or self._requests.get(name)
            if request is not None:
                self._requests[name] = request
                self.answers[name] = list(request.output_token_ids)

    def _compute(self, name: str, count: int, planned: _Planned) -> list[int]:
        request = self.scheduler.requests.get(name) or self._requests.get(name)
        if request is None:
            return []
        start = planned.starts[name]
        sampled = self._sampled.setdefault(name, {})
        known = list(request.all_token_ids)
        tokens = [known[place] if place < len(known) else sampled[place] for place in range(start + count)]
        following = self.model.forward(tokens, start, start + count, planned.blocks[name])
        if start + count < request.num_prompt_tokens or start + count < len(known):
            return []
        sampled[start + count] = following
        return [following]

    @property
    def _requests(self) -> dict[str, Request]:
        found: dict[str, Request] = self.__dict__.setdefault("_kept", {})
        return found

    def run(self, most: int = 2000) -> dict[str, list[int]]:
        """Go on until nothing is left to do. Returns what was answered, by request."""
        for name, request in self.scheduler.requests.items():
            self._requests[name] = request
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._planned:
                return self.answers
            if self.scheduler.has_requests():
                self.step()
            else:
                self.carry_out()
            for name, request in self.scheduler.requests.items():
                self._requests[name] = request
        raise AssertionError(f"not done after {most} steps: {[r.status for r in self.scheduler.requests.values()]}")

    def forget(self) -> None:
        """Drop the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        for each in (self.worker, self.connector):
            if each is not None:
                each.shutdown()


def answers(
    model: Path, prompts: Mapping[str, Sequence[int]], answer: int = 4, *, windows: bool = False
) -> dict[str, list[int]]:
    """What an engine without us answers, each request alone."""
    plain = Scheduled(model, None, windows=windows)
    for name, tokens in prompts.items():
        plain.ask(name, tokens, answer)
        plain.run()
        plain.forget()
    return plain.answers
