"""`HiCacheBackend`: SGLang's interface of storage backends, translated. It and `engine` alone import SGLang.

SGLang makes one in each scheduler's process and calls it from a thread that looks up, one that reads and one that
stores. No exception of ours reaches it once it is attached: what cannot be had is a miss, what cannot be stored is not.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from lmcache_core.client import KEY_BYTES, Client
from lmcache_core.connectors.sglang import engine, identity, sharing
from lmcache_core.connectors.sglang.hostpages import Buffer, FlatPages, HostPages, as_page_numbers, buffers_of
from lmcache_core.connectors.sglang.nodes import engine_name, engine_settings, open_client
from lmcache_core.connectors.sglang.options import lacking, read_options
from lmcache_core.connectors.sglang.pagestore import PageStore
from lmcache_core.connectors.sglang.snapshots import Snapshots, restorable
from lmcache_core.errors import LayoutError, LMCacheError, UsageError
from lmcache_core.namespace import Namespace
from lmcache_core.protocols import KVView
from lmcache_core.ratelog import RateLog

__all__ = ["HiCacheBackend"]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("lmcache_core.connectors.sglang")

LONGEST_PREFETCH = 60.0
"""Seconds for which what was found is kept at least, in a node of the engine's own."""
MEMORY = ("kv_buffer", "temporal_buffer", "conv_buffer")
"""Where host pools have their tensors."""
KV = "kv"
"""What SGLang calls the pool that every model has."""
MOST_STATS = 1000
"""Calls that are remembered until SGLang asks for statistics."""


