"""`Cache` and `AsyncCache`: prefix reuse over tokens and a view of an engine's KV. The public interface.

Both do the same; `Cache` blocks the caller, `AsyncCache` is awaited. They differ from a dictionary in that a store
takes what the cache lacks of a prompt, and a retrieve gives the longest prefix that it can restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from lmcache_core import operations
from lmcache_core.arguments import kind, seconds, tier_name, tier_names, token_count, token_counts, view_that
from lmcache_core.client import Client, Stats
from lmcache_core.errors import ClosedError, LayoutError, UsageError
from lmcache_core.index.boundary import stops
from lmcache_core.keys import PageHasher, Tokens, make_seed
from lmcache_core.namespace import Namespace
from lmcache_core.protocols import KVView


class Prompt:
    """Identity of a token sequence: keys of its whole pages, hashed once.

    Made by `Cache.prompt`; every verb takes one instead of tokens, with the hashing done.
    """

    __slots__ = ("_hasher",)

    def __init__(self, hasher: PageHasher) -> None:
        self._hasher = hasher

    @property
    def tokens(self) -> int:
        """Number of tokens, those behind the last whole page included."""
        return self._hasher.tokens

    @property
    def keys(self) -> list[bytes]:
        """Keys of the whole pages, 32 bytes each."""
        return self._hasher.keys

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._hasher.page_tokens

    def extend(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> None:
        """Append tokens; only new pages are hashed. See `page_extras` for `extras`.

        Raises:
            LayoutError: They are not token ids.
        """
        self._hasher.extend(tokens, extras)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What can be restored of a prompt: `tokens` of it from the start, by tier. `pending` if a tier that cannot tell at
    once is being asked; then ask again."""

    tokens: int
    tiers: Mapping[str, int]
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What was restored: the first `tokens` tokens are in the view now. `tiers` says how many came from where, without
    those that were in the view already."""

    tokens: int
    tiers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store, in tokens, over all cache groups.

    Args:
        stored: Copied; a retrieve finds them from now on.
        present: Were there before, or are being stored by somebody else.
        dropped: Found no room, or belong to a chunk that begins in front of `first_token` and is not stored.
    """

    stored: int
    present: int
    dropped: int
    _written: Future[bool] = field(repr=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the writes of these chunks to tiers have ended. Returns whether every chunk of the prompt is on
        every tier that is written through; then it survives a crash of this process where the tier is persistent.
        What waits for room in the queue of a slow tier is written later: `flush` waits for that too.

        Raises:
            UsageError: `timeout` is no number, or a negative one.
        """
        try:
            return self._written.result(seconds(timeout))
        except TimeoutError:
            return False

    async def written(self) -> bool:
        """As `wait`, for coroutines."""
        return await asyncio.shield(asyncio.wrap_future(self._written))


class _Base:
    """What both forms share: identity of prompts and arguments of operations."""

    def __init__(self, client: Client, namespace: Namespace, *, salt: str = "") -> None:
        """Use a node through `client` for KV of `namespace`. `salt` sets a tenant apart.

        Raises:
            LayoutError: The namespace doesn't fit the node's chunks, or is none; the salt is no text.
            UsageError: The client is none.
        """
        if not callable(getattr(client, "register", None)) or isinstance(client, type):
            raise UsageError(f"a client is what `Cache.open(...).client` is, or a DirectClient; not {kind(client)}")
        if not isinstance(salt, str):
            raise LayoutError(f"a salt is text, not {kind(salt)}")
        self._model = client.register(namespace)
        self.client = client
        self.namespace = namespace
        self.page_tokens = namespace.page_tokens
        self._salt = salt or None

    def prompt(
        self,
        tokens: Tokens = (),
        *,
        salt: str | bytes | None = None,
        adapter: str | None = None,
        extras: Mapping[int, bytes] | None = None,
    ) -> Prompt:
        """Name a token sequence.

        Args:
            tokens: Ids, 1-D: a list, an array of any integer type, a torch tensor.
            salt: Sets tenants apart, on top of the salt of the configuration.
            adapter: Identity of a LoRA adapter.
            extras: Content hashes of images or audio by page, made by `lmcache_core.page_extras`.

        Raises:
            LayoutError: They are not token ids, or the rest is not what it must be.
        """
        settings = {} if self._salt is None else {"node salt": self._salt}
        hasher = PageHasher(self.page_tokens, make_seed(salt=salt, adapter=adapter, extra=settings))
        hasher.extend(tokens, extras)
        return Prompt(hasher)

    def _keys(self, prompt: Prompt | Tokens) -> list[bytes]:
        if not isinstance(prompt, Prompt):
            return self.prompt(prompt).keys
        if prompt.page_tokens != self.page_tokens:
            raise LayoutError(f"the prompt has pages of {prompt.page_tokens} tokens, this cache of {self.page_tokens}")
        return prompt.keys

    def _lookup(self, prompt: Prompt | Tokens, places: str | Sequence[str] | None) -> Lookup:
        found = self.client.lookup(self._model, self._keys(prompt), tier_names("source", places))
        return Lookup(found.pages * self.page_tokens, self._tokens(found.tiers), found.pending)

    def _tokens(self, pages: Mapping[str, int]) -> dict[str, int]:
        return {tier: count * self.page_tokens for tier, count in pages.items()}

    def _retrieve(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        first_token: int,
        max_tokens: int | None,
        source: str | Sequence[str] | None,
        timeout: float | None,
        name: str = "a timeout",
    ) -> operations.Operation[operations.Loaded]:
        view_that(view, "scatter", "group, first_page, pages, source")
        keys = self._keys(prompt)
        if max_tokens is not None:
            keys = keys[: token_count("max_tokens", max_tokens, "; write None for no limit") // self.page_tokens]
        return operations.retrieve(
            self.client,
            self._model,
            keys,
            view,
            first_page=token_count("first_token", first_token) // self.page_tokens,
            places=tier_names("source", source),
            seconds=seconds(timeout, name),
        )

    def _retrieved(self, loaded: operations.Loaded) -> Retrieved:
        return Retrieved(loaded.pages * self.page_tokens, self._tokens(loaded.tiers))

    def _store(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        placement: str | Sequence[str] | None,
        first_token: int,
        turns: Sequence[int],
    ) -> operations.Operation[operations.Stored]:
        view_that(view, "gather", "group, first_page, pages, into")
        keys = self._keys(prompt)
        size = self.page_tokens
        ends = [end // size for end in token_counts("turns", turns)]
        at = stops(len(keys), size, self.client.retention_tokens, ends)
        first = -(-token_count("first_token", first_token) // size)
        places = tier_names("placement", placement)
        return operations.store(self.client, self._model, keys, view, at=at, first_page=first, places=places)

    def _prefetch(self, prompt: Prompt | Tokens, source: str | Sequence[str] | None, destination: str) -> Future[int]:
        return self.client.prefetch(
            self._model, self._keys(prompt), tier_names("source", source), tier_name("destination", destination)
        )

    def _stored(self, outcome: operations.Stored) -> StoreResult:
        size = self.page_tokens
        return StoreResult(
            outcome.stored * size, outcome.present * size, outcome.dropped * size, _written=outcome.written
        )

    def contains(self, prompt: Prompt | Tokens) -> dict[str, int]:
        """For each tier (`cpu` is the host pool) how many tokens of the prompt it could restore alone. Renews nothing
        and asks no remote tier: of those it tells what this node knows."""
        keys = self._keys(prompt)
        names = ["cpu", *(tier.name for tier in self.client.stats().tiers)]
        pages = {name: self.client.lookup(self._model, keys, [name], quiet=True).pages for name in names}
        return self._tokens(pages)

    def pin(self, prompt: Prompt | Tokens) -> int:
        """Keep the restorable prefix where it is until it is unpinned as often. Returns its tokens."""
        return self.client.pin(self._model, self._keys(prompt)) * self.page_tokens

    def unpin(self, prompt: Prompt | Tokens) -> int:
        """Undo one `pin`. Returns the tokens that are pinned no longer."""
        return self.client.unpin(self._model, self._keys(prompt)) * self.page_tokens

    def evict(self, prompt: Prompt | Tokens, tiers: str | Sequence[str] | None = None) -> int:
        """Take the chunks of a prompt out of `tiers` (all by default), unless pinned or leased. Returns how many. Of
        tiers that others store on too only those that this node has stored or looked up."""
        return self.client.evict(self._model, self._keys(prompt), tier_names("tiers", tiers))

    def clear(self, tiers: str | Sequence[str] | None = None) -> int:
        """Take all chunks of this namespace out of `tiers` (all by default), pinned ones too. Returns how many.

        All that this node knows of is gone when it returns: of tiers that others store on too there may be more, which
        `lmcache-core clear --config` deletes. Others go on meanwhile: what they store anew
        stays, and what a store of theirs has found present may be gone after it."""
        return self.client.clear(self._model, tier_names("tiers", tiers))

    def stats(self) -> Stats:
        """State and counters of the node."""
        return self.client.stats()


class Cache(_Base):
    """Prefix cache for one model, blocking. Safe to use from many threads."""

    @classmethod
    def open(cls, config: Any, namespace: Namespace) -> Cache:
        """A cache with a node of its own in this process.

        Args:
            config: Path of a YAML file, the same as a dict, a `Config`, or None for the file that the environment
                variable `LMCACHE_CORE_CONFIG` names (without it, the defaults).
            namespace: What the KV is of and how its bytes lie.

        Raises:
            ConfigError: The configuration can't be used; the message names file, line and key.
            PluginError: A backend isn't installed or can't be loaded.
            PoolError: The host pool can't be had.
            LayoutError: The namespace doesn't fit the chunks.
        """
        client, salt = open_node(config)
        try:
            return cls(client, namespace, salt=salt)
        except BaseException:  # whatever went wrong, the node must not stay behind
            client.close()
            raise

    def lookup(self, prompt: Prompt | Tokens, *, source: str | Sequence[str] | None = None) -> Lookup:
        """How much of a prompt can be restored, from the tiers in `source` (all by default). Waits for no I/O.

        Raises:
            LayoutError: These aren't token ids.
            ConfigError: There is no such tier.
            UsageError: An argument isn't what it must be.
            ClosedError: The node has been closed.
        """
        return self._lookup(prompt, source)

    def retrieve(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        *,
        first_token: int = 0,
        max_tokens: int | None = None,
        source: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Retrieved:
        """Restore the longest prefix that can be into `view`.

        A chunk that is damaged, gone or late ends the prefix in front of it; nothing is raised for it. What lies in
        the view behind the tokens returned is undefined.

        Args:
            prompt: Tokens, or what `prompt` made of them.
            view: Where the KV goes; pages count from the prompt's start.
            first_token: Whole pages in front of it are in the view already and are left as they are.
            max_tokens: Restore no more than these.
            source: Tiers to restore from, one name or several; all by default.
            timeout: Seconds after which what has not arrived is left out. Each tier's `read_timeout` holds besides.

        Raises:
            LayoutError: The view is too small for the prompt or no view, or these aren't token ids.
            ConfigError: There is no such tier.
            UsageError: An argument isn't what it must be, such as a negative number.
            ClosedError: The node has been closed.
        """
        return self._retrieved(operations.run(self._retrieve(prompt, view, first_token, max_tokens, source, timeout)))

    def store(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        *,
        placement: str | Sequence[str] | None = None,
        first_token: int = 0,
        turns: Sequence[int] = (),
    ) -> StoreResult:
        """Copy what the cache lacks of a prompt's whole pages out of `view`. Never waits for a tier or for room.

        Args:
            prompt: Tokens, or what `prompt` made of them.
            view: Where the KV is; pages count from the prompt's start.
            placement: Tiers to write it to besides the host pool, one name or several; all that are written through by
                default.
            first_token: Pages that begin in front of it are not in the view. A chunk that begins there is not stored,
                and so neither are those behind it, unless the cache has it: pass a multiple of `chunk_tokens`.
            turns: Ends of turns in tokens: where sliding-window and recurrent state is kept besides.

        Raises:
            LayoutError: The view is too small for the prompt or no view, or these aren't token ids.
            ConfigError: There is no such tier.
            UsageError: An argument isn't what it must be, such as a negative number.
            ClosedError: The node has been closed.
        """
        return self._stored(operations.run(self._store(prompt, view, placement, first_token, turns)))

    def prefetch(
        self,
        prompt: Prompt | Tokens,
        *,
        source: str | Sequence[str] | None = None,
        destination: str = "cpu",
        timeout: float | None = None,
    ) -> int:
        """Bring what can be restored of a prompt to the tier `destination`. Returns the tokens that are there; with
        `timeout` (seconds) 0 if that takes longer, and it goes on."""
        limit = seconds(timeout)
        pages = self._prefetch(prompt, source, destination)
        try:
            return pages.result(limit) * self.page_tokens
        except TimeoutError:
            return 0
        except CancelledError as error:
            raise ClosedError("the node was closed during a prefetch") from error

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all writes have ended. Returns whether that came within `timeout` seconds.

        Raises:
            UsageError: `timeout` is no number, or a negative one.
        """
        return self.client.flush(seconds(timeout))

    def close(self) -> None:
        """Close the node, if this cache opened it. What is queued is written first. Idempotent."""
        self.client.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncCache(_Base):
    """Prefix cache for one model, for coroutines. See `Cache` for arguments and errors."""

    @classmethod
    async def open(cls, config: Any, namespace: Namespace) -> AsyncCache:
        """See `Cache.open`."""
        client, salt = await asyncio.to_thread(open_node, config)
        try:
            return cls(client, namespace, salt=salt)
        except BaseException:  # whatever went wrong, the node must not stay behind
            await asyncio.to_thread(client.close)
            raise

    async def lookup(
        self, prompt: Prompt | Tokens, *, source: str | Sequence[str] | None = None, wait: float = 0.0
    ) -> Lookup:
        """See `Cache.lookup`; waits up to `wait` seconds for tiers that cannot tell at once."""
        deadline = asyncio.get_running_loop().time() + (seconds(wait, "wait") or 0.0)
        while True:
            found = self._lookup(prompt, source)
            left = deadline - asyncio.get_running_loop().time()
            if not found.pending or left <= 0:
                return found
            await asyncio.sleep(min(0.002, left))

    async def retrieve(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        *,
        first_token: int = 0,
        max_tokens: int | None = None,
        source: str | Sequence[str] | None = None,
        wait: float | None = None,
    ) -> Retrieved:
        """See `Cache.retrieve`; `wait` is its `timeout`."""
        return self._retrieved(
            await operations.arun(self._retrieve(prompt, view, first_token, max_tokens, source, wait, "wait"))
        )

    async def store(
        self,
        prompt: Prompt | Tokens,
        view: KVView,
        *,
        placement: str | Sequence[str] | None = None,
        first_token: int = 0,
        turns: Sequence[int] = (),
    ) -> StoreResult:
        """See `Cache.store`."""
        return self._stored(await operations.arun(self._store(prompt, view, placement, first_token, turns)))

    async def prefetch(
        self, prompt: Prompt | Tokens, *, source: str | Sequence[str] | None = None, destination: str = "cpu"
    ) -> int:
        """See `Cache.prefetch`."""
        pages = self._prefetch(prompt, source, destination)
        return await asyncio.wrap_future(pages) * self.page_tokens

    async def flush(self) -> bool:
        """See `Cache.flush`."""
        return await asyncio.to_thread(self.client.flush)

    async def close(self) -> None:
        """See `Cache.close`."""
        await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def open_node(config: Any) -> tuple[Client, str]:
    """The client that a configuration asks for, and the salt in it. See `Cache.open`."""
    from lmcache_core.assembly import build_client

    return build_client(config)
