"""LMCache's own YAML to ours, and for every key what became of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import yaml

from lmcache_core.config.conversion import InvalidSetting, mapping_at, shown
from lmcache_core.config.document import read_document
from lmcache_core.config.fields import fields_of
from lmcache_core.config.foreign import NO_SCHEME, SCHEMES, is_foreign, reason
from lmcache_core.config.loading import load_config
from lmcache_core.config.masking import mask_url
from lmcache_core.config.structs import Config
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.plugins import load_backend

_MOST_TOKENS = 2**20 - 64

Status = Literal["mapped", "changed", "dropped"]


class Note(NamedTuple):
    """What became of one key."""

    key: str
    """LMCache's key, `extra_config.s3_region` for a nested one."""
    status: Status
    """`mapped` keeps its meaning, `changed` is the nearest there is, `dropped` has no counterpart."""
    why: str


class Migration(NamedTuple):
    """A converted configuration."""

    yaml_text: str
    notes: list[Note]


class _Outcome(NamedTuple):
    status: Status
    why: str


def migrate(text: str, name: str = "<text>") -> Migration:
    """Convert a YAML configuration of LMCache. Passwords in URLs stay in the text; notes don't show them.

    Raises:
        ConfigError: It isn't YAML, or no mapping.
    """
    document = read_document(text, name)
    try:
        old = mapping_at((), document.value)
    except InvalidSetting as invalid:
        raise ConfigError(f"{name}: {invalid}") from None
    ours = [field.key for field in fields_of(Config) if field.key in old]
    if ours and not any(is_foreign(str(key)) for key in old):
        raise ConfigError(
            f"{name}:{document.lines.get((ours[0],), 1)}: {ours[0]!r} is a key of lmcache-core and no key of LMCache "
            "is there: nothing is left to convert; see 'lmcache-core config check'"
        )
    return _Converter(old).run()


