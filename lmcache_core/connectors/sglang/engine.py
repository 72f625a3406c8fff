"""What the SGLang process that this runs in knows of itself."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang.srt import runtime_context
from torch.distributed import distributed_c10d

from lmcache_core.connectors.sglang.nodes import engine_name, engine_settings

__all__ = [
    "Place",
    "connects",
    "epoch_of",
    "passes_prefix_keys",
    "place",
    "secret",
    "updates",
    "watch_updates",
    "weights_now",
]

log = logging.getLogger(__name__)

SECRET = "lmcache-core engine"
"""Under which name ranks agree on it."""


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
    return bool(engine_settings(source).connect)


def passes_prefix_keys(extra: Mapping[str, Any]) -> bool | None:
    """Whether SGLang tells a storage backend what is in front of a run of pages: it keeps that key of the extra
    configuration to itself. None where that is not known, as this is another configuration than it was started with.

    Args:
        extra: What it has given to the backend.
    """
    written = _of(place().arguments, "hicache_storage_backend_extra_config", None)
    if not written:
        return None
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController as Controller

        kept, *_, passes = Controller.parse_storage_backend_extra_config(written)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:  # of another version, or moved
        log.debug("what SGLang was started with can't be told: %s", error)
        return None
    return bool(passes) if all(kept.get(name) == value for name, value in extra.items()) else None


class _Updates:
    """How often the weights of this process were changed in place.

    What is computed before a change may be stored after it. So a change counts twice: when it begins, and when SGLang
    has forgotten what it had computed before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self.number = 0

    def begin(self) -> None:
        """Weights are about to be changed."""
        with self._lock:
            self.number += 1
            self._open = True

    def forgotten(self) -> None:
        """SGLang has forgotten all KV."""
        with self._lock:
            self.number += self._open
            self._open = False


updates = _Updates()


def weights_now() -> tuple[str, int]:
    """What changes whenever this engine's weights do: the version that SGLang was told, and how often they have been
    changed in this process."""
    version = _of(runtime_context.get_serving(), "weight_version", "")
    return str(version), updates.number


@functools.cache
def secret() -> str:
    """Text that all processes of this engine agree on, and no other engine has: the first of them to ask makes it up,
    and the others find it where SGLang's ranks have found each other. Made up by each for itself where there is no such
    place, which costs hits and is never wrong."""
    mine = secrets.token_hex(16)
    try:
        store: Any = distributed_c10d._get_default_store()
        return str(store.compare_set(SECRET, "", mine).decode())
    except (ValueError, RuntimeError) as error:  # no group, or its first rank does not answer
        log.debug("ranks can't agree on a secret: %s", error)
        return mine


def epoch_of(weights: tuple[str, int]) -> int:
    """A `weights_epoch` for weights that were changed in place: the same in all ranks of an engine, and in no other."""
    text = f"{engine_name(place().replica)} {secret()} {weights[0]!r} {weights[1]}"
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def watch_updates() -> bool:
    """Count the changes of weights in this process from now on: SGLang tells a storage backend of none. Returns whether
    that can be done with this version of SGLang."""
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    except ImportError:
        return False
    return _before(Manager, "_observe_weight_load", updates.begin) and _after(
        UnifiedRadixCache, "reset", updates.forgotten
    )


def _before(kind: Any, name: str, call: Callable[[], None]) -> bool:
    """Have something called before a method. Returns whether there is such a method."""
    method = getattr(kind, name, None)
    if method is not None and not hasattr(method, "is_watched"):

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            call()
            return method(*args, **kwargs)

        watched.is_watched = True  # type: ignore[attr-defined]
        setattr(kind, name, watched)
    return method is not None


def _after(kind: Any, name: str, call: Callable[[], None]) -> bool:
    """Have something called after a method. Returns whether there is such a method."""
    method = getattr(kind, name, None)
    if method is not None and not hasattr(method, "is_watched"):

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            got = method(*args, **kwargs)
            call()
            return got

        watched.is_watched = True  # type: ignore[attr-defined]
        setattr(kind, name, watched)
    return method is not None
