"""What is said when it cannot be opened: one line, with what to change in it."""

from __future__ import annotations

import asyncio
import base64
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import BackendError, ConfigError
from tests.backends.objects.kit import PLACE, Place, azure_place
from tests.servers import azure
from tests.servers.redis import tls_files

DENIED = (
    "access is denied; correct access_key or sas_token, or give who signs in the role Storage Blob Data Contributor"
)
NOBODY = "no credentials can be had now; write access_key or sas_token, or see to what `identity` asks"
UNKNOWN = "the server does not accept who we are; correct credentials or token, or see to the account of this host"


async def refusal(place: Place, **changes: Any) -> tuple[type[Exception], str]:
    """What opening with these options raises."""
    backend = place.backend(**changes)
    with pytest.raises((ConfigError, BackendError)) as caught:
        await backend.open()
    await backend.close()
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "line"),
    [
        ({"access_key": base64.b64encode(b"another").decode()}, ConfigError, DENIED),
        ({"account": "somebody"}, ConfigError, DENIED),
        ({"access_key": "", "sas_token": "sv=2021-08-06&sig=nosecret"}, ConfigError, DENIED),
        ({"access_key": "", "sas_token": azure.shared_access("another")}, ConfigError, DENIED),
        ({"access_key": "", "sas_token": azure.shared_access(PLACE, allows="l")}, ConfigError, DENIED),
        ({"access_key": "", "identity": "azure_cli"}, BackendError, NOBODY),
        ({"access_key": "", "identity": "managed_identity"}, BackendError, NOBODY),
    ],
)
async def test_who_may_not_read_is_told_so(
    azurite: Place, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kind: type[Exception], line: str
) -> None:
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/token")
    monkeypatch.setenv("PATH", "")  # no tools that sign in
    where = f"azure: container {PLACE} at {azurite.url}"
    assert await refusal(azurite, **changes) == (kind, f"{where}: {line}")


async def test_an_identity_that_the_environment_does_not_have(azurite: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_FEDERATED_TOKEN_FILE", raising=False)
    assert await refusal(azurite, access_key="", identity="workload_identity") == (
        ConfigError,
        "azure: identity 'workload_identity' needs variables AZURE_*; set them, or write access_key or sas_token",
    )


async def test_what_the_environment_says_does_not_stand_above_the_options(
    azurite: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "another",
        "AZURE_STORAGE_TOKEN": "nosecret",
        "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=nosecret",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1",
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_SKIP_SIGNATURE": "true",
        "AZURE_CONTAINER_NAME": "another",
    }.items():
        monkeypatch.setenv(name, value)
    backend = azurite.backend()
    await backend.open()
    await backend.close()


async def test_a_token_that_is_wrong_and_credentials_that_are_none(
    google: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"gcs: bucket {PLACE} at {google.url}"
    assert await refusal(google, token="nosecret") == (ConfigError, f"{where}: {UNKNOWN}")
    missing, other = tmp_path / "missing.json", tmp_path / "other.json"
    other.write_text('{"private_key": "nosecret"}')
    assert await refusal(google, token="", credentials=str(missing)) == (
        ConfigError,
        f"gcs: the credentials '{missing}' cannot be read: there is no such file; correct credentials",
    )
    assert await refusal(google, token="", credentials=str(other)) == (
        ConfigError,
        f"gcs: the credentials '{other}' cannot be read: it is not of a kind that is known; correct credentials",
    )
    for name in ("GCE_METADATA_HOST", "METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    assert await refusal(google, token="") == (
        BackendError,
        f"{where}: no credentials can be had now; write credentials, or see to the account of this host",
    )


async def test_a_place_that_is_not_there(place: Place) -> None:
    kind = "container" if place.door == "azure" else "bucket"
    assert await refusal(place, **{kind: "no-such-place"}) == (
        ConfigError,
        f"{place.door}: {kind} no-such-place at {place.url}: there is no such {kind}; create it, or correct {kind}",
    )


async def test_https_where_http_is_spoken(place: Place) -> None:
    secure = place.url.replace("http:", "https:")
    host = secure.removesuffix(f"/{azure.ACCOUNT}")
    assert await refusal(place, endpoint=secure) == (
        ConfigError,
        f"{place.door}: {host}: the server does not speak HTTPS; write endpoint: {place.url}",
    )


async def test_nobody_listens(place: Place) -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert await refusal(place, endpoint=url) == (
            BackendError,
            f"{place.door}: {url}: connection refused; start the server, or correct endpoint; the tier tries again "
            "by itself",
        )


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, str]]:
    """A server that speaks HTTPS, and the file of the authority of its certificate."""
    if lacking := azure.lacking():
        pytest.skip(lacking)
    directory = tmp_path_factory.mktemp("tls")
    tls = tls_files(directory)
    with azure.azurite(directory, (tls.certificate, tls.key)) as server:
        yield azure_place(server), str(tls.ca)