class _Converter:
    def __init__(self, old: Mapping[str, object]) -> None:
        self._old = old
        extra = old.get("extra_config")
        self._extra: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
        self._new: dict[str, Any] = {}
        self._cpu: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._tiers: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []
        """Tiers that cannot be used as they are. They stand in the YAML as a comment."""
        self._notes: list[Note] = []

    def run(self) -> Migration:
        handlers: dict[str, Callable[[Any], _Outcome]] = {
            "chunk_size": self._chunk_size,
            "local_cpu": self._local_cpu,
            "max_local_cpu_size": self._cpu_size,
            "local_cpu_use_hugepages": self._hugepages,
            "local_disk": self._disk,
            "max_local_disk_size": self._disk_size,
            "remote_url": self._remote,
            "remote_serde": self._serde,
            "cache_policy": self._policy,
            "blocking_timeout_secs": self._timeout,
            "pin_timeout_sec": self._lease,
            "internal_api_server_enabled": self._metrics_enabled,
            "internal_api_server_host": self._metrics_host,
            "internal_api_server_port_start": self._metrics_port,
            "save_decode_cache": lambda _: _Outcome("dropped", "what is stored follows from chunks and turns"),
            "save_unfull_chunk": self._tails,
            "enable_async_loading": lambda _: _Outcome("dropped", "loading is always asynchronous"),
        }
        # Tiers first and in order of speed: other keys are about them.
        order = ["local_disk", "remote_url"]
        keys = [key for key in order if key in self._old] + [key for key in self._old if key not in order]
        for key in keys:
            value = self._old[key]
            if key == "extra_config" and isinstance(value, Mapping):
                for inner in value:
                    self._note(f"extra_config.{inner}", self._extra_key(str(inner)))
            elif value is None:
                self._note(key, _Outcome("dropped", "it has no value"))
            elif key in handlers:
                self._note(key, handlers[key](value))
            elif key in Config.__struct_fields__:
                self._note(key, _Outcome("dropped", "it is a key of lmcache-core, not of LMCache; copy it by hand"))
            else:
                self._note(key, _Outcome("dropped", reason(key) or "it is no key of LMCache that is known here"))
        return Migration(self._text(), self._notes)

    def _text(self) -> str:
        result = dict(self._new)
        result |= {"cpu": self._cpu} if self._cpu else {}
        result |= {"tiers": self._tiers} if self._tiers else {}
        result |= {"metrics": self._metrics} if self._metrics else {}
        head = "# Converted from a configuration of LMCache. Everything that isn't here has its default.\n"
        return head + (_yaml(result) if result else "") + self._comment()

    def _comment(self) -> str:
        if not self._left:
            return ""
        lines = _yaml({"tiers": self._left}).splitlines()
        return "".join(f"# {line}\n" for line in ["Left out, as it cannot be used; the notes say why.", *lines])

    def _add(self, tier: dict[str, Any]) -> str:
        """Take a tier into the YAML, or into its comment: why, then; else nothing."""
        problem = _problem(tier)
        (self._left if problem else self._tiers).append(tier)
        return f"{problem}; the tier is a comment in the YAML" if problem else ""

    def _note(self, key: str, outcome: _Outcome) -> None:
        self._notes.append(Note(key, outcome.status, mask_url(outcome.why)))

    def _extra_key(self, key: str) -> _Outcome:
        if key in ("valkey_username", "valkey_password", "valkey_database") and any(
            "url" in tier for tier in [*self._tiers, *self._left]
        ):
            return _Outcome("mapped", "it is part of the tier's url")
        return _Outcome("dropped", reason(key) or "it is no key of LMCache that is known here")

    def _chunk_size(self, value: Any) -> _Outcome:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return _Outcome("dropped", f"{shown(value)} is no number of tokens; chunk_tokens is 256")
        page = math.gcd(value, 64)
        if value > _MOST_TOKENS:
            return _Outcome("dropped", f"{shown(value)} tokens are too many for a chunk; chunk_tokens is 256")
        if page == 64:
            self._new["chunk_tokens"] = value
            return _Outcome("mapped", "chunk_tokens")
        if page >= 8:
            self._new |= {"chunk_tokens": value, "page_tokens": page}
            return _Outcome("changed", f"chunk_tokens, with page_tokens {page}, which must divide it")
        rounded = -(-value // 64) * 64
        self._new["chunk_tokens"] = rounded
        return _Outcome("changed", f"chunk_tokens {rounded}: chunks are whole pages of 64 tokens, {value} is not")

    def _local_cpu(self, value: Any) -> _Outcome:
        if value:
            return _Outcome("mapped", "the host pool always keeps chunks")
        return _Outcome("dropped", "the host pool always keeps chunks; a small cpu.capacity makes it a mere buffer")

    def _cpu_size(self, value: Any) -> _Outcome:
        size = _gibibytes(value)
        if size is None:
            return _Outcome("dropped", f"{shown(value)} is too small for a pool; cpu.capacity has its default")
        self._cpu["capacity"] = size
        return _Outcome(
            "changed", f"cpu.capacity {size}: LMCache takes it once per rank, here it is for the whole host"
        )

    def _hugepages(self, value: Any) -> _Outcome:
        self._cpu["hugepages"] = bool(value)
        return _Outcome("mapped", "cpu.hugepages")

    def _disk(self, value: Any) -> _Outcome:
        paths = [path.strip().removeprefix("file://") for path in str(value).split(",") if path.strip()]
        named: dict[str, str] = {}
        for path in paths:
            named.setdefault(os.path.normpath(path), path)
        paths = list(named.values())
        size = _gibibytes(self._old.get("max_local_disk_size"))
        if isinstance(value, bool) or not paths:
            return _Outcome("dropped", f"{shown(value)} is no path")
        if size is None:
            return _Outcome(
                "dropped", "without max_local_disk_size LMCache keeps nothing there; add a disk tier if wanted"
            )
        written = [_literal(path) for path in paths]
        tier = {"backend": "disk", "path": written[0] if len(written) == 1 else written, "capacity": size}
        problem = self._add(tier)
        return _Outcome("dropped", problem) if problem else _Outcome("mapped", "a disk tier")

    def _disk_size(self, value: Any) -> _Outcome:
        if self._tier("disk") is None:
            return _Outcome("dropped", "there is no disk tier it could bound")
        return _Outcome(
            "changed", f"capacity {_gibibytes(value)}: LMCache takes it once per rank, here it is for the host"
        )

    def _remote(self, value: Any) -> _Outcome:
        scheme, separator, rest = str(value).partition("://")
        if not separator:
            return _Outcome("dropped", f"{shown(value)} is no URL")
        if scheme in ("redis", "rediss", "valkey"):
            return self._redis(scheme, rest)
        if scheme == "s3":
            return self._s3(rest)
        if scheme == "mooncakestore":
            problem = self._add({"backend": "mooncake", "master": _literal(rest.strip("/"))})
            told = "a mooncake tier; what this host gives and is called are its settings segment and host"
            return _Outcome("dropped", problem) if problem else _Outcome("changed", told)
        return _Outcome("dropped", SCHEMES.get(scheme) or NO_SCHEME.format(scheme=scheme))

    def _redis(self, scheme: str, rest: str) -> _Outcome:
        user, password = (str(self._extra.get(f"valkey_{name}") or "") for name in ("username", "password"))
        database = self._extra.get("valkey_database")
        if scheme == "valkey" and (user or password) and "@" not in rest:
            rest = f"{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
        if scheme == "valkey" and isinstance(database, int):
            rest = f"{rest.rstrip('/')}/{database}"
        scheme = "redis" if scheme == "valkey" else scheme
        problem = self._add({"backend": "redis", "url": _literal(f"{scheme}://{rest}")})
        if problem:
            return _Outcome("dropped", problem)
        advice = "; take the password from the environment: ${env:NAME}" if "@" in rest else ""
        return _Outcome("mapped", f"a redis tier{advice}")

    def _s3(self, rest: str) -> _Outcome:
        host, _, prefix = rest.partition("/")
        bucket = host.partition(".s3")[0] if ".s3" in host else host
        tier = {"backend": "s3", "bucket": _literal(bucket)}
        if prefix:
            tier["prefix"] = _literal(prefix)
        problem = self._add(tier)
        if problem:
            return _Outcome("dropped", problem)
        if bucket == host:
            return _Outcome("mapped", "an s3 tier")
        return _Outcome(
            "changed", f"an s3 tier with the bucket {bucket}; region and endpoint are settings of their own"
        )

    def _serde(self, value: Any) -> _Outcome:
        if value == "naive":
            return _Outcome("mapped", "bytes are stored as they are")
        return _Outcome("dropped", f"{shown(value)} is lossy or of LMCache only; KV is stored exactly")

    def _policy(self, value: Any) -> _Outcome:
        policies = {"LRU": "lru", "LFU": "s3fifo", "FIFO": "s3fifo"}
        policy = policies.get(str(value).upper())
        if policy is None:
            return _Outcome("dropped", f"there is no policy {shown(value)}; the default is lru")
        for section in [self._cpu, *(tier for tier in self._tiers if tier["backend"] == "disk")]:
            section["policy"] = policy
        if policy == "lru":
            return _Outcome("mapped", "policy lru")
        return _Outcome("changed", f"policy s3fifo, the nearest to {value}: a FIFO that keeps what is used again")

    def _timeout(self, value: Any) -> _Outcome:
        if not self._tiers or not _is_positive(value):
            return _Outcome("dropped", "there is no tier to wait for")
        for tier in self._tiers:
            tier["read_timeout"] = f"{value:g}s"
        return _Outcome("changed", "read_timeout of each tier; past it a chunk is computed, nothing blocks")

    def _lease(self, value: Any) -> _Outcome:
        if not _is_positive(value):
            return _Outcome("dropped", f"{shown(value)} is no time; lease_timeout has its default")
        self._new["lease_timeout"] = f"{value:g}s"
        return _Outcome("mapped", "lease_timeout")

    def _tails(self, value: Any) -> _Outcome:
        if value:
            return _Outcome("mapped", "the whole pages of an unfinished chunk are always stored")
        return _Outcome("dropped", "the whole pages of an unfinished chunk are always stored")

    def _metrics_enabled(self, value: Any) -> _Outcome:
        self._metrics["enabled"] = bool(value)
        return _Outcome("changed", "metrics.enabled: only /metrics is served, by one endpoint for the node")

    def _metrics_host(self, value: Any) -> _Outcome:
        self._metrics["host"] = _literal(str(value))
        return _Outcome("mapped", "metrics.host")

    def _metrics_port(self, value: Any) -> _Outcome:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
            return _Outcome("dropped", f"{shown(value)} is no port")
        self._metrics["port"] = value
        return _Outcome("changed", "metrics.port: one port for the node, not one for each rank")

    def _tier(self, backend: str) -> dict[str, Any] | None:
        return next((tier for tier in self._tiers if tier["backend"] == backend), None)


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=110)
    return text


def _problem(tier: dict[str, Any]) -> str:
    """Why a tier cannot be used here; nothing if it can."""
    try:
        loaded = load_config({"tiers": [tier]}, env={})
        for each in loaded.config.tiers:
            load_backend(each.backend).create(each.options)
    except LMCacheError as error:
        cause = error.__cause__
        told = str(cause if isinstance(cause, InvalidSetting) else error)
        return told.removeprefix("tiers[0].backend: ").removeprefix("disk: ")
    return ""


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-6 <= value < 10**9


def _gibibytes(value: object) -> str | None:
    """LMCache's sizes are numbers of 2**30 bytes. None if there is no room for a chunk."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 2**-10 <= value < 2**23:
        return None
    return f"{value:.10f}".rstrip("0").rstrip(".") + "GiB"


def _literal(text: str) -> str:
    """Text that is not to be taken for a reference."""
    return text.replace("${", "$${")
