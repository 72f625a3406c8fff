"""Plugins are found in real distribution metadata, alone with their hooks, and every mistake is told by name."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from lmcache_core.errors import ConfigError, LMCacheError, PluginError
from lmcache_core.plugins import BackendInfo, list_backends, load_backend, load_transfer

GOOD = """
    from lmcache_core.hookspecs import hookimpl
    from lmcache_core.units import ByteSize
    import msgspec

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        url: str
        "Where it listens."
        capacity: ByteSize = 2**30
        "Bytes it may hold."

    class Backend:
        def __init__(self, options): self.options = options
        async def open(self): ...
        async def close(self): ...
        async def contains(self, keys): ...
        async def read(self, keys, into): ...
        async def write(self, chunks): ...
        async def delete(self, keys): ...

    @hookimpl
    def lmcache_backend_options():
        return Options

    @hookimpl
    def lmcache_create_backend(options):
        return Backend(options)
"""


class Site:
    """A directory on `sys.path` that distributions are installed into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: list[str] = []

    def install(self, distribution: str, source: str, entry_points: str) -> None:
        module = distribution.replace("-", "_")
        (self.root / f"{module}.py").write_text(dedent(source))
        info = self.root / f"{module}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(dedent(entry_points))
        self.modules.append(module)
        importlib.invalidate_caches()

    def backend(self, distribution: str, source: str, name: str) -> None:
        module = distribution.replace("-", "_")
        self.install(distribution, source, f"[lmcache_core.backends]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    site = Site(tmp_path)
    load_backend.cache_clear()
    load_transfer.cache_clear()
    yield site
    load_backend.cache_clear()
    load_transfer.cache_clear()
    for module in site.modules:
        sys.modules.pop(module, None)


def info(name: str) -> BackendInfo:
    return next(info for info in list_backends() if info.name == name)


def error_of(name: str) -> str:
    with pytest.raises(PluginError) as error:
        load_backend(name)
    return str(error.value)


def test_a_third_party_backend_is_loaded_by_name(site: Site) -> None:
    site.backend("acme-kv", GOOD, "acme")
    assert "acme_kv" not in sys.modules
    plugin = load_backend("acme")
    assert plugin.name == "acme"
    options = plugin.options_type(url="x://y")
    backend = plugin.create(options)
    assert getattr(backend, "options") is options  # noqa: B009
    assert load_backend("acme") is plugin


def test_listing_shows_distribution_version_and_options(site: Site) -> None:
    site.backend("acme-kv", GOOD, "acme")
    found = info("acme")
    assert (found.distribution, found.version, found.error) == ("acme-kv", "1.5", None)
    assert [(field.key, field.type, field.default, field.description) for field in found.options] == [
        ("url", "text", "required", "Where it listens."),
        ("capacity", "size", "1GiB", "Bytes it may hold."),
    ]


def test_a_hook_call_reaches_the_named_plugin_only(site: Site) -> None:
    site.backend("acme-one", GOOD, "one")
    site.backend("acme-two", GOOD.replace("Options", "OtherOptions"), "two")
    assert load_backend("one").options_type.__name__ == "Options"
    assert load_backend("two").options_type.__name__ == "OtherOptions"
    assert load_backend("one").options_type.__module__ == "acme_one"


def test_an_unknown_name_lists_what_is_installed(site: Site) -> None:
    site.backend("acme-kv", GOOD, "acme")
    message = error_of("acmee")
    assert "there is no backend 'acmee' (did you mean 'acme'?); installed are: acme" in message


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("valkey", "; write 'backend: redis', which is for Valkey too"),
        ("Redis", " (did you mean 'redis'?)"),
        ("DISK", " (did you mean 'disk'?)"),
        ("dsik", " (did you mean 'disk'?)"),
        ("file", "; write 'backend: disk' for a drive of this host, 'backend: nfs' for a file system that hosts share"),
        ("fs", "; write 'backend: disk' for a drive of this host, 'backend: nfs' for a file system that hosts share"),
        ("local_disk", "; write 'backend: disk'"),
        ("local", "; write 'backend: disk'"),
        ("lustre", "; write 'backend: nfs', which is for any file system that hosts share"),
        ("memory", "; memory is no tier: write 'cpu: {capacity: 20GiB}', which stands beside 'tiers'"),
        ("RAM", "; memory is no tier: write 'cpu: {capacity: 20GiB}', which stands beside 'tiers'"),
        ("s3express", "; write 'backend: s3', which is for S3 Express too"),
        ("s3-express", "; write 'backend: s3', which is for S3 Express too"),
        ("minio", "; write 'backend: s3', which is for any server that speaks S3"),
        ("google", "; write 'backend: gcs'"),
        ("zebra", ""),
    ],
)
def test_a_name_by_which_others_know_a_backend(name: str, advice: str) -> None:
    assert error_of(name).startswith(f"there is no backend {name!r}{advice}; installed are: ")


