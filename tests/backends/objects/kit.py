"""What tests of Azure Blob Storage and Google Cloud Storage share: places on emulators, and objects past the code under
test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore
from obstore.store import AzureStore, GCSStore

from lmcache_backends.azure import AzureBackend, AzureOptions
from lmcache_backends.gcs import GcsBackend, GcsOptions
from lmcache_backends.objects.backend import ObjectBackend
from lmcache_backends.objects.names import Names
from lmcache_core.protocols import ChunkKey
from tests.servers import azure, gcs
from tests.servers.azure import Azurite
from tests.servers.process import Process

KIB, MIB = 2**10, 2**20
PLACE = "kv-tests"


@dataclass(frozen=True)
class Place:
    """A container or bucket on a server, and how its backend is opened."""

    door: str
    server: Process
    url: str
    port: int
    known: dict[str, Any]
    make: Callable[[], None]
    """Makes the place anew, on a server that has kept nothing."""

    def options(self, **changes: Any) -> AzureOptions | GcsOptions:
        """Options with which it can be used."""
        written = self.known | {"endpoint": self.url} | changes
        return AzureOptions(**written) if self.door == "azure" else GcsOptions(**written)

    def backend(self, **changes: Any) -> ObjectBackend:
        """A backend that is not open yet."""
        options = self.options(**changes)
        return AzureBackend(options) if isinstance(options, AzureOptions) else GcsBackend(options)


def azure_place(server: Azurite) -> Place:
    known = {"container": PLACE, "account": azure.ACCOUNT, "access_key": azure.ACCESS_KEY}
    return Place("azure", server, server.url, server.port, known, lambda: server.make_container(PLACE))


def gcs_place(server: gcs.Server) -> Place:
    known = {"bucket": PLACE, "token": gcs.TOKEN}
    return Place("gcs", server, server.url, server.port, known, lambda: server.make_bucket(PLACE))


class Raw:
    """Objects of a prefix, by another client. Blocks."""

    def __init__(self, place: Place, prefix: str) -> None:
        self._names = Names(f"{prefix}/")
        link: Any = {"allow_http": True, "timeout": timedelta(seconds=20)}
        self._store: AzureStore | GCSStore
        if place.door == "azure":
            self._store = AzureStore(
                PLACE,
                account_name=azure.ACCOUNT,
                account_key=azure.ACCESS_KEY,
                endpoint=place.url,
                client_options=link,
            )
        else:
            token: Any = {"token": gcs.TOKEN, "expires_at": None}
            self._store = GCSStore(PLACE, base_url=place.url, credential_provider=lambda: token, client_options=link)

    def read(self, key: ChunkKey) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, self._names.chunk(key)).bytes())
        except FileNotFoundError:
            return None

    def write(self, key: ChunkKey, value: bytes | memoryview) -> None:
        obstore.put(self._store, self._names.chunk(key), value, use_multipart=False)

    def cut(self, key: ChunkKey) -> None:
        """Leave the first half of a value."""
        value = self.read(key)
        assert value is not None
        self.write(key, value[: len(value) // 2])
