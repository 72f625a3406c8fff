"""The connector's counters in vLLM's classes, which carry them from its processes to its log and to `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_core.connectors.vllm.counters import COUNTERS, metric_name

__all__ = ["ConnectorMetrics", "ConnectorStats"]


class ConnectorStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """What was counted in an interval: amounts by `name` or `name label`."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"lmcache_core {key}": round(amount, 3) for key, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """The counters at `/metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            name: make(
                name=metric_name(name), documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (text, label) in COUNTERS.items()
        }
        for name, (_, label) in COUNTERS.items():
            if not label:  # shown as 0 from the start
                for values in per_engine_labelvalues.values():
                    self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition(" ")
            counter = self._counters.get(name)
            if counter is not None and amount > 0:
                counter.labels(*values, *([label] if label else [])).inc(amount)
