"""What a backend's extra asks for, found without importing anything."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from lmcache_core.extras import extra_of, lacking


def installed(site: Path, name: str, *lines: str) -> Distribution:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines, ""]))
    importlib.invalidate_caches()
    return importlib.metadata.distribution(name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


ACME = (
    "Provides-Extra: Acme_KV",
    "Provides-Extra: more",
    "Requires-Dist: msgspec>=0.18",
    "Requires-Dist: never-without",
    "Requires-Dist: acme.client>=2,<3; extra == 'acme-kv'",
    'Requires-Dist: acme-fast[tls] (>=1) ; (extra == "acme-kv")',
    "Requires-Dist: acme-on-windows; sys_platform == 'win32' and extra == 'acme-kv'",
    "Requires-Dist: acme-gpu-cu12>=1.0; extra == 'acme-kv'",
    "Requires-Dist: pluggy; extra == 'acme-kv'",
    "Requires-Dist: elsewhere; extra == 'more'",
)


def test_what_an_extra_asks_for_and_is_not_there(site: Path) -> None:
    dist = installed(site, "acme", *ACME)
    assert extra_of(dist, "acme_kv") == "acme[acme_kv]"
    assert lacking(dist, "acme_kv") == ("acme.client", "acme-fast", "acme-gpu-cu12")
    installed(site, "acme_client")
    assert lacking(dist, "acme-kv") == ("acme-fast", "acme-gpu-cu12")
    (site / "acme_fast.py").write_text("raise AssertionError('it is not imported')")
    importlib.invalidate_caches()
    assert lacking(dist, "acme_kv") == ("acme-gpu-cu12",), "a module alone, without metadata, will do"
    assert "acme_fast" not in sys.modules


@pytest.mark.parametrize("other", ["acme-gpu", "acme_gpu_cu13", "ACME-gpu-non-cuda"])
def test_another_build_for_cuda_will_do(site: Path, other: str) -> None:
    dist = installed(site, "acme", "Provides-Extra: gpu", "Requires-Dist: acme-gpu-cu12; extra == 'gpu'")
    assert lacking(dist, "gpu") == ("acme-gpu-cu12",)
    installed(site, other)
    assert lacking(dist, "gpu") == ()


def test_a_backend_without_an_extra_lacks_nothing(site: Path) -> None:
    dist = installed(site, "acme", *ACME)
    assert (extra_of(dist, "cloudy"), lacking(dist, "cloudy")) == ("", ())
    assert (extra_of(None, "cloudy"), lacking(None, "cloudy")) == ("", ())
    plain = installed(site, "plain")
    assert (extra_of(plain, "plain"), lacking(plain, "plain")) == ("", ())


def test_our_own_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.metadata.distribution("lmcache-core")
    backends = ("azure", "cpu", "disk", "gcs", "gds", "mooncake", "nfs", "nixl", "redis", "s3")
    with_extra = {name for name in backends if extra_of(own, name)}
    assert with_extra == {"azure", "gcs", "gds", "mooncake", "nixl", "redis", "s3"}
    assert extra_of(own, "gds") == "lmcache-core[gds]"

    def nothing(name: str) -> Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert {name: lacking(own, name) for name in backends} == {
        "azure": ("obstore",),
        "cpu": (),
        "disk": (),
        "gcs": ("obstore",),
        "gds": ("kvikio-cu12",),
        "mooncake": ("mooncake-transfer-engine-non-cuda",),
        "nfs": (),
        "nixl": ("nixl-cu12",),
        "redis": ("redis",),
        "s3": ("aioboto3", "obstore"),
    }