def test_what_others_are_known_by_may_be_a_name_of_its_own(site: Site) -> None:
    site.backend("acme-kv", GOOD, "valkey")
    assert load_backend("valkey").name == "valkey"


def test_nothing_is_advised_that_is_not_installed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme-kv", GOOD, "acme")
    acme = importlib.metadata.entry_points(group="lmcache_core.backends", name="acme")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: acme)
    assert error_of("valkey") == "there is no backend 'valkey'; installed are: acme"


@pytest.mark.parametrize("name", ["infinistore"])
def test_a_known_name_that_this_version_lacks(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme-kv", GOOD, "redisk")
    near = importlib.metadata.entry_points(group="lmcache_core.backends", name="redisk")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: near)
    assert error_of(name) == (
        f"there is no backend {name!r}; this version of lmcache-core has no such backend; installed are: redisk"
    )


@pytest.mark.parametrize("failure", ["ConfigError", "BackendError", "ValueError"])
def test_errors_do_not_show_secrets(site: Site, failure: str) -> None:
    source = GOOD.replace("url: str", "url: str\n        key: Secret").replace("ByteSize\n", "ByteSize, Secret\n", 1)
    name = failure if failure == "ValueError" else f"errors.{failure}"
    told = f"raise {name}(f'no {{options.url}} with {{options.key}}')"
    source = source.replace("return Backend(options)", f"from lmcache_core import errors\n        {told}")
    site.backend("acme-kv", source, "acme")
    plugin = load_backend("acme")
    options = plugin.options_type(url="redis://u:hunter2@h", key="sesame")
    with pytest.raises(LMCacheError) as error:
        plugin.create(options)
    assert "no redis://u:***@h with ***" in str(error.value)
    assert error.value.__suppress_context__
    assert isinstance(error.value, ConfigError) is (failure == "ConfigError")


def test_a_mistake_in_a_plugin_does_not_show_passwords_of_urls(site: Site) -> None:
    site.backend("acme-kv", "raise RuntimeError('no redis://u:hunter2@h')", "acme")
    assert error_of("acme").endswith("cannot be imported: RuntimeError: no redis://u:***@h")
    assert "hunter2" not in error_of("redis://u:hunter2@h")


def test_two_distributions_with_one_name(site: Site) -> None:
    site.backend("acme-one", GOOD, "acme")
    site.backend("acme-two", GOOD, "acme")
    message = error_of("acme")
    assert "backend 'acme' is provided by acme-" in message
    assert "acme-one (acme_one)" in message
    assert "acme-two (acme_two)" in message
    assert "uninstall all but one" in message
    assert info("acme").error == message
    assert sorted(info("acme").distribution.split(", ")) == ["acme-one", "acme-two"]


def test_a_plugin_that_cannot_be_imported_does_not_hide_the_others(site: Site) -> None:
    site.backend("acme-kv", GOOD, "acme")
    site.backend("broken-kv", "raise RuntimeError('no licence')", "broken")
    message = error_of("broken")
    assert message == ("backend 'broken' (broken_kv, from broken-kv): cannot be imported: RuntimeError: no licence")
    assert info("broken").error == message
    assert info("acme").error is None
    assert load_backend("acme").name == "acme"


