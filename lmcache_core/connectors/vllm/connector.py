"""`LMCacheCoreConnector`: vLLM's interface of KV connectors, translated. It and `metrics` alone import vLLM.

vLLM makes two of them: one in the scheduler's process, one in each worker. No exception of ours reaches the engine:
what cannot be had is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_core.assembly import settings
from lmcache_core.connectors.vllm import identity
from lmcache_core.connectors.vllm.blocks import EngineBlocks
from lmcache_core.connectors.vllm.counters import Counts, joined
from lmcache_core.connectors.vllm.enginekv import Geometry
from lmcache_core.connectors.vllm.events import Page
from lmcache_core.connectors.vllm.metrics import ConnectorMetrics, ConnectorStats
from lmcache_core.connectors.vllm.nodes import Door, WorkerDoor, open_door
from lmcache_core.connectors.vllm.options import read_options, read_request_options
from lmcache_core.connectors.vllm.plan import Facts, Report, Step
from lmcache_core.connectors.vllm.requests import Marks
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.connectors.weights import adapter_digest
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.namespace import Namespace, page_tokens_for
from lmcache_core.ratelog import RateLog

__all__ = ["LMCacheCoreConnector", "Metadata", "WorkerMetadata"]

P = ParamSpec("P")
T = TypeVar("T")

PLAIN_ISAS = ("vec",)
"""Instruction sets of the CPU backend whose blocks hold K transposed, then V, and nothing packed."""
SOURCES = {"cpu": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
"""What vLLM calls the medium of a backend."""

log = logging.getLogger("vllm.lmcache_core")
"""Below vLLM's own logger, so that its lines are shown as vLLM's are."""


def _show_lines() -> None:
    """Have vLLM's handlers show the lines of our packages, unless somebody has handlers of their own for them."""
    theirs = logging.getLogger("vllm")
    for name in ("lmcache_core", "lmcache_backends", "lmcache_transfer"):
        ours = logging.getLogger(name)
        if not ours.handlers and not logging.getLogger().handlers:
            for handler in theirs.handlers:
                ours.addHandler(handler)
            ours.setLevel(theirs.level)


