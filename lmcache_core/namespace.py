"""What KV means and how its bytes lie, as digests: chunks of two namespaces never meet.

`content` says what the numbers mean, `encoding` how the bytes lie. A chunk is stored under the `space` of its group:
both of them, and the group's own geometry. Nothing that changes between two starts of an engine (pointers, offsets,
the number of blocks, the order of groups) is part of either. A field that is added here later changes all digests:
better that old chunks are not found than that they are taken for something they are not.
"""

from __future__ import annotations

import enum
import math
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec

from lmcache_core.arguments import kind, shown
from lmcache_core.errors import LayoutError
from lmcache_core.keys import digest_fields

__all__ = ["Encoding", "Group", "GroupKind", "Namespace", "chunk_tokens_for", "new_epoch", "page_tokens_for"]

_MAX_MANIFEST = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_ITEM_BYTES = {
    **dict.fromkeys(["float64", "int64"], 8),
    **dict.fromkeys(["float32", "int32"], 4),
    **dict.fromkeys(["float16", "bfloat16", "int16"], 2),
    **dict.fromkeys(["int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"], 1),
}


class GroupKind(enum.Enum):
    """How much of a prompt's past a layer needs, and so where a prompt can be taken up again."""

    FULL = "full"
    """All pages in front."""
    WINDOW = "window"
    """The pages that cover the last `window_tokens` tokens."""
    STATE = "state"
    """A snapshot taken exactly there. Its "page" is the snapshot."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a model that share one kind of cache.

    Raises:
        LayoutError: On construction, when a field is not what its text says.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    """Indices in the model of the layers held, one or more, in the order in which a page holds them."""
    page_layer_bytes: int
    """Bytes of one page of one layer in one shard."""
    dtype: str
    """Logical type of the numbers, such as `bfloat16` or `float8_e4m3fn`; not the `uint8` an engine keeps fp8 in."""
    kv_heads: int
    """KV heads of a layer in one shard; at least 1, or 0 for a state that has none."""
    head_size: int
    """Numbers of one head and token; at least 1, or 0 for a state that has none."""
    planes: int = 2
    """2 where K and V are kept, 1 for a latent (MLA) or a state, and where heads of K and of V differ in size: then
    `head_size` is the sum of both."""
    window_tokens: int | None = None
    """Tokens a window looks back. Of a window, and of nothing else."""
    name: str = ""
    """For people; not part of the identity."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GroupKind):
            raise LayoutError(f"kind must be a GroupKind, not {shown(self.kind)}")
        _check_ints(self, "page_layer_bytes", "planes")
        _check_ints(self, "kv_heads", "head_size", least=0 if self.kind is GroupKind.STATE else 1)
        _check_texts(self, "dtype")
        _check_texts(self, "name", empty=True)
        if not _is_ints(self.layers) or not self.layers or len(set(self.layers)) < len(self.layers):
            raise LayoutError(f"layers must be a tuple of one or more different indices, not {shown(self.layers)}")
        if self.kind is GroupKind.WINDOW:
            _check_ints(self, "window_tokens")
        elif self.window_tokens is not None:
            raise LayoutError(f"a {self.kind.value} group has no window_tokens, not {shown(self.window_tokens)}")
        if self.planes > 2:
            raise LayoutError(f"planes must be 1 (a latent, a state) or 2 (K and V), not {self.planes}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all layers in one shard."""
        return self.page_layer_bytes * len(self.layers)

    def numbers_bytes(self, page_tokens: int) -> int | None:
        """Bytes of the numbers in a page of one layer; None where they don't follow from the fields: of a state, and of
        a `dtype` whose size isn't known here."""
        item = _ITEM_BYTES.get(self.dtype)
        if item is None or self.kind is GroupKind.STATE:
            return None
        return self.planes * page_tokens * self.kv_heads * self.head_size * item

    def digest(self) -> bytes:
        """SHA-256 of everything but the name, 32 bytes."""
        fields = {**msgspec.structs.asdict(self), "kind": self.kind.value}
        del fields["name"]
        return digest_fields("lmcache-core group 1", fields)


class Encoding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the bytes of a page and layer lie.

    `canonical` is `[K, V][token][kv_head][head_size]`, for KV that engines share: it has a version and nothing else.
    `native` is an engine's own bytes: the engine, its attention backend, the tokens of a block, the strides inside a
    block in bytes, and the CPU's instruction set where the content of blocks depends on it. `RegisteredKV.encoding`
    fills it in. Whoever writes the strides by hand gives one for each axis inside a block, in an order of axes that is
    the same for all layouts of that engine: without them KV of one order of heads and tokens is taken for another.

    Raises:
        LayoutError: On construction, when a canonical encoding names an engine, or a native one lacks its engine, its
            block or its strides.
    """

    layout: Literal["native", "canonical"]
    version: int = 1
    engine: str = ""
    backend: str = ""
    block_tokens: int = 0
    strides: tuple[int, ...] = ()
    isa: str = ""

    def __post_init__(self) -> None:
        _check_ints(self, "version")
        _check_texts(self, "engine", "backend", "isa", empty=True)
        if not _is_ints(self.strides, negative=True):
            raise LayoutError(f"strides must be a tuple of ints, not {shown(self.strides)}")
        _check_ints(self, "block_tokens", least=0)
        if not isinstance(self.layout, str):
            raise LayoutError(f"layout must be native or canonical, not {shown(self.layout)}")
        if self.layout == "native":
            _check_texts(self, "engine")
            _check_ints(self, "block_tokens")
            if not self.strides:
                raise LayoutError(
                    "a native encoding needs the strides inside a block: use registered.encoding(engine), or give them "
                    "in bytes, one for each axis; opaque blocks have one axis, (itemsize,)"
                )
        elif self.layout != "canonical":
            raise LayoutError(f"layout must be native or canonical, not {shown(self.layout)}")
        elif (self.engine, self.backend, self.block_tokens, self.strides, self.isa) != ("", "", 0, (), ""):
            raise LayoutError(f"the canonical encoding has a version and no traits of an engine, not {self!r}")


class Namespace(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """Everything two stores must agree on to share KV.

    Raises:
        LayoutError: On construction, when a field is not what its text says, or two groups can't be told apart.
    """

    weights: str
    """Digest of the weights as text (hex), not empty."""
    groups: tuple[Group, ...]
    """One or more, of different geometry. Their order is how callers number them and is not part of the identity."""
    page_tokens: int
    """Tokens of a page; a multiple of the engine's block where the encoding is native."""
    encoding: Encoding
    shards: int = 1
    """Shards of a chunk: the ranks of this host that hold different KV."""
    heads: tuple[int, int] | None = None
    """KV heads of the model that the shards hold together, as (first, one past the last). None: all."""
    config: str = ""
    """Digest of what else changes the numbers, RoPE scaling for one, as text."""
    weights_epoch: int = 0
    """0 at start; `new_epoch()` after the engine has reset its cache or changed its weights in place. Below 2**63."""
    model_name: str = ""
    """For people; not part of the identity, because hosts call one checkpoint by different names."""

    def __post_init__(self) -> None:
        _check_ints(self, "page_tokens", "shards")
        _check_ints(self, "weights_epoch", least=0)
        _check_texts(self, "weights")
        _check_texts(self, "config", "model_name", empty=True)
        if not isinstance(self.groups, tuple) or not self.groups or not all(isinstance(g, Group) for g in self.groups):
            raise LayoutError(f"groups must be a tuple of one or more groups, not {shown(self.groups)}")
        if not isinstance(self.encoding, Encoding):
            raise LayoutError(f"encoding must be an Encoding, not {shown(self.encoding)}")
        heads = (0, 1) if self.heads is None else self.heads
        if not _is_ints(heads) or len(heads) != 2 or heads[0] >= heads[1]:
            raise LayoutError(f"heads must be (first, one past the last) or None, not {shown(self.heads)}")
        if self.weights_epoch >= 1 << 63:
            raise LayoutError(f"weights_epoch must be below 2**63, not {self.weights_epoch}")
        if len({group.digest() for group in self.groups}) < len(self.groups):
            raise LayoutError("two groups of one geometry would share their chunks: make one group of their layers")
        if self.encoding.layout == "native" and self.page_tokens % self.encoding.block_tokens:
            raise LayoutError(f"page_tokens {self.page_tokens} is no multiple of a block, {self.encoding.block_tokens}")
        for group in self.groups:
            self._check_bytes(group)

    def _check_bytes(self, group: Group) -> None:
        """A page holds its numbers; in an engine's own layout there may be more, such as scales or padding."""
        held, needed = group.page_layer_bytes, group.numbers_bytes(self.page_tokens)
        if needed is not None and (held < needed or (held > needed and self.encoding.layout == "canonical")):
            raise LayoutError(
                f"page_layer_bytes {held} of layers {group.layers}: {group.planes} planes x {self.page_tokens} tokens "
                f"x {group.kv_heads} heads x {group.head_size} {group.dtype} are {needed} bytes"
            )

    @cached_property
    def content(self) -> bytes:
        """Digest of what the numbers mean, 32 bytes."""
        fields = msgspec.structs.asdict(self)
        fields["groups"] = tuple(sorted(group.digest() for group in self.groups))
        del fields["encoding"], fields["model_name"]
        return digest_fields("lmcache-core content 1", fields)

    @cached_property
    def encoding_digest(self) -> bytes:
        """Digest of how the bytes lie, 32 bytes."""
        return digest_fields("lmcache-core encoding 1", msgspec.structs.asdict(self.encoding))

    @cached_property
    def _spaces(self) -> tuple[bytes, ...]:
        shared = {"content": self.content, "encoding": self.encoding_digest}
        return tuple(digest_fields("lmcache-core space 1", {**shared, "group": g.digest()}) for g in self.groups)

    def space(self, group_index: int) -> bytes:
        """What the chunks of `groups[group_index]` are stored under: 32 bytes, of `content`, `encoding_digest` and the
        group's geometry, whichever its index is.

        Raises:
            LayoutError: There is no such group.
        """
        if not 0 <= group_index < len(self.groups):
            raise LayoutError(f"there are groups 0 to {len(self.groups) - 1}, no group {group_index}")
        return self._spaces[group_index]

    @property
    def local_only(self) -> bool:
        """Whether chunks must stay on this host, because no other can tell which weights this epoch means."""
        return self.weights_epoch != 0

    def with_epoch(self, epoch: int) -> Namespace:
        """The same with another `weights_epoch`, and with it other digests and spaces.

        Raises:
            LayoutError: `epoch` is not in [0, 2**63).
        """
        return Namespace(**{**msgspec.structs.asdict(self), "weights_epoch": epoch})

    def manifest(self) -> bytes:
        """Everything above, names and digests included, as UTF-8 JSON for people who look at a store."""
        return msgspec.json.format(msgspec.json.encode(_Manifest.of(self)), indent=2)

    @staticmethod
    def from_manifest(manifest: bytes) -> Namespace:
        """The namespace that `manifest` was made of. All digests are derived anew.

        Raises:
            LayoutError: It is no manifest, one of another version, or its digests are not those of its content.
        """
        if not isinstance(manifest, bytes | bytearray | str):
            raise LayoutError(f"a manifest is UTF-8 JSON, not {kind(manifest)}")
        if len(manifest) > _MAX_MANIFEST:
            raise LayoutError(f"a manifest has at most {_MAX_MANIFEST} bytes, not {len(manifest)}")
        try:
            read = msgspec.json.decode(manifest, type=_Manifest)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise LayoutError(f"not a manifest of a namespace: {error}") from error
        if read != _Manifest.of(read.namespace):
            raise LayoutError("the digests of this manifest are not those of the namespace it describes")
        return read.namespace


class _Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Literal["lmcache-core namespace 1"]
    content: str
    encoding_digest: str
    spaces: tuple[str, ...]
    namespace: Namespace

    @classmethod
    def of(cls, namespace: Namespace) -> _Manifest:
        return cls(
            format="lmcache-core namespace 1",
            content=namespace.content.hex(),
            encoding_digest=namespace.encoding_digest.hex(),
            spaces=tuple(namespace.space(index).hex() for index in range(len(namespace.groups))),
            namespace=namespace,
        )


def new_epoch() -> int:
    """A random `weights_epoch` that no other process has: 1 to 2**63 - 1."""
    return 1 + secrets.randbelow((1 << 63) - 1)


def page_tokens_for(block_sizes: Iterable[int], wanted: int = 64) -> int:
    """Tokens of a page for an engine with blocks of these sizes: the least multiple of all that is at least `wanted`.

    Raises:
        LayoutError: A size is below 1.
    """
    sizes = tuple(block_sizes)
    if wanted < 1 or any(size < 1 for size in sizes):
        raise LayoutError(f"pages and blocks have 1 token or more, not {wanted} and {sizes}")
    return chunk_tokens_for(math.lcm(*sizes), wanted)


def chunk_tokens_for(page_tokens: int, wanted: int = 256) -> int:
    """Tokens of a chunk: the least multiple of `page_tokens` that is at least `wanted`.

    Raises:
        LayoutError: A size is below 1.
    """
    if wanted < 1 or page_tokens < 1:
        raise LayoutError(f"chunks and pages have 1 token or more, not {wanted} and {page_tokens}")
    return -(-wanted // page_tokens) * page_tokens


def _check_ints(owner: msgspec.Struct, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < least:
            raise LayoutError(f"{name} must be an int of at least {least}, not {shown(value)}")


def _check_texts(owner: msgspec.Struct, *names: str, empty: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, str) or not (value or empty) or _SURROGATE.search(value):
            raise LayoutError(f"{name} must be UTF-8 text, not {shown(value)}; bytes of a digest go in as .hex()")


def _is_ints(values: object, negative: bool = False) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and (negative or value >= 0) for value in values)
