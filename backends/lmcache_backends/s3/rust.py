"""The client that moves bytes: obstore, whose event loop is in Rust and needs no GIL to receive.

It says what went wrong in text only; `errors` reads it. Its retries are switched off, since `retries` has a budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from lmcache_backends.s3.client import DIGEST, Head, Part
from lmcache_backends.s3.errors import ABSENT, Fault, fault_of_text
from lmcache_backends.s3.identity import Identity
from lmcache_backends.s3.options import S3Options
from lmcache_backends.s3.tally import Tally
from lmcache_backends.s3.target import Target
from lmcache_core.protocols import ReadResult

__all__ = ["RustClient", "make"]

_CHECKSUMS = {"crc": "CRC64NVME", "sha256": "SHA256"}
_BINARY = "application/octet-stream"
_SHOWN = {"Content-Type": _BINARY}
_OUT_OF_RANGE = 416
_ENDS_SOON = 0.001


def make(options: S3Options, target: Target, identity: Identity, tally: Tally, ca: str | None) -> RustClient:
    """A client, made on a thread: it reads the authorities that this host trusts."""

    async def keys() -> dict[str, Any]:
        access_key, secret_key, token, expires = await identity.keys()
        return {"access_key_id": access_key, "secret_access_key": secret_key, "token": token, "expires_at": expires}

    link: dict[str, Any] = {
        "allow_http": target.url.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "read_timeout": timedelta(seconds=options.stall_timeout),
        "timeout": timedelta(seconds=options.request_timeout),
        "pool_max_idle_per_host": str(options.connections),
        "user_agent": "lmcache-core",
    }
    if not options.verify:
        link["allow_invalid_certificates"] = True
    if ca is not None:
        link["root_certificate"] = ca
    # All that the environment could change is said here: it belongs to other programs.
    settings: dict[str, Any] = {
        "endpoint": target.url,
        "aws_endpoint_url_s3": target.url,
        "region": target.region,
        "virtual_hosted_style_request": target.virtual,
        "skip_signature": False,
        "s3_express": False,
        "unsigned_payload": True,
    }
    if checksum := _CHECKSUMS.get(options.checksum):
        settings["checksum_algorithm"] = checksum
    if options.encryption != "bucket":
        settings["server_side_encryption"] = options.encryption
    if options.kms_key:
        settings["sse_kms_key_id"] = options.kms_key

    def store(**more: Any) -> S3Store:
        return S3Store(
            target.bucket,
            client_options=link,  # type: ignore[arg-type]
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=options.request_timeout)},
            credential_provider=keys,  # type: ignore[arg-type]
            **settings,
            **more,
        )

    storage = {"Storage-Class": options.storage_class} if options.storage_class else {}
    return RustClient(store(disable_bulk_delete=False), store(disable_bulk_delete=True), storage, tally)


class RustClient:
    """One bucket."""

    def __init__(self, store: S3Store, single: S3Store, attributes: dict[str, str], tally: Tally) -> None:
        self._store = store
        self._single = single
        """The same, with requests that delete one object."""
        self._attributes = _SHOWN | attributes
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
            _no_bucket(str(error))
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
        return Part(ReadResult.HIT, found.meta["e_tag"] or "", size)

    async def probe(self, name: str) -> None:
        self._tally.add("requests_get")
        try:
            await obstore.get_async(self._store, name)
        except FileNotFoundError as error:
            fault = fault_of_text(str(error))
            if fault.code != ABSENT:
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
            _no_bucket(str(error))
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

    async def _delete(self, store: S3Store, names: list[str]) -> None:
        self._tally.add("requests_delete")
        try:
            await obstore.delete_async(store, names)
        except FileNotFoundError as error:
            _no_bucket(str(error))
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None

    async def names(self, prefix: str) -> list[str]:
        self._tally.add("requests_list")
        try:
            async for batch in obstore.list(self._store, prefix, chunk_size=1000):
                return [entry["path"] for entry in batch]
        except FileNotFoundError as error:
            _no_bucket(str(error))
        except (BaseError, ValueError) as error:
            raise fault_of_text(str(error)) from None
        return []


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


def _no_bucket(text: str) -> None:
    """Tell a bucket that is gone from an object that is."""
    fault = fault_of_text(text)
    if fault.code == "NoSuchBucket":
        raise fault