async def test_https_with_an_authority_of_ones_own(secure: tuple[Place, str]) -> None:
    place, authority = secure
    absent = f"azure: container {PLACE} at {place.url}: there is no such container; create it, or correct container"
    assert await refusal(place, ca_file=authority) == (ConfigError, absent), "so it was asked"
    assert await refusal(place, verify=False) == (ConfigError, absent)
    unknown = "the server's certificate is of an unknown authority; write its file as ca_file"
    host = place.url.removesuffix(f"/{azure.ACCOUNT}")
    assert await refusal(place) == (ConfigError, f"azure: {host}: {unknown}")


@asynccontextmanager
async def answering(status: str, body: str) -> AsyncIterator[str]:
    """The URL of a server that answers each request so, as the service documents it."""
    told = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(told)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("door", "status", "code", "kind", "line"),
    [
        ("azure", "403 Forbidden", "AuthorizationPermissionMismatch", ConfigError, DENIED),
        ("azure", "503 Busy", "ServerBusy", BackendError, "the server asks for fewer requests; lower connections"),
        (
            "azure",
            "500 No",
            "InternalError",
            BackendError,
            "the server answers 500 InternalError; the tier",
        ),
        ("azure", "404 Not Found", "", ConfigError, "what answers there is no Azure Blob Storage; correct endpoint"),
        ("gcs", "404 Not Found", "", ConfigError, "what answers there is no Google Cloud Storage; correct endpoint"),
        ("gcs", "403 Forbidden", "AccessDenied", ConfigError, "access is denied; give who signs in the role roles/"),
        ("gcs", "418 Teapot", "Teapot", BackendError, "the server answers 418 Teapot; look in the server's log"),
    ],
)
async def test_an_answer_is_told(
    request: pytest.FixtureRequest, door: str, status: str, code: str, kind: type[Exception], line: str
) -> None:
    place: Place = request.getfixturevalue("azurite" if door == "azure" else "google")
    body = f"<Error><Code>{code}</Code><Message>nosecret</Message></Error>" if code else "oops"
    async with answering(status, body) as url:
        raised, told = await refusal(place, endpoint=url)
    assert raised is kind
    assert f" at {url}: {line}" in told
    assert "nosecret" not in told


@pytest.mark.parametrize("door", ["azure", "gcs"])
def test_what_is_not_installed_is_named_when_it_is_needed(door: str) -> None:
    code = f"""
import asyncio, sys
sys.modules["obstore"] = None
from lmcache_core.plugins import load_backend
plugin = load_backend({door!r})
known = {{"container": "kv1", "account": "abc"}} if {door!r} == "azure" else {{"bucket": "kv1"}}
try:
    asyncio.run(plugin.create(plugin.options_type(**known)).open())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"ConfigError {door}: obstore is not installed; pip install 'lmcache-core[{door}]'\n"
