"""What is said when it cannot be opened: one line, with what to change in it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.s3 import S3Backend, S3Options
from lmcache_core.errors import BackendError, ConfigError
from tests.backends.s3.conftest import BUCKET
from tests.backends.s3.kit import options
from tests.servers import s3
from tests.servers.redis import tls_files
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, Server


async def refusal(wanted: S3Options) -> tuple[type[Exception], str]:
    """What opening with these options raises."""
    backend = S3Backend(wanted)
    with pytest.raises((ConfigError, BackendError)) as caught:
        await backend.open()
    await backend.close()
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "line"),
    [
        (
            {"access_key": "nobody"},
            ConfigError,
            "{place}: the server does not know this access key; correct access_key, or the profile",
        ),
        (
            {"secret_key": "not-that-secret"},
            ConfigError,
            "{place}: the secret does not belong to the access key; correct secret_key, or the profile",
        ),
        (
            {"bucket": "no-such-bucket"},
            ConfigError,
            "s3: bucket no-such-bucket at {url}: there is no such bucket; create it, or correct bucket",
        ),
        (
            {"endpoint": "{https}"},
            ConfigError,
            "s3: {https}: the server does not speak HTTPS; write endpoint: {url}",
        ),
    ],
)
async def test_a_mistake_is_told(seaweed: Server, changes: dict[str, str], kind: type[Exception], line: str) -> None:
    known = {"url": seaweed.url, "https": seaweed.url.replace("http:", "https:")}
    known["place"] = f"s3: bucket {BUCKET} at {seaweed.url}"
    wanted = {name: value.format(**known) for name, value in changes.items()}
    assert await refusal(options(seaweed, **wanted)) == (kind, line.format(**known))


async def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        kind, line = await refusal(at(url))
    assert kind is BackendError
    assert line == (
        f"s3: {url}: connection refused; start the server, or correct endpoint; the tier tries again by itself"
    )


async def test_a_host_without_an_address() -> None:
    kind, line = await refusal(at("http://no-such-host.invalid:9000"))
    assert kind is BackendError
    assert line == (
        "s3: http://no-such-host.invalid:9000: there is no host no-such-host.invalid; correct endpoint, or the "
        "network's names"
    )


def at(url: str, **changes: Any) -> S3Options:
    return S3Options(bucket=BUCKET, endpoint=url, access_key=ACCESS_KEY, secret_key=SECRET_KEY, **changes)


Secure = tuple[Server, str]


@pytest.fixture(scope="module")
def secure(server_files: Path) -> Iterator[Secure]:
    """A server that speaks HTTPS, and the file of the authority of its certificate."""
    tls = tls_files(server_files / "tls", name="elsewhere.test")
    with s3.moto(server_files / "tls", (tls.certificate, tls.key)) as server:
        yield server, str(tls.ca)


@pytest.fixture(scope="module")
def expired(server_files: Path) -> Iterator[Secure]:
    tls = tls_files(server_files / "expired", expired=True)
    with s3.moto(server_files / "expired", (tls.certificate, tls.key)) as server:
        yield server, str(tls.ca)


async def test_https_with_an_authority_of_ones_own(secure: Secure) -> None:
    server, authority = secure
    no_bucket = f"s3: bucket {BUCKET} at {server.url}: there is no such bucket; create it, or correct bucket"
    assert await refusal(at(server.url, ca_file=authority)) == (ConfigError, no_bucket), "so it was asked"
    assert await refusal(at(server.url, verify=False)) == (ConfigError, no_bucket)
    assert await refusal(at(server.url, ca_file=authority, express="always")) == (ConfigError, no_bucket)


@pytest.mark.parametrize("express", ["never", "always"])
async def test_a_certificate_of_an_unknown_authority(secure: Secure, express: str) -> None:
    server, _ = secure
    assert await refusal(at(server.url, express=express)) == (
        ConfigError,
        f"s3: {server.url}: the server's certificate is of an unknown authority; write its file as ca_file",
    )


async def test_a_certificate_of_another_host(secure: Secure) -> None:
    server, authority = secure
    url = server.url.replace("127.0.0.1", "localhost")
    assert await refusal(at(url, ca_file=authority)) == (
        ConfigError,
        f"s3: {url}: the server's certificate is not for localhost; write the name that it is for",
    )


@pytest.mark.parametrize("express", ["never", "always"])
async def test_a_certificate_that_has_expired(expired: Secure, express: str) -> None:
    server, authority = expired
    assert await refusal(at(server.url, ca_file=authority, express=express)) == (
        BackendError,
        f"s3: {server.url}: the server's certificate has expired; renew it, or set this host's clock",
    )


@pytest.mark.parametrize("express", ["never", "always"])
async def test_http_where_https_is_spoken(secure: Secure, express: str) -> None:
    server, _ = secure
    url = server.url.replace("https:", "http:")
    assert await refusal(at(url, express=express)) == (
        ConfigError,
        f"s3: {url}: the server speaks HTTPS; write endpoint: {server.url}",
    )


async def test_a_file_of_certificates_that_is_none(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("")
    assert await refusal(at("https://127.0.0.1:1", ca_file=str(missing))) == (
        ConfigError,
        f"s3: ca_file '{missing}' cannot be read: No such file or directory; correct the path",
    )
    assert await refusal(at("https://127.0.0.1:1", ca_file=str(empty))) == (
        ConfigError,
        f"s3: ca_file '{empty}' has no certificate; write a file in PEM",
    )


@pytest.mark.parametrize("bucket", [BUCKET, s3.EXPRESS_BUCKET])
async def test_a_frozen_server_costs_no_more_than_its_timeout(server_files: Path, bucket: str) -> None:
    with s3.memory(server_files / "frozen") as server:
        server.freeze()
        wanted = options(server, bucket=bucket, stall_timeout=0.3, connect_timeout=0.3)
        kind, line = await refusal(wanted)
        assert kind is BackendError
        assert line == f"s3: {server.url}: no answer in time; the tier tries again by itself"


@pytest.mark.parametrize(("express", "library"), [("never", "obstore"), ("always", "aioboto3")])
def test_what_is_not_installed_is_named_when_it_is_needed(express: str, library: str) -> None:
    code = f"""
