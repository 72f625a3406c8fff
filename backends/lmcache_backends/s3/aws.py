"""The client for S3 Express: aiobotocore, which knows its sessions and its endpoints.

Its event loop is Python's, so it moves half of what `rust` does. It would repeat requests itself; that is switched off,
since `retries` has a budget.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError, ProxyConnectionError, SSLError
from botocore.session import Session

from lmcache_backends.objects.client import DIGEST, Head, Page, Part
from lmcache_backends.objects.faults import Fault, fault_of_text
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3.errors import ABSENT
from lmcache_backends.s3.identity import Identity, keep_quiet
from lmcache_backends.s3.options import S3Options
from lmcache_backends.s3.target import Target
from lmcache_core.iothreads import IoThreads
from lmcache_core.protocols import ReadResult

__all__ = ["AwsClient", "make", "prepare"]

_OUT_OF_RANGE = 416
_GONE, _DIFFERENT = 404, 412


class _Named(AioCredentials):  # type: ignore[misc]
    """The identity, as a session of aiobotocore asks for it: keys are looked up anew for each signature."""

    def __init__(self, identity: Identity) -> None:
        super().__init__("none", "none", method="lmcache-core")
        self._identity = identity

    async def load_credentials(self) -> AioCredentials:
        """As a session asks where credentials come from."""
        return self

    async def get_frozen_credentials(self) -> Any:
        access_key, secret_key, token, _ = await self._identity.keys()
        return await AioCredentials(access_key, secret_key, token).get_frozen_credentials()


class Making(NamedTuple):
    """What makes clients."""

    session: Any
    arguments: dict[str, Any]
    config: dict[str, Any]


@functools.cache
def _models() -> Any:
    """What botocore knows of S3, read from its files for all that comes later: a client that nobody uses reads them."""
    session = Session()
    session.set_credentials("none", "none")
    session.create_client("s3", region_name="us-east-1").close()
    return session.get_component("data_loader")


def prepare(options: S3Options, target: Target, identity: Identity) -> Making:
    """On a thread, since it reads files."""
    keep_quiet()
    arguments: dict[str, Any] = {
        "region_name": target.region,
        "endpoint_url": target.endpoint if target.own else None,
        "verify": os.path.expanduser(options.ca_file) or options.verify,
    }
    config: dict[str, Any] = {
        "connect_timeout": options.connect_timeout,
        "read_timeout": options.stall_timeout,
        "max_pool_connections": options.connections,
        "parameter_validation": False,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": "virtual" if target.virtual else "path", "payload_signing_enabled": False},
    }
    session = AioSession()
    session.register_component("data_loader", _models())
    session.register_component("credential_provider", _Named(identity))
    _ = session.full_config
    return Making(session, arguments, config)


async def make(options: S3Options, target: Target, making: Making, threads: IoThreads, tally: Tally) -> AwsClient:
    """A client for the running event loop."""
    context = making.session.create_client("s3", config=AioConfig(**making.config), **making.arguments)
    return AwsClient(options, target.bucket, context, await context.__aenter__(), threads, tally)


class AwsClient:
    """One bucket."""

    def __init__(
        self, options: S3Options, bucket: str, context: Any, client: Any, threads: IoThreads, tally: Tally
    ) -> None:
        self._bucket = bucket
        self._context = context
        self._client = client
        self._threads = threads
        self._tally = tally
        self._timeout = options.request_timeout
        self._crc = options.checksum == "crc"
        self._put: dict[str, Any] = {"ContentType": "application/octet-stream"}
        if options.storage_class:
            self._put["StorageClass"] = options.storage_class
        if options.encryption != "bucket":
            self._put["ServerSideEncryption"] = options.encryption
        if options.kms_key:
            self._put["SSEKMSKeyId"] = options.kms_key

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)

    async def get(self, name: str, into: memoryview, first: int, total: int, *, exact: bool = True) -> Part:
        self._tally.add("requests_get")
        part = {"Range": f"bytes={first}-{first + into.nbytes - 1}"} if into.nbytes < total else {}
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    answer = await self._client.get_object(Bucket=self._bucket, Key=name, **part)
                except ClientError as error:
                    if _status(error) == _OUT_OF_RANGE:
                        return Part(ReadResult.CORRUPT)
                    _absent(error)
                    return Part(ReadResult.MISS)
                async with answer["Body"] as body:
                    size = _size(answer, ranged=bool(part))
                    into = into[: max(0, size - first)]
                    fits = size == total if exact else first < size <= total
                    if not fits or answer["ContentLength"] != into.nbytes:
                        body.close()
                        return Part(ReadResult.CORRUPT)
                    await _land(body, into)
        self._tally.add("bytes_received", into.nbytes)
        return Part(ReadResult.HIT, answer.get("ETag", ""), size)

    async def probe(self, name: str) -> None:
        self._tally.add("requests_get")
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    answer = await self._client.get_object(Bucket=self._bucket, Key=name)
                except ClientError as error:
                    if error.response.get("Error", {}).get("Code") != ABSENT:
                        raise
                    return
                answer["Body"].close()
        raise Fault("", 200)

    async def fetch(self, name: str, most: int) -> bytes | None:
        self._tally.add("requests_get")
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    answer = await self._client.get_object(Bucket=self._bucket, Key=name)
                except ClientError as error:
                    _absent(error)
                    return None
                async with answer["Body"] as body:
                    if answer["ContentLength"] > most:
                        body.close()
                        return None
                    return bytes(await body.read())

    async def head(self, name: str) -> Head | None:
        self._tally.add("requests_head")
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    answer = await self._client.head_object(Bucket=self._bucket, Key=name)
                except ClientError as error:
                    _absent(error)
                    return None
        return Head(answer["ContentLength"], answer.get("Metadata", {}))

    async def put(self, name: str, data: memoryview, digest: str, *, create: bool) -> bool:
        self._tally.add("requests_put")
        # A copy: what is sent goes on being sent for a while when this is cancelled.
        body, checksum = await self._threads.finish(_copied, data, crc=self._crc)
        more: dict[str, Any] = {"ChecksumCRC32": checksum} if self._crc else {}
        if digest:
            more["Metadata"] = {DIGEST: digest}
        if create:
            more["IfNoneMatch"] = "*"
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    await self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **self._put, **more)
                except ClientError as error:
                    if create and _status(error) == _DIFFERENT:
                        return False
                    raise
        self._tally.add("bytes_sent", data.nbytes)
        return True

    async def delete(self, names: Sequence[str]) -> None:
        self._tally.add("requests_delete")
        with _faults():
            async with asyncio.timeout(self._timeout):
                answer = await self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
                )
        for problem in answer.get("Errors", ()):
            if problem.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                raise Fault(str(problem.get("Code", "InternalError")), 200)

    async def delete_one(self, name: str) -> None:
        self._tally.add("requests_delete")
        with _faults():
            async with asyncio.timeout(self._timeout):
                try:
                    await self._client.delete_object(Bucket=self._bucket, Key=name)
                except ClientError as error:
                    _absent(error)

    async def page(self, prefix: str, more: str = "", most: int = 1000) -> Page:
        self._tally.add("requests_list")
        behind = {"ContinuationToken": more} if more else {}
        with _faults():
            async with asyncio.timeout(self._timeout):
                answer = await self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=most, **behind)
        objects = [(entry["Key"], int(entry["Size"])) for entry in answer.get("Contents", ())]
        return Page(objects, str(answer.get("NextContinuationToken", "")) if answer.get("IsTruncated") else "")


def _size(answer: Any, *, ranged: bool) -> int:
    """Bytes of the object that an answer brings a part of; -1 if it doesn't tell."""
    if not ranged:
        return int(answer["ContentLength"])
    of_all = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(of_all) if of_all.isdecimal() else -1


