"""What users write, and what it comes to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk import DiskOptions
from lmcache_core.config import load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import (
    CountsEvents,
    Describes,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
)

KIB, MIB, GIB, TIB = (2**n for n in (10, 20, 30, 40))


def test_the_plugin_is_found_by_its_name() -> None:
    plugin = load_backend("disk")
    assert plugin.options_type is DiskOptions
    backend = plugin.create(convert({"path": "/nvme/kv", "capacity": "500GiB"}, DiskOptions))
    for capability in (StorageBackend, Scannable, RemembersUse, ReportsUsage, CountsEvents, Describes):
        assert isinstance(backend, capability)


def test_units_and_percentages() -> None:
    written = {"path": ["/a", "/b/"], "capacity": "2TiB", "segment": "512MiB", "min_free": "20GiB"}
    options = convert(written, DiskOptions)
    assert options.paths() == ["/a", "/b"]
    assert options.share() == TIB
    assert options.segment_size() == 512 * MIB
    assert options.keep_free(10 * TIB) == 20 * GIB
    assert convert({**written, "min_free": " 2.5% "}, DiskOptions).keep_free(1000) == 25
    assert DiskOptions(path="/a", capacity=TIB).keep_free(1000) == 50


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [(4096, 4096), (MIB, 64 * KIB), (GIB, 64 * MIB), (100 * GIB, GIB), (500 * GIB, 2 * GIB), (10 * TIB, 40 * GIB)],
)
def test_segments_fit_the_capacity(capacity: int, segment: int) -> None:
    assert DiskOptions(path="/a", capacity=capacity).segment_size() == pytest.approx(segment, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": []}, "path is empty"),
        ({"path": "relative/cache"}, "must be absolute"),
        ({"path": ["/a/b", "/a/b/"]}, "twice"),
        ({"capacity": 100}, "capacity 100B holds nothing; the least is 4KiB, and of use are some GiB, as in 500GiB"),
        ({"segment": 10}, "segment 10B is too small"),
        ({"path": ["/a", "b"]}, "'b' must be absolute"),
        ({"path": "/a\0b"}, r"'/a\\x00b' has a character that no name of a file can have"),
        ({"path": ["/a", "/b\ud800"]}, r"'/b\\ud800' has a character that no name of a file can have"),
        ({"min_free": "lots"}, "write 20GiB or 5%"),
        ({"min_free": "100%"}, "write 20GiB or 5%"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"path": "/cache", "capacity": MIB} | changes
    with pytest.raises(ConfigError, match=message):
        DiskOptions(**wanted)
    lines = [f"{key}: {json.dumps(value)}" for key, value in wanted.items()]
    file = tmp_path / "node.yaml"
    file.write_text("tiers:\n  - backend: disk\n" + "".join(f"    {line}\n" for line in lines))
    (key,) = changes
    where = re.escape(f"{file}:{3 + list(wanted).index(key)}: ")
    with pytest.raises(ConfigError, match=f"^{where}.*{message}"):
        load_config(file)
