"""Who we are: profiles, keys that expire, and that no secret is ever seen."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

from lmcache_backends.s3 import S3Backend, S3Options
from lmcache_core.config import load_config
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import WriteResult
from lmcache_core.testing import make_chunk, make_key
from tests.backends.s3.conftest import BUCKET
from tests.backends.s3.kit import options
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, Server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the AWS tools read, and nothing of this host's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def keys_in(file: Path, section: str = "default", secret: str = SECRET_KEY) -> None:
    file.write_text(f"[{section}]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n")


async def works(wanted: S3Options) -> None:
    backend = S3Backend(wanted)
    await backend.open()
    assert await backend.write([make_chunk(make_key(1))]) == [WriteResult.STORED]
    await backend.close()


async def test_a_profile_says_who_we_are(home: Path, seaweed: Server, prefix: str) -> None:
    keys_in(home / "credentials", "team")
    await works(S3Options(bucket=BUCKET, endpoint=seaweed.url, prefix=prefix, profile="team"))
    with pytest.raises(ConfigError, match=r"^s3: there is no profile 'other'; known are team$"):
        await S3Backend(S3Options(bucket=BUCKET, endpoint=seaweed.url, profile="other")).open()


async def test_the_environment_says_who_we_are(
    home: Path, seaweed: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweed.url)
    await works(S3Options(bucket=BUCKET, prefix=prefix))


async def test_the_environment_does_not_get_in_the_way_of_what_is_written(
    home: Path, seaweed: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "somebody else's")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "somebody else's")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    await works(options(seaweed, prefix=prefix))


async def test_without_credentials_it_is_said_what_to_write(home: Path, seaweed: Server) -> None:
    with pytest.raises(ConfigError) as refused:
        await S3Backend(S3Options(bucket=BUCKET, endpoint=seaweed.url)).open()
    assert str(refused.value) == (
        "s3: no credentials are found in the environment, in files or from a role; write access_key and secret_key, or "
        "profile"
    )


def program(home: Path, seconds: float) -> Path:
    """What gives out keys that end after so many seconds, and notes how often it was asked."""
    known = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY}
    file = home / "keys.py"
    file.write_text(
        f"#!{sys.executable}\n"
        "import json\n"
        "from datetime import UTC, datetime, timedelta\n"
        f"with open({str(home / 'asked')!r}, 'a') as file:\n"
        "    file.write('x')\n"
        f"ends = (datetime.now(UTC) + timedelta(seconds={seconds})).isoformat()\n"
        f"print(json.dumps({known!r} | {{'Expiration': ends}}))\n"
    )
    file.chmod(0o700)
    (home / "config").write_text(f"[profile short]\ncredential_process = {file}\n")
    return home / "asked"


async def test_keys_that_expire_are_renewed(home: Path, seaweed: Server, prefix: str) -> None:
    asked = program(home, 3)
    backend = S3Backend(S3Options(bucket=BUCKET, endpoint=seaweed.url, prefix=prefix, profile="short"))
    await backend.open()
    before = len(asked.read_text())
    async with asyncio.timeout(20):
        while len(asked.read_text()) == before:
            assert await backend.write([make_chunk(make_key(1))]) == [WriteResult.STORED]
    assert await backend.write([make_chunk(make_key(2))]) == [WriteResult.STORED]
    await backend.close()


async def test_a_program_that_fails_is_told_without_what_it_printed(home: Path, seaweed: Server) -> None:
    failing = home / "fails.py"
    failing.write_text(f"#!{sys.executable}\nimport sys\nprint('hush-hush')\nsys.exit('hush-hush')\n")
    failing.chmod(0o700)
    (home / "config").write_text(f"[profile fails]\ncredential_process = {failing}\n")
    with pytest.raises(BackendError) as refused:
        await S3Backend(S3Options(bucket=BUCKET, endpoint=seaweed.url, profile="fails")).open()
    assert str(refused.value) == (
        "s3: no credentials can be had now from profile 'fails' (CredentialRetrievalError); see whether the AWS tools "
        "work"
    )


async def test_secrets_are_in_no_log_repr_or_error(
    seaweed: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret, token = "hush-hush-secret", "hush-hush-token"
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    for express in ("never", "always"):
        wanted = options(seaweed, prefix=prefix, secret_key=secret, session_token=token, express=express)
        backend = S3Backend(wanted)
        with pytest.raises((ConfigError, BackendError)) as refused:
            await backend.open()
        seen += [repr(wanted), str(wanted), repr(backend), repr(vars(backend)), repr(refused.value)]
        cause: BaseException | None = refused.value
        while cause is not None:
            seen.append(repr(cause))
            cause = cause.__cause__
    assert [text for text in [*seen, caplog.text] if "hush" in text] == []


def test_secrets_of_a_file_are_in_no_repr(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(f"tiers:\n  - {{backend: s3, bucket: {BUCKET}, access_key: a, secret_key: hush-hush}}\n")
    assert "hush" not in repr(load_config(file).config)