def _guarded(otherwise: Callable[..., T]) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Whatever a method raises is logged, and the engine gets `otherwise` of what it has called it with."""

    def guard(method: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  no fault of ours may reach the engine
                backend: Any = args[0]
                backend._fault(method.__name__, error)
                return otherwise(*args[1:], **kwargs)

        return guarded

    return guard


def _each_false(keys: Sequence[str] = (), *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of(transfers: Sequence[Any] = (), *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _each_none(keys: Sequence[str] = (), *_: Any, **__: Any) -> list[None]:
    return [None] * len(keys)


class _Sidecar(NamedTuple):
    """A host pool besides the KV."""

    pages: HostPages
    page_tokens: int
    namespace: Namespace


class _Stores(NamedTuple):
    """What the host pools are stored in."""

    kv: PageStore
    sidecars: Mapping[str, Snapshots]

    def close(self) -> None:
        self.kv.close()
        for each in self.sidecars.values():
            each.close()


class HiCacheBackend(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """See the module. Options stand in the extra configuration: see `Options`.

    Raises:
        ConfigError: The options or the cache's configuration can't be used; the message says what to write.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.faults = 0
        """Exceptions of ours that were kept from the engine."""
        self._log = RateLog(log, 10.0)
        self._config = storage_config
        self._options, strange = read_options(storage_config.extra_config or {})
        for key in strange:
            log.warning("hicache-storage-backend-extra-config: %r is neither an option of ours nor of SGLang's", key)
        self._client: Client | None = None
        self._turn = threading.Lock()
        self._current: tuple[object, _Stores] | None = None
        """The weights that are in use, and the stores of what they compute."""
        self._original: object = None
        """The weights that are those of the checkpoint; None if they had been changed before this was attached."""
        self._pages: HostPages | sharing.SharedPages | None = None
        self._shared = False
        """Whether pages are kept as engines of other kinds have them too."""
        self._namespace: Namespace | None = None
        self._sidecars: dict[str, _Sidecar] = {}
        self._order: Any = None
        self._page_tokens = 0
        self._stats: dict[str, tuple[list[int], list[float]]] = {"prefetch": ([], []), "backup": ([], [])}

    def _fault(self, method: str, error: Exception) -> None:
        self.faults += 1
        self._log.warning(method, "%s failed and is passed over: %s: %s", method, type(error).__name__, error)
        log.debug("%s failed", method, exc_info=error)
        client = self._client
        if client is not None:
            try:
                client.count("faults", f"sglang {method}")
            except LMCacheError:  # it is being closed
                return

    # Attaching

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where the pages of the host pool lie, and join the node.

        Raises:
            LayoutError: The KV of this engine can't be cached; the message says why.
            ConfigError: The cache's configuration can't be used.
            PluginError: A backend isn't installed.
            PoolError: The node's memory can't be had.
        """
        super().register_mem_pool_host(mem_pool_host)
        pool, storage = mem_pool_host, self._config
        for reason in identity.refusals(storage, pool):
            raise LayoutError(f"lmcache-core cannot be used with this engine: {reason}")
        place = engine.place()
        if place.hosts > 1 and not engine.connects(self._options.config):
            raise LayoutError(
                "lmcache-core cannot be used with this engine: it runs on several hosts; start a node on each of them "
                "with `lmcache-core serve`, and write `connect: auto` in the configuration"
            )
        tokens = int(pool.page_size)
        self._page_tokens = tokens
        weights = identity.weights_of(
            place.arguments, self._options.weights_id, lambda: f"random {engine.secret()} {place.replica}"
        )
        name = str(storage.model_name or "")
        extra = storage.extra_config or {}
        lacks = lacking(extra, engine.passes_prefix_keys(extra))
        self._shared = engine_settings(self._options.config).layout == "canonical"
        if self._shared:
            for reason in sharing.not_shared(storage, pool, place.arguments, sidecars=False):
                raise LayoutError(f"layout: canonical cannot be had of this engine: {reason}")
            sharing.check_settings(self._options.config, tokens, lacks)
            self._pages = sharing.SharedPages(pool)
            self._namespace = sharing.describe_shared(pool, weights=weights, model_name=name)
        else:
            self._pages, buffers = _pages_of(pool)
            order = identity.flat_order(pool)
            self._order = None if order is None else np.array(order, np.intp)
            self._namespace = identity.describe_pool(
                storage,
                pool,
                page_bytes=self._pages.page_bytes,
                buffers=len(buffers),
                weights=weights,
                config=identity.config_digest(place.arguments),
                model_name=name,
            )
        self._client = open_client(
            self._options.config,
            engine_name(place.replica),
            tokens,
            rank=place.rank,
            ranks=place.ranks,
            lease=LONGEST_PREFETCH,
            lacks=lacks,
        )
        if not engine.watch_updates():
            log.warning("this version of SGLang does not tell when weights are changed in place; clear the cache then")
        with self._turn:
            self._original = None if engine.updates.number else engine.weights_now()
            self._open()

    def _open(self) -> _Stores:
        """Open the stores of the weights that are in use now."""
        client, namespace, weights = self._client, self._namespace, engine.weights_now()
        if client is None or namespace is None:
            raise UsageError("no host pool has been registered, or the backend has been closed")
        epoch = 0 if weights == self._original else engine.epoch_of(weights)
        stores = _Stores(
            PageStore(client, client.register(namespace.with_epoch(epoch)), self._options),
            {
                name: Snapshots(client, client.register(each.namespace.with_epoch(epoch)), self._options)
                for name, each in self._sidecars.items()
            },
        )
        before, self._current = self._current, (weights, stores)
        if before is not None:
            before[1].close()
        return stores

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Learn of a pool by its name.

        Raises:
            LayoutError: It is one besides the KV that cannot be cached; the message says why.
        """
        name = str(host_pool_name)
        if name != KV:
            assert self._namespace is not None
            try:
                if self._shared:
                    raise LayoutError(
                        f"layout: canonical cannot be had of this engine: it has a host pool {name!r} besides"
                    )
                pages, buffers = _pages_of(host_pool)
                sizes = [each.nbytes for each in buffers]
                namespace = identity.describe_sidecar(self._config, host_pool, name, sizes=sizes, kv=self._namespace)
            except BaseException:  # SGLang doesn't close what it could not attach
                self.close()
                raise
            with self._turn:
                self._sidecars[name] = _Sidecar(pages, int(getattr(host_pool, "page_size", 1)), namespace)
                self._open()
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _used(self) -> PageStore:
        """The store of the KV of the weights that are in use now."""
        return self._stores().kv

    def _stores(self) -> _Stores:
        """The stores of the weights that are in use now."""
        weights, current = engine.weights_now(), self._current
        if current is not None and current[0] == weights:
            return current[1]
        with self._turn:
            current = self._current
            if current is not None and current[0] == weights:
                return current[1]
            stores = self._open()
            self._log.info("the weights have changed: what was stored before is not used any more, nor deleted")
            return stores

    # Finding, reading, storing

    @_guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of these pages can be read, from the first on. They are kept for being read."""
        store = self._used()
        return store.exists(_as_bytes(keys), _prefix(store, extra_info))

    @_guarded(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether a page can be read."""
        return self._used().exists(_as_bytes([key])) == 1

    @_guarded(_each_false)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copy pages into those of the host pool. Those of the result that are True are there, whole."""
        store, pages = self._used(), self._pages
        assert pages is not None
        started = time.perf_counter()
        view = pages.view(self._numbers(host_indices, len(keys)))
        done = store.get(_as_bytes(keys), view, _prefix(store, extra_info))
        self._note("prefetch", done, time.perf_counter() - started)
        return [place < done for place in range(len(keys))]

    @_guarded(_each_false)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. Those of the result that are True can be found from now on."""
        store, pages = self._used(), self._pages
        assert pages is not None
        started = time.perf_counter()
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank stores the same
        view = pages.view(self._numbers(host_indices, len(keys)))
        done = store.set(_as_bytes(keys), view, _prefix(store, extra_info))
        self._note("backup", done, time.perf_counter() - started)
        return [place < done for place in range(len(keys))]

    @_guarded(_each_none)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copy pages into tensors, a flat one each."""
        store, targets = self._used(), list(target_locations or ())
        done = store.get(_as_bytes(keys), self._flat(targets, len(keys)))
        return [target if place < done else None for place, target in enumerate(targets)]

    @_guarded(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages that are flat tensors. Whether all of them can be found from now on."""
        store = self._used()
        if not self._config.is_storage_writer:
            return True  # another rank stores the same
        return store.set(_as_bytes(keys), self._flat(list(values or ()), len(keys))) == len(keys)

    @_guarded(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Copy a page into a flat tensor."""
        if target_location is None:
            raise UsageError("a page is copied into a tensor that is given")
        found: list[torch.Tensor | None] = self.batch_get([key], [target_location])
        return found[0]

    @_guarded(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page that is a flat tensor."""
        stored: bool = self.batch_set([key], [value])
        return stored

    def _numbers(self, host_indices: torch.Tensor, keys: int) -> Any:
        assert self._pages is not None
        numbers = as_page_numbers(host_indices.numpy(), self._page_tokens, self._pages.pages)
        if len(numbers) != keys:
            raise UsageError(f"{keys} pages were asked for, and places of {len(numbers)} given")
        return numbers

    def _flat(self, tensors: Sequence[torch.Tensor], keys: int) -> FlatPages:
        if self._shared:
            raise LayoutError('layout: canonical needs `"interface_v1": 1` in the extra configuration')
        if len(tensors) != keys:
            raise UsageError(f"{keys} pages were asked for, and {len(tensors)} tensors given")
        return FlatPages([each.reshape(-1).view(torch.uint8).numpy() for each in tensors], self._order)

    # Pools besides the KV

    @_guarded(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How many of these pages can be read, and to which of their ends all pools can be restored."""
        stores = self._stores()
        names = _as_bytes(keys)
        pages = stores.kv.exists(names, _prefix(stores.kv, extra_info))
        ends = list(range(1, pages + 1))
        hits: dict[str, int] = {KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            if not ends:
                break
            name = str(transfer.name)
            if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
                raise UsageError(f"pages of the pool {name!r} are looked up by {transfer.hit_policy!r}")
            trailing = max(1, len(transfer.keys or ()))
            there = stores.sidecars[name].present(names[:pages], trailing)
            own = restorable(there, trailing)
            if own:
                hits[name] = own[-1]
            ends = sorted(set(ends).intersection(own))
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)

    @_guarded(_none_of)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Copy pages of several pools into theirs. For each pool and page whether it is there, whole."""
        stores = self._stores()
        got: dict[Any, list[bool]] = {}
        for transfer in transfers:
            keys, name = list(transfer.keys or ()), str(transfer.name)
            if name == KV:
                got[transfer.name] = self.batch_get_v1(keys, transfer.host_indices, extra_info)
            else:
                got[transfer.name] = stores.sidecars[name].get(_as_bytes(keys), self._sidecar_view(name, transfer))
        return got

    @_guarded(_none_of)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools. For each pool and page whether it can be found from now on."""
        stores = self._stores()
        got: dict[Any, list[bool]] = {}
        for transfer in transfers:
            keys, name = list(transfer.keys or ()), str(transfer.name)
            if name == KV:
                got[transfer.name] = self.batch_set_v1(keys, transfer.host_indices, extra_info)
            else:
                got[transfer.name] = stores.sidecars[name].set(_as_bytes(keys), self._sidecar_view(name, transfer))
        return got

    def _sidecar_view(self, name: str, transfer: Any) -> KVView:
        sidecar, count = self._sidecars[name], len(transfer.keys or ())
        indices = np.zeros(0, np.intp) if transfer.host_indices is None else transfer.host_indices.numpy()
        numbers = as_page_numbers(indices, sidecar.page_tokens, sidecar.pages.pages)
        if len(numbers) != count:
            raise UsageError(f"{count} pages of {name!r} were asked for, and places of {len(numbers)} given")
        return sidecar.pages.view(numbers)

    # The rest

    @_guarded(lambda *_, **__: None)
    def clear(self) -> None:
        """Take all that is stored of this engine's KV out of all tiers; that of others stays."""
        stores = self._stores()
        stores.kv.clear()
        for each in stores.sidecars.values():
            each.clear()

    def _note(self, kind: str, pages: int, seconds: float) -> None:
        counts, rates = self._stats[kind]
        if pages and len(counts) < MOST_STATS and self._pages is not None:
            counts.append(pages)
            rates.append(pages * self._pages.page_bytes / 1e9 / max(seconds, 1e-9))

    @_guarded(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """What has been read and stored since it was last asked for. Answers at once."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        stats, self._stats = self._stats, {"prefetch": ([], []), "backup": ([], [])}
        made = StorageMetrics()
        made.prefetch_pgs, made.prefetch_bandwidth = stats["prefetch"]
        made.backup_pgs, made.backup_bandwidth = stats["backup"]
        return made

    @_guarded(lambda *_, **__: None)
    def close(self) -> None:
        """Let go of the node; one that is the engine's own is closed."""
        with self._turn:
            current, client = self._current, self._client
            self._current = self._client = self._pages = None
        if current is not None:
            current[1].close()
        if client is not None:
            client.close()


def _pages_of(pool: Any) -> tuple[HostPages, list[Buffer]]:
    """Where the pages of a host pool lie.

    Raises:
        LayoutError: In a way that cannot be copied.
    """
    tokens = int(getattr(pool, "page_size", 1))

    def locate(pages: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        indices = torch.cat([torch.arange(page * tokens, (page + 1) * tokens) for page in pages])
        found: tuple[Sequence[int], Sequence[int]] = pool.get_page_buffer_meta(indices)
        return found

    try:
        count = int(pool.page_num)
        buffers = buffers_of(locate, count)
    except (AttributeError, NotImplementedError, ValueError) as error:  # as SGLang says it, of a pool or a layout
        raise LayoutError(
            f"lmcache-core cannot be used with this engine: its host pool {type(pool).__name__} does not tell where "
            f"its pages lie: {error}"
        ) from error
    memory = [getattr(pool, name, None) for name in MEMORY]  # a pool lets go of it before it goes itself
    return HostPages(buffers, count, tokens, (pool, memory)), buffers


def _as_bytes(keys: Sequence[str]) -> list[bytes]:
    """SGLang's names of pages are the hex of ours.

    Raises:
        UsageError: They aren't.
    """
    try:
        found = [bytes.fromhex(key) for key in keys]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the key of a page is {2 * KEY_BYTES} hex digits: {error}") from error
    if any(len(key) != KEY_BYTES for key in found):
        raise UsageError(f"the key of a page is {2 * KEY_BYTES} hex digits")
    return found


def _prefix(store: PageStore, extra_info: Any) -> list[bytes]:
    """What has to be told of the pages in front of a run, which may be very many."""
    keys = getattr(extra_info, "prefix_keys", None) or ()
    return _as_bytes(keys[store.needed_from(len(keys)) :])