def test_a_missing_dependency_says_which_extra(site: Site) -> None:
    site.backend("acme-kv", "import no_such_client", "acme")
    problem = (
        "backend 'acme' (acme_kv, from acme-kv): cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_client'"
    )
    assert error_of("acme") == problem
    with (site.root / "acme_kv-1.5.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Provides-Extra: acme\nRequires-Dist: no-such-client; extra == 'acme'\n")
    assert error_of("acme") == f"{problem}; to install what it needs: pip install 'acme-kv[acme]'"


def test_listing_shows_what_an_extra_lacks(site: Site) -> None:
    site.backend("acme-kv", GOOD, "acme")
    assert (info("acme").lacks, info("acme").extra) == ((), "")
    with (site.root / "acme_kv-1.5.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Provides-Extra: acme\nRequires-Dist: no-such-client>=3; extra == 'acme'\n")
    assert (info("acme").lacks, info("acme").extra) == (("no-such-client",), "acme-kv[acme]")
    assert info("acme").error is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "def lmcache_create_backend",
            "def lmcache_create_backnd",
            "there is no hook 'lmcache_create_backnd'; did you mean 'lmcache_create_backend'?",
        ),
        ("def lmcache_create_backend", "def make_it", "there is no hook 'make_it'"),
        (
            "@hookimpl\n    def lmcache_create_backend",
            "def lmcache_create_backend",
            "lmcache_create_backend is not marked as a hook; mark it with @lmcache_core.hookspecs.hookimpl",
        ),
        (
            "@hookimpl\n    def lmcache_create_backend",
            "def other",
            "it has no hook lmcache_create_backend; define it",
        ),
        ("def lmcache_create_backend(options)", "def lmcache_create_backend(option)", "option"),
        ("return Options", "return nonsense", "lmcache_backend_options failed: NameError: name 'nonsense'"),
        ("return Options", "return 5", "lmcache_backend_options returned 5; it must return a msgspec.Struct type"),
        (", forbid_unknown_fields=True", "", "declare Options with forbid_unknown_fields=True"),
        ("url: str", "policy: str", "option 'policy' is a key of every tier; rename it"),
    ],
)
def test_a_mistake_in_a_plugin_is_named(site: Site, old: str, new: str, says: str) -> None:
    assert old in GOOD
    site.backend("acme-kv", GOOD.replace(old, new), "acme")
    message = error_of("acme")
    assert message.startswith("backend 'acme' (acme_kv, from acme-kv): ")
    assert says in message


def test_what_is_created_must_be_a_backend(site: Site) -> None:
    site.backend("acme-kv", GOOD.replace("async def delete(self, keys): ...", ""), "acme")
    plugin = load_backend("acme")
    with pytest.raises(PluginError, match=r"returned a Backend without \['delete'\]"):
        plugin.create(plugin.options_type(url="x"))


def test_a_verb_that_is_none_is_lacking(site: Site) -> None:
    site.backend("acme-kv", GOOD.replace("async def delete(self, keys): ...", "delete = None"), "acme")
    plugin = load_backend("acme")
    with pytest.raises(PluginError, match=r"returned a Backend without \['delete'\]"):
        plugin.create(plugin.options_type(url="x"))


def test_a_failure_is_not_remembered(site: Site) -> None:
    error_of("acme")
    site.backend("acme-kv", GOOD, "acme")
    assert load_backend("acme").name == "acme"


def test_transfers_have_a_group_of_their_own(site: Site) -> None:
    source = """
        from lmcache_core.hookspecs import hookimpl

        @hookimpl
        def lmcache_create_transfer(options):
            return ("transfer", options["device"])
    """
    site.install("acme-mover", source, "[lmcache_core.transfers]\nmover = acme_mover\n")
    made: object = load_transfer("mover").create({"device": 3})
    assert made == ("transfer", 3)
    assert "there is no backend 'mover'" in error_of("mover")
    with pytest.raises(PluginError, match=r"there is no transfer 'moover' \(did you mean 'mover'\?\); i"):
        load_transfer("moover")
