"""Whatever is written, the answer is a configuration or a `ConfigError`, and never another exception."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.config import LoadedConfig, load_config, migrate, show
from lmcache_core.errors import ConfigError

relaxed = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

WORDS = [
    *(
        "cpu",
        "tiers",
        "capacity",
        "backend",
        "fakedisk",
        "fakeremote",
        "path",
        "url",
        "nodes",
        "pool",
        "labels",
        "name",
    ),
    *(
        "breaker",
        "failures",
        "write",
        "never",
        "salt",
        "metrics",
        "port",
        "20GiB",
        "-1s",
        "2s",
        "${env:A}",
        "${env:",
        "$${",
    ),
    *("chunk_size", "remote_url", "redis://a:b@c", "local_disk", "max_local_disk_size", "extra_config", "cache_policy"),
]
scalars = (
    st.sampled_from(WORDS)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


def attempt(source: object, **env: str) -> LoadedConfig | None:
    try:
        loaded = load_config(source, env={"A": "1", **env})  # type: ignore[arg-type]  # that is the test
    except ConfigError:
        return None
    assert all(setting.key and setting.source for setting in show(loaded))
    assert repr(loaded)
    return loaded


@relaxed
@given(st.text(st.sampled_from(list("abc:-[]{}&*!|>'\"%@` \t\n\r#,?\\0\x00\x85\ufeff$")), max_size=60))
def test_any_text(text: str) -> None:
    attempt(text + "\n")
    with contextlib.suppress(ConfigError):
        migrate(text)


@relaxed
@given(st.dictionaries(st.sampled_from(WORDS), trees, max_size=6))
def test_any_tree(tree: dict[str, object]) -> None:
    attempt(tree)
    text = yaml.safe_dump(tree)
    attempt(text)
    try:
        migrated = migrate(text)
    except ConfigError:
        return
    load_config(migrated.yaml_text, env={})


@relaxed
@given(
    st.dictionaries(
        st.lists(st.sampled_from([*map(str.upper, WORDS), "0", "1", "7", ""]), min_size=1, max_size=4).map("__".join),
        st.sampled_from(WORDS),
        max_size=4,
    ),
    st.sampled_from(["", "tiers: [{backend: fakeremote, url: a}]\n", "cpu: 5\n", "tiers: {a: 1}\n", "tiers: [5]\n"]),
)
def test_any_variables(variables: dict[str, str], text: str) -> None:
    attempt(text, **{f"LMCACHE_CORE_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize("source", [5, b"cpu: {}", ["cpu"], object()])
def test_a_source_of_another_type(source: object) -> None:
    with pytest.raises(ConfigError, match="a configuration is read from a path, text or a mapping"):
        load_config(source, env={})  # type: ignore[arg-type]  # that is the test