import asyncio, sys
sys.modules["obstore"] = sys.modules["aiobotocore"] = sys.modules["aiobotocore.session"] = None
from lmcache_backends.s3 import S3Backend, S3Options
options = S3Options(bucket="kv1", access_key="a", secret_key="b", express={express!r}, endpoint="http://127.0.0.1:1")
try:
    asyncio.run(S3Backend(options).open())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"ConfigError s3: {library} is not installed; pip install 'lmcache-core[s3]'\n"


ANSWERS = [
    (
        "400 Bad Request",
        "<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>",
        ConfigError,
        "the bucket is in region eu-west-1; write region: eu-west-1",
    ),
    (
        "301 Moved",
        "<Code>PermanentRedirect</Code>",
        ConfigError,
        "the bucket is in region eu-north-1; write region: eu-north-1",
    ),
    (
        "403 Forbidden",
        "<Code>AccessDenied</Code>",
        ConfigError,
        "access is denied; allow s3:GetObject, s3:PutObject and s3:DeleteObject on arn:aws:s3:::kv-tests/p/*, and "
        "s3:ListBucket on the bucket (without that, what is absent looks denied)",
    ),
    (
        "400 Bad Request",
        "<Code>ExpiredToken</Code>",
        BackendError,
        "the session token has expired; write a new one, or use a profile or role, whose are renewed",
    ),
    (
        "403 Forbidden",
        "<Code>RequestTimeTooSkewed</Code>",
        BackendError,
        "the clock of this host or of the server is wrong; set it",
    ),
    (
        "503 Slow Down",
        "<Code>SlowDown</Code>",
        BackendError,
        "the server asks for fewer requests; lower connections, or spread over more prefixes",
    ),
    ("502 Bad Gateway", "oops", BackendError, "the server answers 502; the tier tries again by itself"),
    ("404 Not Found", "oops", ConfigError, "what answers there is no S3 server; correct endpoint"),
    ("200 OK", "oops", ConfigError, "what answers there is no S3 server; correct endpoint"),
    ("418 Teapot", "<Code>Teapot</Code>", BackendError, "the server answers 418 Teapot; look in the server's log"),
]


@asynccontextmanager
async def answering(status: str, body: str) -> AsyncIterator[str]:
    """The URL of a server that answers each request so, as Amazon documents it: its regions and policies are nobody
    else's to run."""
    body = body if body == "oops" else f"<Error>{body}<Message>nosecret</Message></Error>"
    told = f"HTTP/1.1 {status}\r\nx-amz-bucket-region: eu-north-1\r\nConnection: close\r\nContent-Length: "

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{told}{len(body)}\r\n\r\n{'' if head.startswith(b'HEAD') else body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("express", ["never", "always"])
@pytest.mark.parametrize(("status", "body", "kind", "line"), ANSWERS)
async def test_an_answer_is_told(express: str, status: str, body: str, kind: type[Exception], line: str) -> None:
    async with answering(status, body) as url:
        told = await refusal(at(url, prefix="p", express=express))
        assert told == (kind, f"s3: bucket {BUCKET} at {url}: {line}")
