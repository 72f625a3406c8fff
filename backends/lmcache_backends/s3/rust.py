"""The client that moves bytes: obstore, whose event loop is in Rust and needs no GIL to receive."""

from __future__ import annotations

from typing import Any

from obstore.store import S3Store

from lmcache_backends.objects.rust import RustClient, link, no_retries
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3.errors import DIALECT
from lmcache_backends.s3.identity import Identity
from lmcache_backends.s3.options import S3Options
from lmcache_backends.s3.target import Target

__all__ = ["make"]

_CHECKSUMS = {"crc": "CRC64NVME", "sha256": "SHA256"}


def make(options: S3Options, target: Target, identity: Identity, tally: Tally, ca: str | None) -> RustClient:
    """A client, made on a thread: it reads the authorities that this host trusts."""

    async def keys() -> dict[str, Any]:
        access_key, secret_key, token, expires = await identity.keys()
        return {"access_key_id": access_key, "secret_access_key": secret_key, "token": token, "expires_at": expires}

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
            client_options=link(options, target.url, ca),  # type: ignore[arg-type]
            retry_config=no_retries(options),  # type: ignore[arg-type]
            credential_provider=keys,  # type: ignore[arg-type]
            **settings,
            **more,
        )

    storage = {"Storage-Class": options.storage_class} if options.storage_class else {}
    return RustClient(store(disable_bulk_delete=False), store(disable_bulk_delete=True), DIALECT, tally, storage)