class Metadata(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """What the scheduler's side tells the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """What workers tell the scheduler's side."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return WorkerMetadata(self.report + other.report) if isinstance(other, WorkerMetadata) else self


def _guarded(otherwise: T) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Whatever a method raises is logged, and the engine gets `otherwise`."""

    def guard(method: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine
                connector: Any = args[0]
                connector._fault(method.__name__, error)
                return otherwise

        return guarded

    return guard


class LMCacheCoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """See the module. Options stand in `kv_connector_extra_config`: see `Options`.

    Raises:
        ConfigError: The options or the cache's configuration can't be used; the message says what to write.
        LayoutError: The KV of this engine can't be cached; the message says why.
        PluginError: A backend isn't installed.
        PoolError: The host pool can't be had.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults = 0
        """Exceptions of ours that were kept from the engine."""
        self._told = Counts(float)
        """What has been counted and told."""
        self._log = RateLog(log, 10.0)
        _show_lines()
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        for reason in identity.refusals(vllm_config):
            raise LayoutError(f"lmcache-core cannot be used with this engine: {reason}")
        specs = identity.group_specs(kv_cache_config)
        if settings(options.config).layout == "canonical":
            for reason in identity.not_shared(vllm_config, specs):
                raise LayoutError(f"layout: canonical cannot be had of this engine: {reason}")
        shards, replicas = identity.shards_of(vllm_config, kv_cache_config, specs)
        parallel = vllm_config.parallel_config
        same_process = parallel.world_size == 1 and str(parallel.distributed_executor_backend or "uni") == "uni"
        engine = str(self._kv_transfer_config.engine_id)
        self._specs = specs
        self._lazy = options.lazy_offload
        self._hash_tokens: int = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        """Tokens that one of vLLM's block hashes stands for."""
        self._awaited: set[str] = set()
        """Requests whose loads go on beside the engine's steps."""
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._door: Door | WorkerDoor
        if role == KVConnectorRole.SCHEDULER:
            blocks = identity.block_tokens(specs)
            weights = identity.weights_of(vllm_config, options.weights_id)
            self._door = door = open_door(
                options.config, engine, blocks, processes=not same_process, past_host=options.past_host
            )
            page_tokens = page_tokens_for([blocks], door.client.page_tokens)
            self._salt = door.config.salt
            self._backends = {tier.name: tier.backend for tier in door.config.tiers}
            self._log = RateLog(log, door.config.log_interval)

            def describe(facts: Facts) -> Namespace:
                return identity.describe_engine(
                    vllm_config, specs, facts, page_tokens=page_tokens, shards=shards, weights=weights
                )

            self._scheduler = SchedulerSide(
                door.client,
                options,
                describe,
                page_tokens=page_tokens,
                block_tokens=[spec.block_tokens for spec in specs],
                ranks=parallel.tensor_parallel_size,
                may_wait=identity.loads_within_a_step(vllm_config, len(specs), replicas),
                lease_seconds=door.config.lease_timeout,
                warn=self._warn,
                follow=self._pages if self._publishes(vllm_config) else None,
            )
            self._check_policy(vllm_config)
        else:
            rank = parallel.rank % parallel.tensor_parallel_size
            if identity.interleaves(vllm_config):
                options = msgspec.structs.replace(options, layerwise=False)
            self._door = WorkerDoor(
                options.config, engine, rank // replicas, same_process=same_process, past_host=options.past_host
            )
            self._worker = WorkerSide(options, self._door.client, writes=rank % replicas == 0, warn=self._warn)

    @_guarded(None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        scheduler = self._scheduler
        if scheduler is None or not self._lazy:
            return
        reason = identity.not_lazy(self._vllm_config, self._specs)
        if reason:
            log.warning("lazy_offload cannot be had: %s; KV is stored as soon as it has been computed", reason)
        else:
            step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            scheduler.store_late(EngineBlocks(gpu_block_pool), step_tokens)
            log.info("KV is stored late, shortly before its blocks go to others (lazy_offload)")
        self._lazy = False

    def _check_policy(self, vllm_config: Any) -> None:
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r: vLLM ends a request whose KV is lost while it is loaded; write "
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config, at its top level',
                policy,
            )

    def _warn(self, kind: str, text: str) -> None:
        self._log.warning(kind, "%s", text)

    def _fault(self, method: str, error: Exception) -> None:
        self.faults += 1
        self._log.warning(method, "%s failed and is passed over: %s: %s", method, type(error).__name__, error)
        log.debug("%s failed", method, exc_info=error)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of all layers would pass over what is to happen between them."""
        return read_options(extra_config).layerwise is not False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler's side

    @_guarded(None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is None:
            return
        try:
            self._begin(request)
        except ConfigError as error:
            self._scheduler.refused(request.request_id, error)

    def _begin(self, request: Any) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        if self._lazy:
            self._lazy = False
            log.warning("lazy_offload cannot be had: this vLLM does not tell of its blocks; KV is stored at once")
        lora = getattr(request, "lora_request", None)
        adapter = None if lora is None else f"{lora.lora_name} {adapter_digest(lora.lora_path)}"
        marks = Marks(salt=(self._salt, request.cache_salt or ""), **identity.marks_of(request, adapter))
        usable = getattr(request, "prompt_embeds", None) is None and not getattr(request, "resumable", False)
        wanted = read_request_options(request.kv_transfer_params)
        config = self._kv_transfer_config
        wanted = msgspec.structs.replace(
            wanted, load=wanted.load and config.is_kv_consumer, store=wanted.store and config.is_kv_producer
        )
        scheduler.begin(request, marks, wanted, usable=usable)

    @_guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.match(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        ids = blocks.get_block_ids()
        try:
            scheduler.allocated(request.request_id, ids, num_external_tokens)
        except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine
            self._fault("update_state_after_alloc", error)
            if num_external_tokens > 0:  # it counts on them
                scheduler.break_promise(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduler = self._scheduler
        assert scheduler is not None
        state = scheduler_output.kv_connector_block_state
        loads = scheduler.take_loads()  # whatever goes wrong: the engine waits for these
        try:
            foreign = scheduler_output.has_sync_kv_loads and self._has_foreign_loads(scheduler_output)
            step = scheduler.step(scheduler_output.num_scheduled_tokens, state.get_block_ids, foreign=foreign)
        except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine
            self._fault("build_connector_meta", error)
            step = Step(scheduler.page_tokens)
        step.loads = loads
        return Metadata(step)

    @_guarded(True)
    def _has_foreign_loads(self, scheduler_output: Any) -> bool:
        """Whether another connector loads something within the step. That may be lost, and what is computed behind it
        is nonsense then."""
        scheduler = self._scheduler
        assert scheduler is not None
        cached = scheduler_output.scheduled_cached_reqs
        begin = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        begin += [
            (request_id, computed)
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request_id in cached.resumed_req_ids
        ]
        return any(scheduler.is_foreign(*each) for each in begin)

    @_guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.others_lost(connector_output.invalid_block_ids or set())
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, WorkerMetadata) else Report()
        scheduler.ended()
        if report:
            try:
                scheduler.report(report)
            except LayoutError as error:
                scheduler.turn_off(str(error))

    @_guarded((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.end(request.request_id)
        return False, None

    @_guarded((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.end(request.request_id)
        return False, None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources = self._sources(request, num_external_tokens) or {}
        rest = num_external_tokens - sum(sources.values())
        if rest:  # a page that is loaded for a part of it, or what was evicted just now
            source = max(sources, key=lambda each: sources[each]) if sources else CacheHitSource.EXTERNAL_UNSPECIFIED
            sources[source] = sources.get(source, 0) + rest
        return {source: count for source, count in sources.items() if count > 0}

    @_guarded(None)
    def _sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        assert self._scheduler is not None
        found: dict[Any, int] = {}
        for tier, count in self._scheduler.sources(request.request_id, num_external_tokens).items():
            source = SOURCES.get(self._backends.get(tier, tier), CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + count
        return found

    @_guarded(None)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What has been counted since this was last asked."""
        counts = Counts(float)
        if self._scheduler is not None:
            counts.update(self._scheduler.counts)
        counts["faults", ""] = self.faults
        new, self._told = {key: amount - self._told[key] for key, amount in counts.items()}, counts
        data = joined(new)
        return ConnectorStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _publishes(self, vllm_config: Any) -> bool:
        events = vllm_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    def _pages(self, request: Any, first: int, end: int) -> list[Page]:
        """What vLLM calls pages of a request."""
        scheduler = self._scheduler
        assert scheduler is not None
        size = self._hash_tokens
        count = scheduler.page_tokens // size
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[: end * count]]
        lora = request.lora_request
        pages = []
        for page in range(first, end):
            start = page * scheduler.page_tokens
            pages.append(
                Page(
                    tuple(hashes[page * count : (page + 1) * count]),
                    hashes[page * count - 1] if page else None,
                    tuple(request.all_token_ids[start : start + scheduler.page_tokens]),
                    None if lora is None else lora.adapter_id,
                    None if lora is None else lora.name,
                )
            )
        return pages

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events() or ()

    @_guarded(())
    def _events(self) -> list[KVCacheEvent]:
        """vLLM's events of the blocks that have come to a medium or left it."""
        scheduler = self._scheduler
        assert scheduler is not None
        told: list[KVCacheEvent] = []
        for page, place, stored in scheduler.events():
            medium = MEDIUM_CPU if place == "cpu" else MEDIUM_STORAGE
            if stored:
                told.append(
                    BlockStored(
                        block_hashes=list(page.block_hashes),
                        parent_block_hash=page.parent,
                        token_ids=list(page.tokens),
                        block_size=self._hash_tokens,
                        lora_id=page.lora_id,
                        medium=medium,
                        lora_name=page.lora_name,
                        ownership=place,
                    )
                )
            else:
                told.append(BlockRemoved(block_hashes=list(page.block_hashes), medium=medium, ownership=place))
        return told

    @_guarded(False)
    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # Worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the KV lies.

        Raises:
            LayoutError: It cannot be cached; the message says why.
            PluginError: There is no transfer for this device.
        """
        worker = self._worker
        assert worker is not None
        tensors = [[kv_caches[name] for name in spec.layer_names] for spec in self._specs]
        device = tensors[0][0].device.type
        blocks = self._kv_cache_config.num_blocks
        groups = []
        for spec, layers in zip(self._specs, tensors, strict=True):
            first = layers[0]
            if first.dim() != 4 or first.shape[0] % blocks:
                raise LayoutError(
                    f"vLLM's KV of {spec.layer_names[0]} has the shape {tuple(first.shape)}, not [block, head, token, "
                    "content]: this version of vLLM is not known here"
                )
            # What lies in a block of the CPU backend is its own affair: K lies transposed in it.
            dims = "bhoo" if device == "cpu" else "bhtd"
            apart = [self._apart(layer, spec) for layer in layers] if self._is_canonical else None
            kernel_blocks = first.shape[0] // blocks
            groups.append(Geometry(layers, dims, spec.block_tokens, kernel_blocks, apart, spec.layer_names))
        worker.register(
            groups, device, backend=self._backend(), isa=self._isa(tensors[0][0]) if device == "cpu" else ""
        )
        log.info("KV is copied %s", worker.copies)

    @property
    def _is_canonical(self) -> bool:
        return isinstance(self._door, WorkerDoor) and self._door.layout == "canonical"

    def _apart(self, layer: torch.Tensor, spec: identity.GroupSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as [block, head, token, dim], where it is known how they lie.

        Raises:
            LayoutError: It is not.
        """
        blocks, heads, tokens, content = layer.shape
        size = content // 2
        if spec.latent or size != spec.spec.head_size or content % 2:
            raise LayoutError(f"layout: canonical needs K and V of one size, and {spec.kind} has something else")
        if layer.device.type != "cpu":
            return layer[..., :size], layer[..., size:]
        isa = self._isa(layer)
        if isa not in PLAIN_ISAS or not layer[0, 0].is_contiguous():
            raise LayoutError(
                f"layout: canonical cannot be had of this engine: its blocks are packed for {isa}; known are those for "
                f"{', '.join(PLAIN_ISAS)}"
            )
        # Of each block and head K comes first, transposed, and then V.
        flat = layer.view(blocks, heads, 2, size * tokens)
        keys = flat[:, :, 0].view(blocks, heads, size, tokens).transpose(-1, -2)
        return keys, flat[:, :, 1].view(blocks, heads, tokens, size)

    def _backend(self) -> str:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, self._specs[0].layer_names)
        names = {layer.get_attn_backend().get_name() for layer in layers.values()}
        return ",".join(sorted(names))

    def _isa(self, tensor: torch.Tensor) -> str:
        """The instruction set by which the CPU backend packs blocks."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        spec = self._specs[0].spec
        return str(_get_attn_isa(tensor.dtype, spec.block_size, spec.head_size))

    def _bound(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, Metadata) else Step(0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._bound()
        worker = self._worker
        if worker is None:
            return
        self._awaited.update(job.request for job in step.loads if not job.now)
        try:
            worker.start(step, busy=step.computes)
        except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine
            self._fault("start_load_kv", error)
            worker.give_up(step)

    @_guarded(None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    @_guarded(None)
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    @_guarded(None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # It is the first call of a step. What is stored is read before blocks go to others: on streams, by then.
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata.step if isinstance(kv_connector_metadata, Metadata) else Step(0))

    @_guarded(None)
    def wait_for_save(self) -> None:
        step = self._bound()
        if self._worker is not None:
            self._worker.computed(step)
            self._worker.save(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        try:
            ended, failed = self._worker.ended()
        except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine, which waits for these
            self._fault("get_transfer_results", error)
            ended, failed = set(self._awaited), set(self._awaited)
            self._worker.give_up_on(failed)
        ended &= self._awaited  # vLLM is told once
        self._awaited -= ended
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed & ended)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving

    @_guarded(frozenset())
    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.bad_blocks()

    @_guarded(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.report()
        return None if report is None else WorkerMetadata(report)

    @_guarded(None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._door.close()
