"""What the SGLang process that this runs in knows of itself."""

from __future__ import annotations

import functools
import hashlib
import threading
from typing import Any, NamedTuple

from sglang.srt import runtime_context

from lmcache_core.assembly import settings
from lmcache_core.connectors.sglang.nodes import engine_name

__all__ = ["Place", "connects", "epoch_of", "place", "watch_updates", "weights_now"]


class Place(NamedTuple):
    """Where this process stands in its engine."""

    arguments: Any
    """SGLang's server arguments."""
    rank: int
    """Of the engine's processes."""
    ranks: int
    hosts: int
    replica: int
    """Which of the engines that one launcher has started."""


def place() -> Place:
    """Where this process stands."""
    arguments = runtime_context.get_server_args()
    parallel = runtime_context.get_parallel()
    rank, ranks = int(_of(parallel, "tp_rank", 0)), int(_of(parallel, "tp_size", 1))
    hosts = int(_of(arguments, "nnodes", 1) or 1)
    return Place(arguments, rank, ranks, hosts, int(_of(parallel, "dp_rank", 0) or 0))


def _of(owner: Any, name: str, otherwise: Any) -> Any:
    try:
        return getattr(owner, name)
    except (AttributeError, RuntimeError, ValueError, KeyError):  # SGLang's contexts have a kind each for "not yet"
        return otherwise


def connects(source: Any) -> bool:
    """Whether the cache's configuration names a node that runs by itself.

    Raises:
        ConfigError: It can't be used.
    """
    return bool(settings(source).connect)


_lock = threading.Lock()
_updates = 0


def _updated() -> None:
    global _updates
    with _lock:
        _updates += 1


def weights_now() -> tuple[str, int]:
    """What changes whenever this engine's weights do: the version that SGLang was told, and how often they have been
    changed in this process."""
    version = _of(runtime_context.get_serving(), "weight_version", "")
    return str(version), _updates


def epoch_of(weights: tuple[str, int]) -> int:
    """A `weights_epoch` for weights that were changed in place: the same in all ranks of an engine, and in no other."""
    text = f"{engine_name(place().replica)} {weights[0]!r} {weights[1]}"
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def watch_updates() -> None:
    """Count the updates of weights in this process from now on. SGLang tells a storage backend of none, and an update
    need not name a version."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    record = Manager.record_weight_version_after_update
    if getattr(record, "is_watched", False):
        return

    @functools.wraps(record)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _updated()
        return record(self, *args, **kwargs)

    watched.is_watched = True  # type: ignore[attr-defined]
    Manager.record_weight_version_after_update = watched
