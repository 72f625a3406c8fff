"""Names of pages: what a prefix of tokens is called, in every process and on every host.

    key_0 = seed
    key_i = sha256(key_{i-1} || tokens of page i as uint32 little-endian || extra_i)

A page's key stands for all tokens up to its end. The seed is empty for a plain prompt (the first page then hashes no
prefix, which makes this SGLang's own page chain) and 32 bytes where a salt or an adapter sets prompts apart. `extra_i`
is empty unless an image or another item lies in the page.

Two different inputs never hash one message. Within one page size a message is 0 or 32 bytes of prefix, the tokens, and
extras of a multiple of 64 bytes, so its length alone tells where each part ends. The message of a seed is of odd
length, which no page's is.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from lmcache_core.arguments import kind, shown
from lmcache_core.errors import LayoutError

__all__ = ["Field", "PageHasher", "SupportsArray", "Tokens", "digest_fields", "make_seed", "page_extras", "page_keys"]

_TOKEN_BYTES = 4
_EXTRA_BYTES = 64
_LONGEST_ITEM = 2**24
# Copying an empty state is a fifth faster than `hashlib.sha256()`, which looks its algorithm up in OpenSSL every time.
_new_state = hashlib.sha256().copy


class SupportsArray(Protocol):
    """A numpy array, a torch tensor in host memory, or anything else numpy can view as an array."""

    def __array__(self) -> Any: ...


Tokens: TypeAlias = "Sequence[int] | array[int] | bytes | bytearray | memoryview | SupportsArray"
"""Token ids, 1-D: ints in [0, 2**32), integer arrays of any width, or bytes that are uint32 little-endian already."""

Field: TypeAlias = "str | bytes | int | tuple[Field, ...] | None"


class PageHasher:
    """Page keys of one prompt that grows: only pages that are new are hashed.

    The seed is empty, one of `make_seed`, or the key of the page in front of the first token.

    Raises:
        LayoutError: `page_tokens` is below 1, or the seed is not of 0 or 32 bytes.
    """

    __slots__ = ("_extras", "_tail", "keys", "page_tokens", "seed")

    keys: list[bytes]
    """Keys of the whole pages so far, 32 bytes each. The hasher's own list: read it, don't change it."""

    def __init__(self, page_tokens: int, seed: bytes = b"") -> None:
        _check_page(page_tokens)
        if not isinstance(seed, bytes) or len(seed) not in (0, 32):
            raise LayoutError(
                f"a page has 1 token or more, a seed 0 or 32 bytes, as make_seed gives it; not {shown(seed)}"
            )
        self.page_tokens = page_tokens
        self.seed = seed
        self.keys = []
        self._tail = b""
        self._extras: dict[int, bytes] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens seen, those of the partial last page included."""
        return len(self.keys) * self.page_tokens + len(self._tail) // _TOKEN_BYTES

    def extend(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """Append tokens to the prompt and return the keys of the pages they complete.

        `extras` is what `page_extras` gives, by page index from the start of the prompt. Those of later pages are
        kept until their page is complete; those of a page that was hashed before must be what it was hashed with.

        Raises:
            LayoutError: See `page_keys`; or extras for a hashed page that are not its own. Nothing was appended then.
        """
        new = _token_bytes(tokens)
        known = self._extras
        if extras is not None and not isinstance(extras, Mapping):
            raise LayoutError(f"extras are what page_extras makes, bytes by page, not {kind(extras)}")
        if extras:
            for page, extra in extras.items():
                if type(page) is not int or page < 0 or not isinstance(extra, bytes) or len(extra) % _EXTRA_BYTES:
                    raise LayoutError(f"extras of page {shown(page)}, {shown(extra)}, are not what page_extras makes")
                if page < len(self.keys) and extra != known.get(page, b""):
                    raise LayoutError(f"page {page} is hashed already, with other extras: give them before its tokens")
            known = {**known, **extras}
        data = memoryview(self._tail + new) if self._tail else new
        page_bytes = self.page_tokens * _TOKEN_BYTES
        whole = len(data) // page_bytes * page_bytes
        last = self.keys[-1] if self.keys else self.seed
        keys = _chain(last, data[:whole], page_bytes, known, len(self.keys))
        self._tail = bytes(data[whole:])
        self._extras = known
        self.keys += keys
        return keys


def page_keys(
    tokens: Tokens, page_tokens: int, seed: bytes = b"", extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """Keys of the whole pages of a prompt, 32 bytes each; tokens behind the last whole page don't count.

    Raises:
        LayoutError: Tokens are not 1-D integers in [0, 2**32), or bytes that are no multiple of 4; `page_tokens` is
            below 1 or no int; the seed is not of 0 or 32 bytes; extras don't come from `page_extras`.
    """
    return PageHasher(page_tokens, seed).extend(tokens, extras)


def make_seed(
    *,
    salt: str | bytes | None = None,
    adapter: str | None = None,
    extra: Mapping[str, str | bytes] = MappingProxyType({}),
) -> bytes:
    """Seed of the prompts that share a tenant's salt, a LoRA adapter, and whatever else `extra` names.

    Empty when nothing is set, else 32 bytes. An empty salt, adapter or value is a setting too, and differs from None.
    Text stands for its UTF-8 bytes: a salt `"a"` and a salt `b"a"` are one salt.

    Raises:
        LayoutError: A value is neither text nor bytes.
    """
    if not isinstance(extra, Mapping):
        raise LayoutError(f"extra settings of a seed are text or bytes by name, not {kind(extra)}")
    fields: dict[str, Field] = {f"extra {name}": _utf8(value) for name, value in extra.items()}
    if salt is not None:
        fields["salt"] = _utf8(salt)
    if adapter is not None:
        fields["adapter"] = _utf8(adapter)
    return digest_fields("lmcache-core seed 1", fields) if fields else b""


def page_extras(spans: Iterable[tuple[int, int, str | bytes]], page_tokens: int) -> dict[int, bytes]:
    """What images, audio and the like add to the keys of the pages they lie in.

    `spans` are `(first token, number of tokens, content hash)` from the start of the prompt, in any order. A page's
    extras say for each of its items where it starts relative to the page, how long it is and what it holds, so the
    same image at another place, or two images that changed places, make another key.

    Raises:
        LayoutError: A span is empty, starts below 0, is longer than any prompt or has no content hash; `page_tokens` is
            below 1 or no int.
    """
    _check_page(page_tokens)
    items: dict[int, list[tuple[int, int, bytes]]] = {}
    for start, length, content in _spans(spans):
        for page in range(start // page_tokens, (start + length - 1) // page_tokens + 1):
            items.setdefault(page, []).append((start - page * page_tokens, length, _utf8(content)))
    extras = {}
    for page, found in items.items():
        extra = struct.pack("<Q", len(found))
        for offset, length, content in sorted(found):
            extra += struct.pack("<qQQ", offset, length, len(content)) + content
        extras[page] = extra + bytes(-len(extra) % _EXTRA_BYTES)
    return extras


def _spans(spans: Iterable[Any]) -> list[tuple[int, int, str | bytes]]:
    try:
        given = [(operator.index(start), operator.index(length), content) for start, length, content in spans]
    except Exception as error:  # whatever keeps an object of the caller's from being read
        raise LayoutError(
            f"spans are a list of (first token, number of tokens, content hash), not {shown(spans)}: {error}"
        ) from error
    for start, length, content in given:
        if not 0 <= start < 1 << 62 or not 1 <= length <= _LONGEST_ITEM or not _utf8(content, "a content hash"):
            raise LayoutError(
                f"an item needs a start >= 0, a length from 1 to {_LONGEST_ITEM} and a content hash, not "
                f"{shown((start, length))}"
            )
    return given


def _check_page(page_tokens: object) -> None:
    if type(page_tokens) is not int or not 1 <= page_tokens < 1 << 32:
        raise LayoutError(
            f"a page has 1 token or more, a seed 0 or 32 bytes; page_tokens is an int, not {shown(page_tokens)}"
        )


def digest_fields(domain: str, fields: Mapping[str, Field]) -> bytes:
    """SHA-256 of named values, the same everywhere. No two sets of fields hash one message, because each name and value
    carries its type and length. The order of the fields doesn't count.

    Raises:
        LayoutError: A value is not text, bytes, an int, None or a tuple of these.
    """
    message = _encode((domain, *(part for field in sorted(fields.items()) for part in field)))
    return hashlib.sha256(message + bytes(1 + len(message) % 2)).digest()


def _encode(value: Field) -> bytes:
    if isinstance(value, (str, bytes)):
        tag, body = b"s" if isinstance(value, str) else b"b", _utf8(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        tag, body = b"i", b"%d" % value
    elif value is None:
        tag, body = b"n", b""
    elif isinstance(value, tuple):
        tag, body = b"t", b"".join(map(_encode, value))
    else:
        raise LayoutError(f"cannot be part of an identity: {value!r} of type {type(value).__name__}")
    return tag + struct.pack("<Q", len(body)) + body


def _utf8(value: str | bytes, what: str = "a salt or adapter") -> bytes:
    # A lone surrogate comes from an undecodable file name or argument. It is an odd name, and still a name of its own.
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if not isinstance(value, bytes | bytearray | memoryview):
        raise LayoutError(f"{what} is text or bytes, not {kind(value)}")
    try:
        return bytes(value)
    except ValueError as error:  # a memoryview that has been released
        raise LayoutError(f"{what} cannot be read: {error}") from error


def _chain(key: bytes, data: memoryview, page_bytes: int, extras: Mapping[int, bytes], first: int) -> list[bytes]:
    """Keys of the pages in `data`, which are pages `first` and on, behind the page called `key`.

    hashlib releases the GIL around an update of 2 KiB and more, and beside a busy Python thread it takes 5 ms to get
    it back. Pages of up to 500 tokens stay below.
    """
    pages = struct.iter_unpack(f"{page_bytes}s", data)
    if extras:
        pages = ((page + extras.get(index, b""),) for index, (page,) in enumerate(pages, first))
    new_state = _new_state
    keys: list[bytes] = []
    append = keys.append
    for (page,) in pages:
        state = new_state()
        state.update(key + page)
        key = state.digest()
        append(key)
    return keys


def _token_bytes(tokens: Tokens) -> memoryview:
    """`tokens` as uint32 little-endian bytes, without a copy where they are that already."""
    if isinstance(tokens, (bytes, bytearray)):
        tokens = memoryview(tokens)
    if isinstance(tokens, memoryview):
        return _memory_bytes(tokens)
    if isinstance(tokens, array) or hasattr(tokens, "__array__"):
        return _array_bytes(tokens)
    if not isinstance(tokens, (list, tuple)) and isinstance(tokens, (AbstractSet, Mapping)):
        raise LayoutError(f"tokens must be a sequence, which has an order, not {kind(tokens)}; write list(...)")
    try:
        packed = array("I", tokens)
    except OverflowError:
        raise _bad_token(tokens) from None
    except Exception as error:  # noqa: BLE001  TypeError, or whatever keeps an object of the caller's from being read
        raise LayoutError(f"tokens must be a flat sequence of integers, not {kind(tokens)}: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _memory_bytes(tokens: memoryview) -> memoryview:
    try:
        flat = tokens.ndim == 1 and tokens.format in ("B", "b", "c")
    except ValueError as error:  # it has been released
        raise LayoutError(f"tokens cannot be read: {error}") from error
    if not flat:
        return _array_bytes(tokens)
    if len(tokens) % _TOKEN_BYTES:
        raise LayoutError(f"bytes of uint32 tokens must be a multiple of {_TOKEN_BYTES}, not {len(tokens)}")
    return tokens if tokens.c_contiguous else memoryview(tokens.tobytes())


def _array_bytes(tokens: array[int] | memoryview | SupportsArray) -> memoryview:
    import numpy as np  # Here, so that who hashes lists does not wait for it.

    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # torch has one for each thing that it can't show
        raise LayoutError(f"tokens must be in host memory, as integers: {error}") from error
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise LayoutError(f"tokens must be a 1-D array of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.dtype.itemsize == 8 and ids.size:
        ids = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("="))
        if ids.view(np.uint64).max() >> 32:  # one pass: a negative id is a huge one
            raise _bad_token(ids.tolist())
    elif ids.dtype.kind == "i" and ids.size and ids.min() < 0:
        raise _bad_token(ids.tolist())
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).data


def _bad_token(tokens: Iterable[int]) -> LayoutError:
    found = next((f"{token} at {place}" for place, token in enumerate(tokens) if not 0 <= token < 2**32), "another")
    return LayoutError(f"token ids must be in [0, 2**32), not {found}")
