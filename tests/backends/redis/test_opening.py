"""Mistakes of those who set it up: each has one line, which says what to change, and no secrets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.redis import RedisBackend, RedisOptions, topology
from lmcache_core.config import InvalidSetting
from lmcache_core.errors import BackendError, ConfigError, LMCacheError
from tests.backends.redis.kit import chunks, get, opened, put
from tests.servers import redis as servers
from tests.servers.process import free_ports

SECRET = "hunter2-secret"


async def problem(**options: Any) -> LMCacheError:
    """What opening raises."""
    backend = RedisBackend(RedisOptions(**options))
    with pytest.raises(LMCacheError) as raised:
        await backend.open()
    await backend.close()
    text = str(raised.value)
    assert "\n" not in text
    assert SECRET not in text
    assert SECRET not in repr(RedisOptions(**options))
    return raised.value


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Valkey]:
    """A server with a password."""
    with servers.valkey(
        tmp_path_factory.mktemp("locked"), "--requirepass", "right", settings={"password": "right"}
    ) as server:
        yield server


async def test_a_password_that_is_wrong_missing_or_too_many(locked: servers.Valkey, valkey: servers.Valkey) -> None:
    wrong = await problem(url=locked.url, password=SECRET)
    assert isinstance(wrong, ConfigError)
    assert "refuses the user name or the password; correct username and password" in str(wrong)
    assert "asks for a password; write password: ${env:NAME}" in str(await problem(url=locked.url))
    none = await problem(url=f"redis://:{SECRET}@127.0.0.1:{valkey.port}")
    assert "has no password; delete password, and the one in the url" in str(none)
    async with opened(f"redis://:right@127.0.0.1:{locked.port}", "test-locked") as backend:
        await put(backend, chunks(1))


async def test_a_user_who_may_too_little(tmp_path: Path, tls: servers.Tls) -> None:
    if missing := servers.lacking("redis-server"):
        pytest.skip(missing)
    with servers.redis7(tmp_path / "r", tls, user="kv", password="pw", rules="~other:* +ping +get") as server:
        url = f"rediss://kv:pw@localhost:{server.port}"
        async with opened(url, tls_ca=str(tls.ca), mode="single") as backend:
            with pytest.raises(ConfigError, match=r"its ACL needs .*\+get \+set \+exists"):
                await backend.write(chunks(1))


async def test_rights_that_are_taken_away_while_it_is_used(tmp_path: Path, tls: servers.Tls) -> None:
    if missing := servers.lacking("redis-server"):
        pytest.skip(missing)
    with servers.redis7(tmp_path / "r", tls, user="kv", password="pw", rules="~* +@all") as server:
        async with opened(f"rediss://kv:pw@localhost:{server.port}", tls_ca=str(tls.ca)) as backend:
            values = chunks(2)
            await put(backend, values)
            server.run("ACL", "SETUSER", "kv", "resetpass", ">changed")
            server.run("CLIENT", "KILL", "USER", "kv")
            with pytest.raises(ConfigError, match="refuses the user name or the password"):
                await get(backend, values)
            server.run("ACL", "SETUSER", "kv", "resetpass", ">pw")
            await get(backend, values)


async def test_tls_where_there_is_none_and_none_where_there_is(
    valkey: servers.Valkey, redis7: servers.Valkey, tls: servers.Tls
) -> None:
    found = str(await problem(url=f"rediss://127.0.0.1:{valkey.port}", tls_ca=str(tls.ca), connect_timeout=0.3))
    assert "does not answer in TLS in time; if it does not speak it, write redis://" in found
    found = str(await problem(url=f"redis://127.0.0.1:{redis7.port}"))
    assert "does it want TLS? Then write rediss://" in found


async def test_certificates_that_cannot_be_trusted(tmp_path: Path, redis7: servers.Valkey, tls: servers.Tls) -> None:
    unknown = await problem(url=f"rediss://localhost:{redis7.port}")
    assert "is signed by nobody known here; name the signer with tls_ca" in str(unknown)
    none = await problem(url=f"rediss://kv:{SECRET}@localhost:{redis7.port}", tls_ca=str(tls.ca))
    assert "if it wants a certificate of ours, name it with tls_cert" in str(none)
    old = servers.tls_files(tmp_path / "old", expired=True)
    with servers.redis7(tmp_path / "r", old) as server:
        expired = await problem(url=f"rediss://localhost:{server.port}", tls_ca=str(old.ca))
        assert isinstance(expired, BackendError)
        assert "its certificate has expired; renew it there" in str(expired)
    other = servers.tls_files(tmp_path / "other", name="elsewhere.example")
    with servers.redis7(tmp_path / "r2", other) as server:
        name = await problem(url=f"rediss://localhost:{server.port}", tls_ca=str(other.ca))
        assert "its certificate cannot be trusted: Hostname mismatch" in str(name)
        async with opened(f"rediss://localhost:{server.port}", tls_verify=False) as backend:
            await put(backend, chunks(1))


async def test_files_that_are_not_there(valkey: servers.Valkey, tls: servers.Tls) -> None:
    url = f"rediss://127.0.0.1:{valkey.port}"
    assert "redis: tls_ca '/nowhere' cannot be used" in str(await problem(url=url, tls_ca="/nowhere"))
    found = await problem(url=url, tls_ca=str(tls.ca), tls_cert=str(tls.key))
    assert isinstance(found, ConfigError)
    assert "redis: tls_cert" in str(found)
    assert "there is no such socket; is the server started" in str(await problem(url="unix:///nowhere/s"))


async def test_hosts_that_are_not_there() -> None:
    (port,) = free_ports(1)
    refused = await problem(url=f"redis://127.0.0.1:{port}")
    assert isinstance(refused, BackendError)
    assert f"redis at 127.0.0.1:{port}: nothing listens there" in str(refused)
    assert "no host of this name is known" in str(await problem(url="redis://no-such-host.invalid"))


async def test_what_listens_is_no_redis_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        found = await problem(url=f"redis://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert "is a server of HTTP; write the host and port of a Redis server" in str(found)


async def test_a_cluster_is_none_or_is_one(
    cluster: list[servers.Valkey], valkey: servers.Valkey, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await problem(url=valkey.url, mode="cluster")
    assert "is not part of a cluster; leave mode out" in str(found)
    async with opened(cluster[0].url, prefix, mode="single") as backend:
        with pytest.raises(ConfigError, match="is a node of a cluster; write mode: cluster, or leave mode out"):
            await backend.write(chunks(30))
    with monkeypatch.context() as unable:
        unable.setattr(topology, "_mode", lambda client: "single")  # as where this user may not ask
        async with opened(cluster[0].url, prefix) as backend:
            with pytest.raises(ConfigError, match=r"does not tell.*by INFO: allow it \+info, or write mode: cluster"):
                await backend.write(chunks(30))
    found = await problem(url=f"{cluster[0].url}/3")
    assert "does not have this database; write another number at the end of the url" in str(found)


async def test_sentinels_that_are_none_or_know_nothing(sentinels: servers.Sentinels, valkey: servers.Valkey) -> None:
    found = await problem(url=sentinels.url)
    assert "is a sentinel that watches kv; write service: with one of these" in str(found)
    found = await problem(url=sentinels.url, service="mymaster")
    assert "knows no service 'mymaster'; it knows kv" in str(found)
    found = await problem(url=valkey.url, service="kv")
    assert "is no sentinel; delete service, or name a sentinel" in str(found)


async def test_what_asks_for_a_password_may_be_a_sentinel_or_not(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "valkey", "--requirepass", "secret", settings={"password": "secret"}) as server:
        found = await problem(url=f"redis://127.0.0.1:{server.port}", service="kv")
    assert "write sentinel_password, or delete service if it is none" in str(found)
    assert "secret" not in str(found)


async def test_another_sentinel_is_asked_where_one_is_down(sentinels: servers.Sentinels, prefix: str) -> None:
    (port,) = free_ports(1)
    more = (f"127.0.0.1:{sentinels.sentinel.port}",)
    async with opened(f"redis://127.0.0.1:{port}", prefix, service="kv", sentinels=more) as backend:
        await put(backend, chunks(1))
    found = await problem(url=f"redis://127.0.0.1:{port}", service="kv")
    assert isinstance(found, BackendError)


async def test_a_database_that_is_not_there(valkey: servers.Valkey) -> None:
    assert "write another number at the end of the url" in str(await problem(url=f"{valkey.url}/99"))


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"url": "reddis://h"}, "url", "scheme reddis:// is not one of Redis or Valkey; did you mean redis://?"),
        ({"url": "http://h"}, "url", "write redis://host:6379/0, or rediss:// for TLS"),
        ({"url": "h:6379"}, "url", "url is not one of Redis or Valkey"),
        ({"url": "redis://"}, "url", "url needs a host"),
        ({"url": "redis://h/kv"}, "url", "may end in a number"),
        ({"url": "redis://h:port"}, "url", "url cannot be read"),
        ({"url": "redis://h?ssl=true"}, "url", "which is not used"),
        ({"url": "unix://s"}, "url", "write unix:///run/redis.sock"),
        ({"url": "redis://h", "prefix": "a b"}, "prefix", "write letters, digits"),
        ({"url": "redis://h", "prefix": ""}, "prefix", "write letters, digits"),
        ({"url": "redis://h", "ttl": 0.0}, "ttl", "leave it out, or write 7d"),
        ({"url": "redis://h", "connect_timeout": 0.0}, "connect_timeout", "write 2s"),
        ({"url": "redis://h", "mode": "sentinel"}, "service", "write service: mymaster"),
        ({"url": "redis://h", "mode": "cluster", "service": "m"}, "service", "delete one of them"),
        ({"url": "redis://h", "sentinels": ("h:1",)}, "sentinels", "write service: mymaster"),
        ({"url": "redis://h", "service": "m", "sentinels": ("h",)}, "sentinels", "write host:26379"),
        ({"url": "redis://h", "tls_ca": "/a"}, "tls_ca", "write url: rediss://..."),
        ({"url": "rediss://h", "tls_key": "/a"}, "tls_key", "write tls_cert too"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        RedisOptions(**options)
    assert raised.value.key == (key,)
    assert says in str(raised.value)


def test_addresses_as_they_are_written() -> None:
    url = RedisOptions(url="rediss://us%40er:p%3Aw@[::1]:1234/7").parsed()
    assert (url.address.host, url.address.port, url.tls, url.database) == ("::1", 1234, True, 7)
    assert (url.username, url.password) == ("us@er", "p:w")
    assert str(url.address) == "[::1]:1234"
    assert RedisOptions(url="valkey://h").parsed().address.port == 6379
    assert RedisOptions(url="redis://h", service="m").parsed().address.port == 26379
    assert RedisOptions(url="unix:///run/a%20b.sock").parsed().address.path == "/run/a b.sock"
    assert RedisOptions(url="redis://u:p@h", username="v", password="q").parsed().username == "v"
