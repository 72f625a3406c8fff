"""Configuration from files, text, mappings, the environment and secrets; and what is shown of it."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from lmcache_core.config import (
    BreakerConfig,
    CipherConfig,
    Config,
    CpuConfig,
    InvalidSetting,
    LoadedConfig,
    MetricsConfig,
    ShareConfig,
    TierConfig,
    check,
    load_config,
    show,
)
from lmcache_core.errors import ConfigError

GIB = 2**30

EVERYTHING = """\
chunk_tokens: 512
page_tokens: 128
cpu: {capacity: 20GiB, hugepages: true, policy: s3fifo}
tiers:
  - backend: fakedisk
    name: nvme
    path: /nvme/kv
    capacity: 500GiB
    segment: 2GiB
    patience: 250ms
    write: evict
    admit: second-touch
    policy: s3fifo
    read_timeout: 1s
    write_timeout: 1m
    concurrency: 8
    breaker: {failures: 5, cooldown: 2s, max_cooldown: 1m}
    quarantine: 512MiB
  - backend: fakeremote
    url: x://cache:6379
    write: never
salt: tenant
metrics: {enabled: true, host: 0.0.0.0, port: 0}
lease_timeout: 1m
retention_tokens: 1024
layout: canonical
log_interval: 1s
"""


def load(text: str, **env: str) -> LoadedConfig:
    """The configuration of a file `tiers.yaml` with that text."""
    Path("tiers.yaml").write_text(dedent(text))
    return load_config(Path("tiers.yaml"), env=env)


def shown(loaded: LoadedConfig) -> dict[str, tuple[str, str]]:
    return {setting.key: (setting.value, setting.source) for setting in show(loaded)}


def test_every_setting() -> None:
    config = load(EVERYTHING).config
    nvme, remote = config.tiers
    assert msgspec.structs.replace(config, tiers=()) == Config(
        chunk_tokens=512,
        page_tokens=128,
        cpu=CpuConfig(capacity=20 * GIB, hugepages=True, policy="s3fifo"),
        salt="tenant",
        metrics=MetricsConfig(enabled=True, host="0.0.0.0", port=0),
        lease_timeout=60.0,
        retention_tokens=1024,
        layout="canonical",
        log_interval=1.0,
    )
    assert msgspec.structs.replace(nvme, options=None) == TierConfig(
        backend="fakedisk",
        name="nvme",
        capacity=500 * GIB,
        write="evict",
        admit="second-touch",
        policy="s3fifo",
        read_timeout=1.0,
        write_timeout=60.0,
        concurrency=8,
        breaker=BreakerConfig(failures=5, cooldown=2.0, max_cooldown=60.0),
        quarantine=512 * 2**20,
    )
    assert msgspec.structs.asdict(nvme.options) == {
        "path": "/nvme/kv",
        "capacity": 500 * GIB,
        "direct": True,
        "segment": 2 * GIB,
        "patience": 0.25,
        "mode": "fast",
    }
    assert (remote.name, remote.write, remote.capacity) == ("fakeremote", "never", None)
    assert remote.options.url == "x://cache:6379"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "cpu:\ntiers:\nmetrics:\n", "{}"])
def test_an_empty_file_is_the_defaults(text: str) -> None:
    assert load(text).config == Config()
    assert load_config(text, env={}).config == Config()


def test_without_a_source() -> None:
    assert load_config(env={}).config == Config()
    Path("a.yaml").write_text("page_tokens: 32")
    loaded = load_config(env={"LMCACHE_CORE_CONFIG": "a.yaml"})
    assert loaded.config.page_tokens == 32
    assert shown(loaded)["page_tokens"] == ("32", "a.yaml:1")
    assert load_config(env={"LMCACHE_CORE_CONFIG": ""}).config == Config()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CORE_PAGE_TOKENS", "16")
    assert load_config().config.page_tokens == 16


def test_text_path_and_mapping_are_told_apart() -> None:
    Path("a.yaml").write_text("page_tokens: 32")
    assert load_config("a.yaml", env={}).config.page_tokens == 32
    assert load_config(str(Path("a.yaml").absolute()), env={}).config.page_tokens == 32
    assert load_config("page_tokens: 32", env={}).config.page_tokens == 32
    assert load_config("{page_tokens: 32}", env={}).config.page_tokens == 32
    assert load_config({"page_tokens": 32}, env={}).config.page_tokens == 32
    tiers = ({"backend": "fakedisk", "path": "/a", "capacity": 2 * GIB},)
    loaded = load_config({"tiers": tiers}, env={})
    assert loaded.config.tiers[0].options.path == "/a"
    assert shown(loaded)["tiers[0].path"] == ("/a", "argument")
    assert shown(loaded)["tiers[0].write"] == ("through", "default")


def test_a_mapping_is_not_changed_by_overrides() -> None:
    source = {"cpu": {"capacity": "1GiB"}}
    loaded = load_config(source, env={"LMCACHE_CORE_CPU__CAPACITY": "2GiB"})
    assert loaded.config.cpu.capacity == 2 * GIB
    assert source == {"cpu": {"capacity": "1GiB"}}


def test_a_byte_order_mark_and_windows_line_ends() -> None:
    Path("a.yaml").write_bytes(b"\xef\xbb\xbfcpu: {}\r\npage_tokens: 32\r\n")
    assert shown(load_config("a.yaml", env={}))["page_tokens"] == ("32", "a.yaml:2")


def test_aliases_share_a_section() -> None:
    loaded = load(
        """
        tiers:
          - {backend: fakedisk, path: /a, capacity: 2GiB, breaker: &b {failures: 9}}
          - {backend: fakedisk, name: b, path: /b, capacity: 2GiB, breaker: *b}
        """
    )
    assert [tier.breaker.failures for tier in loaded.config.tiers] == [9, 9]


def test_the_environment_overrides_the_file() -> None:
    loaded = load(
        "cpu: {capacity: 20GiB}\nsalt: a\ntiers: [{backend: fakedisk, path: /a, capacity: 2GiB}]",
        LMCACHE_CORE_CPU__CAPACITY="8GiB",
        LMCACHE_CORE_CPU__HUGEPAGES="true",
        LMCACHE_CORE_SALT="0123",
        LMCACHE_CORE_LAYOUT="canonical",
        LMCACHE_CORE_TIERS__0__PATH="/nvme/kv",
        LMCACHE_CORE_TIERS__0__BREAKER__FAILURES="7",
        LMCACHE_CORE_TIERS__0__PATIENCE="3s",
        LMCACHE_CORE_METRICS__PORT="1234",
    )
    config = loaded.config
    assert config.cpu == CpuConfig(capacity=8 * GIB, hugepages=True)
    assert (config.salt, config.layout, config.metrics.port) == ("0123", "canonical", 1234)
    assert type(config.tiers[0].options.path) is str
    assert config.tiers[0].options.path == "/nvme/kv"
    assert config.tiers[0].options.patience == 3.0
    assert config.tiers[0].breaker == BreakerConfig(failures=7)
    assert shown(loaded)["tiers[0].path"] == ("/nvme/kv", "environment LMCACHE_CORE_TIERS__0__PATH")
    assert shown(loaded)["tiers[0].capacity"] == ("2GiB", "tiers.yaml:3")


def test_the_environment_alone_makes_tiers() -> None:
    variables = {
        "LMCACHE_CORE_TIERS__1__URL": "x://y",
        "LMCACHE_CORE_TIERS__1__BACKEND": "fakeremote",
        "LMCACHE_CORE_TIERS__0__CAPACITY": "2GiB",
        "LMCACHE_CORE_TIERS__0__PATH": "/a",
        "LMCACHE_CORE_TIERS__0__BACKEND": "fakedisk",
        "LMCACHE_CORE_TIERS__1__NODES__0": "one",
        "LMCACHE_CORE_TIERS__1__NODES__1": "two",
        "LMCACHE_CORE_TIERS__1__LABELS__ZONE": "eu",
        "LMCACHE_CORE_TIERS__1__POOL__CONNECTIONS": "9",
    }
    loaded = load_config(env=variables)
    assert [tier.backend for tier in loaded.config.tiers] == ["fakedisk", "fakeremote"]
    remote = loaded.config.tiers[1].options
    assert (remote.nodes, remote.labels, remote.pool.connections) == (["one", "two"], {"zone": "eu"}, 9)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "CPU__CAPCITY",
            "8GiB",
            "unknown key 'CAPCITY' in cpu; did you mean LMCACHE_CORE_CPU__CAPACITY?",
        ),
        ("CHUNK_TOKEN", "8", "unknown key 'CHUNK_TOKEN'; did you mean LMCACHE_CORE_CHUNK_TOKENS?"),
        ("CPU_CAPACITY", "8GiB", "unknown key 'CPU_CAPACITY'; did you mean LMCACHE_CORE_CPU__CAPACITY?"),
        ("METRICS_PORT", "80", "unknown key 'METRICS_PORT'; did you mean LMCACHE_CORE_METRICS__PORT?"),
        ("ZZZZ", "8", "unknown key 'ZZZZ'; known are LMCACHE_CORE_ + CALL_TIMEOUT, CHUNK_TOKENS, "),
        (
            "TIERS__0__PAHT",
            "/a",
            "unknown key 'PAHT' in tiers[0]; did you mean LMCACHE_CORE_TIERS__0__PATH?",
        ),
        ("TIERS__3__PATH", "/a", "there is no tiers[3]; the list has 1 entries, so the next is number 1"),
        ("TIERS__PATH", "/a", "tiers is a list; name the entry by its number, as in LMCACHE_CORE_TIERS__0__…"),
        ("TIERS", "[]", "tiers is a list; name the entry by its number"),
        ("TIERS__0", "x", "tiers[0] is a section; set its keys, as in LMCACHE_CORE_TIERS__0__BACKEND"),
        ("CPU", "8GiB", "cpu is a section; set its keys, as in LMCACHE_CORE_CPU__CAPACITY"),
        ("SALT__X", "8", "salt is one value and has no keys"),
        ("CPU__CAPACITY", "lots", "cpu.capacity: 'lots' is not a size; write a number of bytes"),
        ("CPU__HUGEPAGES", "maybe", "cpu.hugepages: 'maybe' is not possible; write true or false"),
        ("PAGE_TOKENS", "x", "page_tokens: 'x' is not possible; write a whole number of at least 1"),
        ("TIERS__0__WRITE", "thru", "tiers[0].write: 'thru' is not possible; write one of through, evict, never"),
        ("TIERS__1__PATH", "/a", "tiers[1] lacks the key 'backend'; write 'backend: NAME'"),
    ],
)
def test_a_wrong_override_is_told_by_its_name(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("tiers: [{backend: fakedisk, path: /a, capacity: 2GiB}]", **{f"LMCACHE_CORE_{variable}": value})
    assert str(error.value).startswith(f"environment LMCACHE_CORE_{variable}: {says}")


def test_variables_that_kubernetes_makes_of_a_service_are_left_alone() -> None:
    links = {
        "LMCACHE_CORE_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_CORE_SERVICE_PORT": "80",
        "LMCACHE_CORE_SERVICE_PORT_METRICS": "80",
        "LMCACHE_CORE_PORT": "tcp://10.0.0.1:80",
        "LMCACHE_CORE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "LMCACHE_CORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "LMCACHE_CORE_NODE_PORT_80_TCP_PROTO": "tcp",
    }
    assert load_config(env=links).config == Config()
    with pytest.raises(ConfigError, match="unknown key 'PORT'"):
        load_config(env={"LMCACHE_CORE_PORT": "80"})


def test_secrets_come_from_the_environment_and_files(work_directory: Path) -> None:
    (work_directory / "password").write_text("hunter2\n")
    loaded = load(
        f"""
        salt: ${{env:TENANT}}
        metrics: {{port: '${{env:PORT}}'}}
        tiers:
          - backend: fakeremote
            url: rediss://user:${{file:{work_directory}/password}}@cache
            password: literal
            nodes: [a, '${{env:TENANT}}', '$${{env:KEPT}}']
        """,
        TENANT="acme",
        PORT="99",
    )
    config = loaded.config
    options = config.tiers[0].options
    assert (config.salt, config.metrics.port) == ("acme", 99)
    assert (options.url, options.password) == ("rediss://user:hunter2@cache", "literal")
    assert options.nodes == ["a", "acme", "${env:KEPT}"]
    assert f"{options.url}" == "rediss://user:hunter2@cache"

    values = shown(loaded)
    assert values["salt"] == ("***", "tiers.yaml:2")
    assert values["metrics.port"][0] == "***"
    assert values["tiers[0].url"] == ("***", "tiers.yaml:6")
    assert values["tiers[0].password"] == ("***", "tiers.yaml:7")
    assert values["tiers[0].nodes"] == ("***", "tiers.yaml:8")
    assert values["tiers[0].labels"] == ("{}", "default")
    for text in (repr(loaded), repr(config), repr(config.tiers[0]), repr(options), str(show(loaded))):
        for secret in ("hunter2", "acme", "literal"):
            assert secret not in text


def test_keys_are_never_shown(work_directory: Path) -> None:
    first, second, third = (base64.b64encode(bytes([number]) * 32).decode() for number in range(3))
    (work_directory / "key").write_text(f"{first}\n")
    loaded = load(
        f"""
        tiers:
          - backend: fakeremote
            url: x
            cipher:
              key: ${{file:{work_directory}/key}}
              older: [{second}]
              tenants: {{acme: {third}}}
        """,
        LMCACHE_CORE_TIERS__0__CIPHER__TENANTS__UMBRELLA=first,
    )
    found = loaded.config.tiers[0].cipher
    assert found is not None
    assert found == CipherConfig(first, (second,), {"acme": third, "umbrella": first})
    values = shown(loaded)
    assert values["tiers[0].cipher.key"] == ("***", "tiers.yaml:6")
    assert values["tiers[0].cipher.older"] == ("***", "tiers.yaml:7")
    assert values["tiers[0].cipher.tenants"][0] == "***"
    for text in (repr(loaded), repr(loaded.config), repr(found), str(show(loaded)), str(found)):
        for secret in (first, second, third):
            assert secret not in text
    check(loaded.config)
    code = TierConfig(backend="x", cipher=CipherConfig("short"))
    with pytest.raises(InvalidSetting, match=r"cipher\.key: what is given (is not base64|has \d+ bytes)") as caught:
        check(Config(tiers=(code,)))
    assert "short" not in str(caught.value)
    wrong: Any = TierConfig(backend="x", cipher="key")  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"tiers\[0\]\.cipher: .*write CipherConfig"):
        check(Config(tiers=(wrong,)))


def test_a_reference_may_stand_in_an_override() -> None:
    loaded = load_config(env={"LMCACHE_CORE_SALT": "${env:TENANT}", "TENANT": "acme"})
    assert loaded.config.salt == "acme"
    assert shown(loaded)["salt"] == ("***", "environment LMCACHE_CORE_SALT")


def test_passwords_in_urls_are_masked_when_shown() -> None:
    loaded = load("tiers: [{backend: fakeremote, url: 'redis://me:hun/ter2@host:6379/0'}]")
    assert shown(loaded)["tiers[0].url"] == ("redis://me:***@host:6379/0", "tiers.yaml:1")
    assert "ter2" not in repr(loaded)
    assert "ter2" not in repr(load("salt: hunter2\n"))


def test_shares_of_owners() -> None:
    loaded = load(
        "tiers: [{backend: fakedisk, path: /a, capacity: 1TB}]\ntenant: acme\nshares:\n- tenant: acme\n  weight: 2\n"
        "  tiers: {fakedisk: 100GiB}\n- model: org/llama\n  cpu: 10GiB\n"
    )
    assert loaded.config.tenant == "acme"
    assert loaded.config.shares == (
        ShareConfig(tenant="acme", weight=2, tiers={"fakedisk": 100 * 2**30}),
        ShareConfig(model="org/llama", cpu=10 * 2**30),
    )
    assert shown(loaded)["shares[0].tiers"] == ("{fakedisk: 100GiB}", "tiers.yaml:6")
    assert shown(loaded)["shares[1].cpu"] == ("10GiB", "tiers.yaml:8")
    check(loaded.config)


def test_a_share_from_the_environment() -> None:
    env = {"LMCACHE_CORE_SHARES__0__TENANT": "acme", "LMCACHE_CORE_SHARES__0__CPU": "1GiB"}
    assert load_config("", env=env).config.shares == (ShareConfig(tenant="acme", cpu=2**30),)


def test_what_is_shown() -> None:
    loaded = load("cpu:\n  capacity: 20GiB\ntiers:\n- backend: fakedisk\n  path: /a\n  capacity: 500GB\n")
    assert [tuple(setting[:3]) for setting in show(loaded)] == [
        ("chunk_tokens", "256", "default"),
        ("page_tokens", "64", "default"),
        ("cpu.capacity", "20GiB", "tiers.yaml:2"),
        ("cpu.hugepages", "false", "default"),
        ("cpu.numa_nodes", "[]", "default"),
        ("cpu.policy", "lru", "default"),
        ("tiers[0].backend", "fakedisk", "tiers.yaml:4"),
        ("tiers[0].name", "fakedisk", "default"),
        ("tiers[0].capacity", "500GB", "tiers.yaml:6"),
        ("tiers[0].write", "through", "default"),
        ("tiers[0].admit", "always", "default"),
        ("tiers[0].min_prompt", "0", "default"),
        ("tiers[0].promote", "true", "default"),
        ("tiers[0].policy", "lru", "default"),
        ("tiers[0].read_timeout", "2s", "default"),
        ("tiers[0].write_timeout", "30s", "default"),
        ("tiers[0].concurrency", "8", "default"),
        ("tiers[0].hedge", "false", "default"),
        ("tiers[0].breaker.failures", "3", "default"),
        ("tiers[0].breaker.cooldown", "1s", "default"),
        ("tiers[0].breaker.max_cooldown", "30s", "default"),
        ("tiers[0].quarantine", "1GiB", "default"),
        ("tiers[0].codec", "none", "default"),
        ("tiers[0].cipher", "none", "default"),
        ("tiers[0].path", "/a", "tiers.yaml:5"),
        ("tiers[0].direct", "true", "default"),
        ("tiers[0].segment", "1GiB", "default"),
        ("tiers[0].patience", "none", "default"),
        ("tiers[0].mode", "fast", "default"),
        ("salt", "''", "default"),
        ("tenant", "''", "default"),
        ("shares", "[]", "default"),
        ("share_timeout", "1h", "default"),
        ("socket", "''", "default"),
        ("connect", "''", "default"),
        ("call_timeout", "1s", "default"),
        ("metrics.enabled", "false", "default"),
        ("metrics.host", "127.0.0.1", "default"),
        ("metrics.port", "9464", "default"),
        ("lease_timeout", "30s", "default"),
        ("retention_tokens", "4096", "default"),
        ("layout", "native", "default"),
        ("log_interval", "10s", "default"),
    ]


def test_what_is_shown_to_programs() -> None:
    loaded = load(
        """
        cpu: {capacity: 20GiB}
        salt: hunter2
        tiers:
        - {backend: fakedisk, path: /a, capacity: 2GiB, read_timeout: 250ms}
        - {backend: fakeremote, url: 'redis://u:hunter2@h', nodes: ['x://u:hunter2@h'], tokens: [hunter2]}
        - {backend: disk, path: [~/kv, /a/../b], capacity: 2GiB}
        """
    )
    plain = {setting.key: setting.plain for setting in show(loaded)}
    assert plain["cpu.capacity"] == 20 * GIB
    assert plain["cpu.hugepages"] is False
    assert plain["tiers[0].read_timeout"] == 0.25
    assert plain["tiers[0].patience"] is None
    assert plain["tiers[1].nodes"] == ["x://u:***@h"]
    assert plain["tiers[1].labels"] == {}
    assert plain["tiers[1].tokens"] == plain["salt"] == "***"
    assert plain["tiers[2].path"] == [os.path.expanduser("~/kv"), "/b"]
    assert shown(loaded)["tiers[2].path"][0] == f"[{os.path.expanduser('~/kv')}, /b]"
    assert "hunter2" not in repr(show(loaded))


def test_tiers_shown_without_any() -> None:
    assert shown(load(""))["tiers"] == ("[]", "default")


def test_a_configuration_made_in_code_can_be_checked() -> None:
    check(Config())
    with pytest.raises(InvalidSetting, match=r"chunk_tokens: 100 is not a multiple of page_tokens \(64\); write 128"):
        check(Config(chunk_tokens=100))
    tier = TierConfig("fakedisk")
    assert tier.name == "fakedisk"
    with pytest.raises(InvalidSetting, match=r"tiers\[1\]\.name: 'fakedisk' is already the name of tiers\[0\]"):
        check(Config(tiers=(tier, tier)))


def test_importing_the_structs_imports_no_parser_and_no_plugins() -> None:
    code = (
        "import sys, lmcache_core.config as c; c.Config()\n"
        "assert not {'yaml', 'pluggy', 'importlib.metadata'} & set(sys.modules), sorted(sys.modules)\n"
        "c.load_config({}); assert 'yaml' in sys.modules"
    )
    root = Path(__file__).parents[2]
    env = {key: value for key, value in os.environ.items() if not key.startswith("LMCACHE_CORE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
