"""The client that moves bytes: obstore, whose event loop is in Rust and needs no GIL to receive.

It says what went wrong in text only; `errors` reads it. Its retries are switched off, since `retries` has a budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from lmcache_backends.objects.client import DIGEST, Head, Page, Part
from lmcache_backends.objects.faults import Dialect, Fault, fault_of_text
from lmcache_backends.objects.options import ObjectOptions
from lmcache_backends.objects.tally import Tally
from lmcache_core.protocols import ReadResult

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

__all__ = ["RustClient", "link", "no_retries"]

Store: TypeAlias = "AzureStore | GCSStore | S3Store"

_BINARY = "application/octet-stream"
_SHOWN = {"Content-Type": _BINARY}
_OUT_OF_RANGE = 416
_ENDS_SOON = 0.001


def link(options: ObjectOptions, url: str, ca: str | None) -> dict[str, Any]:
    """How a store reaches a server."""
    how: dict[str, Any] = {
        "allow_http": url.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "read_timeout": timedelta(seconds=options.stall_timeout),
        "timeout": timedelta(seconds=options.request_timeout),
        "pool_max_idle_per_host": str(options.connections),
        "user_agent": "lmcache-core",
    }
    if not options.verify:
        how["allow_invalid_certificates"] = True
    if ca is not None:
        how["root_certificate"] = ca
    return how


def no_retries(options: ObjectOptions) -> dict[str, Any]:
    """Retries of a store: none."""
    return {"max_retries": 0, "retry_timeout": timedelta(seconds=options.request_timeout)}


class RustClient:
    """One bucket."""

    def __init__(
        self, store: Store, single: Store, dialect: Dialect, tally: Tally, attributes: dict[str, str] | None = None
    ) -> None:
        """`single` is the same store, with requests that delete one object; `attributes` are of all new objects."""
        self._store = store
        self._single = single
        self._dialect = dialect
        self._attributes = _SHOWN | (attributes or {})
        self._tally = tally

    async def close(self) -> None:
        """Nothing is under way any more; connections close as they are forgotten."""

    async def get(self, name: str, into: memoryview, first: int, total: int, *, exact: bool = True) -> Part:
        self._tally.add("requests_get")
        part = {"range": (first, first + into.nbytes)} if into.nbytes < total else {}
        try:
            found = await obstore.get_async(self._store, name, options=part)  # type: ignore[arg-type]
            size = found.meta["size"]
            if size != total if exact else not first < size <= total:
                return Part(ReadResult.CORRUPT)
            body = memoryview(await found.bytes_async())
        except FileNotFoundError as error:
            self._check_place(str(error))
            return Part(ReadResult.MISS)
        except (BaseError, ValueError) as error:
            fault = fault_of_text(str(error))
            if fault.status == _OUT_OF_RANGE:
                return Part(ReadResult.CORRUPT)
            raise fault from None
        if body.nbytes != min(into.nbytes, size - first):
            raise Fault("the connection ended early")
        into[: body.nbytes] = body
        self._tally.add("bytes_received", body.nbytes)
        return Part(ReadResult.HIT, found.meta["e_tag"] or found.meta["version"] or "", size)

    async def probe(self, name: str) -> None:
        self._tally.add("requests_get")
        try:
            await obstore.get_async(self._store, name)
        except FileNotFoundError as error:
            fault = fault_of_text(str(error))
            if fault.code != self._dialect.absent:
                raise fault from None
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None
        else:
            raise Fault("", 200)

    async def fetch(self, name: str, most: int) -> bytes | None:
        self._tally.add("requests_get")
        try:
            found = await obstore.get_async(self._store, name)
            return bytes(await found.bytes_async()) if found.meta["size"] <= most else None
        except FileNotFoundError as error:
            self._check_place(str(error))
            return None
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None

    async def head(self, name: str) -> Head | None:
        self._tally.add("requests_head")
        try:
            found = await obstore.get_async(self._store, name, options={"head": True})
        except FileNotFoundError:
            return None
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None
        return Head(found.meta["size"], found.attributes)

    async def put(self, name: str, data: memoryview, digest: str, *, create: bool) -> bool:
        self._tally.add("requests_put")
        attributes = self._attributes | ({DIGEST: digest} if digest else {})
        lent = memoryview(data)  # one of this request's own, which tells whether it is in use
        try:
            await obstore.put_async(
                self._store,
                name,
                lent,
                attributes=attributes,
                mode="create" if create else "overwrite",
                use_multipart=False,
            )
        except AlreadyExistsError:
            return False
        except FileNotFoundError as error:
            raise fault_of_text(str(error)) from None
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None
        finally:
            await _returned(lent)
        self._tally.add("bytes_sent", data.nbytes)
        return True

    async def delete(self, names: Sequence[str]) -> None:
        await self._delete(self._store, list(names))

    async def delete_one(self, name: str) -> None:
        await self._delete(self._single, [name])

    async def _delete(self, store: Store, names: list[str]) -> None:
        self._tally.add("requests_delete")
        try:
            await obstore.delete_async(store, names)
        except FileNotFoundError as error:
            self._check_place(str(error))
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None

    def _check_place(self, text: str) -> None:
        """Tell a bucket that is gone from an object that is."""
        fault = fault_of_text(text)
        if fault.code == self._dialect.gone:
            raise fault

    async def page(self, prefix: str, more: str = "", most: int = 1000) -> Page:
        self._tally.add("requests_list")
        try:
            async for batch in obstore.list(self._store, prefix, offset=more or None, chunk_size=most):
                objects = [(entry["path"], entry["size"]) for entry in batch]
                return Page(objects, objects[-1][0] if len(objects) == most else "")
        except (BaseError, FileNotFoundError, ValueError) as error:
            raise fault_of_text(str(error)) from None
        return Page([], "")


async def _returned(view: memoryview) -> None:
    """Wait until Rust reads no memory of ours any more, even when cancelled meanwhile. A request that was cancelled
    ends on a thread of Rust's, some milliseconds later, and tells nobody."""
    cancelled: asyncio.CancelledError | None = None
    while not _released(view):
        try:
            await asyncio.sleep(_ENDS_SOON)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _released(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True