async def _land(body: Any, into: memoryview) -> None:
    stream, done = body.content, 0
    while piece := await stream.readany():
        if done + len(piece) > into.nbytes:
            raise Fault("the server sends more than it said")
        into[done : done + len(piece)] = piece
        done += len(piece)
    if done != into.nbytes:
        raise Fault("the connection ended early")


def _copied(data: memoryview, *, crc: bool) -> tuple[bytes, str]:
    checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode() if crc else ""
    return bytes(data), checksum


@contextmanager
def _faults() -> Iterator[None]:
    """What the libraries raise, as `Fault`."""
    try:
        yield
    except ClientError as error:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        told = error.response.get("Error", {})
        region = str(told.get("Region") or headers.get("x-amz-bucket-region") or "")
        code = str(told.get("Code", ""))
        raise Fault("" if code.isdecimal() else code, _status(error), region) from None
    except TimeoutError:
        raise Fault("no answer in time") from None
    except (SSLError, ProxyConnectionError) as error:
        raise Fault(fault_of_text(str(error)).code, passing=False) from None
    except (BotoCoreError, aiohttp.ClientError, OSError) as error:
        raise fault_of_text(f"{type(error).__name__}: {error}") from None


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _absent(error: ClientError) -> None:
    """Pass over an object that is not there."""
    if _status(error) != _GONE or error.response.get("Error", {}).get("Code") == "NoSuchBucket":
        raise error
