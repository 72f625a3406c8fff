"""Which server holds a key: found out with redis-py, which knows sentinels and clusters. Blocking: run on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from lmcache_backends.redis import problems
from lmcache_backends.redis.connecting import Connector
from lmcache_backends.redis.options import Address
from lmcache_backends.redis.resp import ErrorReply
from lmcache_core.errors import BackendError, ConfigError

SLOTS = 16384


@dataclass(slots=True)
class Topology:
    """Where the keys are. `slots` is empty unless it is a cluster."""

    servers: list[Address]
    slots: list[int] = field(default_factory=list)
    """For each slot the number of its server, -1 if it has none."""
    policy: str = ""
    """What the server does when it is full, as far as it tells."""
    partial: bool = False
    """Some slots have no server that works, and the cluster serves the others."""

    def server_of(self, key: bytes) -> Address | None:
        """Who holds `key`; None if nobody does."""
        if not self.slots:
            return self.servers[0]
        number = self.slots[key_slot(key)]
        return None if number < 0 else self.servers[number]

    def holders(self) -> list[Address]:
        """All servers that hold keys."""
        if not self.slots:
            return self.servers[:1]
        return [self.servers[number] for number in sorted(set(self.slots) - {-1})]

    def moved(self, slot: int, server: Address) -> None:
        """Note what a server has said of a slot."""
        if self.slots and 0 <= slot < SLOTS:
            if server not in self.servers:
                self.servers.append(server)
            self.slots[slot] = self.servers.index(server)


def find(connector: Connector, known: list[Address]) -> Topology:
    """Ask where the keys are: sentinels, or a server of `known`, or of the options.

    Raises:
        BackendError: Nobody answers.
        ConfigError: The options don't fit what answers.
    """
    if connector.options.service:
        primary = _primary(connector)
        connector.connect(primary).close()  # for its errors, which say what to change
        return _ask(connector, primary, "single")
    failure: BackendError | None = None
    for where in [connector.url.address, *(each for each in known if each != connector.url.address)]:
        try:
            connector.connect(where).close()  # as above
            return _ask(connector, where, connector.options.mode)
        except BackendError as error:
            failure = error
    assert failure is not None
    raise failure


def _ask(connector: Connector, where: Address, mode: str) -> Topology:
    client = _client(connector, where, connector.url.username, connector.url.password, connector.url.database)
    try:
        if mode == "auto":
            mode = _mode(client)
        if mode == "sentinel":
            names = ", ".join(sorted(_masters(client))) or "no primary at all"
            raise ConfigError(f"redis at {where} is a sentinel that watches {names}; write service: with one of these")
        topology = _cluster(client, where) if mode == "cluster" else Topology([where])
        topology.policy = _policy(client)
        return topology
    except redis.exceptions.ResponseError as error:
        text = str(error)
        if mode == "cluster" and "cluster support disabled" in text:
            raise ConfigError(f"redis at {where} is not part of a cluster; leave mode out, or name a node") from error
        raise problems.of_reply(where, ErrorReply(text)) from error
    except (redis.exceptions.RedisError, OSError) as error:
        raise problems.of_connecting(where, error, connector.url.tls, known=connector.known) from error
    finally:
        client.close()


def _mode(client: Any) -> str:
    """What a server is a part of: as it says, else as it can do."""
    try:
        info = client.info("server")
    except redis.exceptions.ResponseError:  # the user may not ask
        return "single"
    said = info.get("redis_mode") or info.get("server_mode")  # the latter is Valkey's
    return said if said in ("cluster", "sentinel") else "single"


def _policy(client: Any) -> str:
    try:
        info = client.info("memory")
    except redis.exceptions.ResponseError:
        return ""
    return str(info.get("maxmemory_policy", "")) if info.get("maxmemory") else "unbounded"


def _cluster(client: Any, where: Address) -> Topology:
    topology = Topology([], [-1] * SLOTS)
    for first, last, host, port in _ranges(client.execute_command("CLUSTER SLOTS")):
        server = Address(_text(host) or where.host, int(port))
        if server not in topology.servers:
            topology.servers.append(server)
        number = topology.servers.index(server)
        for slot in range(max(0, int(first)), min(int(last), SLOTS - 1) + 1):
            topology.slots[slot] = number
    if not topology.servers:
        raise BackendError(f"redis at {where} is a node of a cluster that has no slots yet")
    for slot in _failed(client):
        topology.slots[slot] = -1
    topology.partial = -1 in topology.slots and b"cluster_state:ok" in _told(client, "INFO").split()
    return topology


def _failed(client: Any) -> Iterator[int]:
    """Slots of nodes that the cluster has given up: it tells them as theirs until another node has them."""
    for line in _told(client, "NODES").splitlines():
        fields = line.split()
        if len(fields) < 8 or b"fail" not in fields[2].split(b","):
            continue
        for part in fields[8:]:  # of slots that are being moved it is `[slot->-node]`
            first, _, last = part.partition(b"-")
            if first.isdigit() and (last or first).isdigit():
                yield from range(int(first), min(int(last or first), SLOTS - 1) + 1)


def _told(client: Any, question: str) -> bytes:
    """What a node says of its cluster, as it says it; empty if the user may not ask."""
    try:
        found = client.execute_command("CLUSTER", question)
    except redis.exceptions.ResponseError:
        return b""
    return found if isinstance(found, bytes) else str(found).encode()


def _ranges(told: Any) -> Iterator[tuple[int, int, bytes | str, int]]:
    """First and last slot, host and port of each range: releases of redis-py put it as a list or as a mapping."""
    if isinstance(told, dict):
        for (first, last), owners in told.items():
            yield (first, last, *owners["primary"][:2])
    else:
        for first, last, primary, *_ in told:
            yield (first, last, *primary[:2])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _masters(client: Any) -> list[str]:
    try:
        return list(client.sentinel_masters())
    except redis.exceptions.RedisError:
        return []


def _primary(connector: Connector) -> Address:
    options = connector.options
    problem = BackendError("redis: there is no sentinel")
    for where in options.sentinel_addresses():
        client = _client(connector, where, options.sentinel_username, options.sentinel_password, 0)
        try:
            found = client.sentinel_get_master_addr_by_name(options.service)
            if found is not None:
                return Address(_text(found[0]), int(found[1]))
            names = ", ".join(sorted(_masters(client))) or "none"
            raise ConfigError(f"redis: sentinel {where} knows no service {options.service!r}; it knows {names}")
        except redis.exceptions.ResponseError as error:
            if "unknown command" in str(error):
                raise ConfigError(f"redis at {where} is no sentinel; delete service, or name a sentinel") from error
            raise problems.of_reply(where, ErrorReply(str(error))) from error
        except redis.exceptions.TimeoutError as error:
            problem = problems.of_connecting(where, TimeoutError(str(error)), connector.url.tls)
        except (redis.exceptions.RedisError, OSError) as error:
            if str(error).startswith(("NOAUTH", "HELLO")):
                raise ConfigError(
                    f"redis at {where} asks for a password before it tells whether it is a sentinel; write "
                    f"sentinel_password, or delete service if it is none ({error})"
                ) from error
            problem = BackendError(f"redis: sentinel {where}: {error}")
        finally:
            client.close()
    raise problem


def _client(connector: Connector, where: Address, username: str, password: str, database: int) -> Any:
    options = connector.options
    settings: dict[str, Any] = {
        "username": username or None,
        "password": password or None,
        "db": database,
        "socket_timeout": options.connect_timeout,
        "socket_connect_timeout": options.connect_timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    if where.path:
        return redis.Redis(unix_socket_path=where.path, **settings)
    if connector.url.tls:
        settings |= {
            "ssl": True,
            "ssl_ca_certs": options.tls_ca or None,
            "ssl_certfile": options.tls_cert or None,
            "ssl_keyfile": options.tls_key or None,
            "ssl_cert_reqs": "required" if options.tls_verify else "none",
            "ssl_check_hostname": options.tls_verify,
        }
    return redis.Redis(host=where.host, port=where.port, **settings)
