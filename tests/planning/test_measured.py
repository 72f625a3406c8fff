"""Links from what a tier was measured to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import ConfigError
from lmcache_core.planning.measured import fit, read_measured

SIZES = (1 << 20, 8 << 20, 32 << 20)


def row(size: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"tier": "disk", "verb": "get", "size": size, "concurrency": 1, "gbs": size / seconds / 1e9} | more


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"rows": rows}))
    return file


def test_a_line_is_found_again() -> None:
    link = fit([(size, 2e-3 + size / 5e9) for size in SIZES])
    assert link.latency == pytest.approx(2e-3)
    assert link.bandwidth == pytest.approx(5e9)


def test_a_line_is_found_in_noise() -> None:
    noise = random.Random(3)
    points = [(size, (2e-3 + size / 5e9) * noise.uniform(0.95, 1.05)) for size in SIZES for _ in range(20)]
    link = fit(points)
    assert link.latency == pytest.approx(2e-3, rel=0.05)
    assert link.bandwidth == pytest.approx(5e9, rel=0.05)


def test_one_size_tells_a_bandwidth_alone() -> None:
    assert fit([(1000, 1.0), (1000, 1.0)]).seconds(5000) == pytest.approx(5.0)
    assert fit([(1000, 1.0)]).latency == 0


def test_a_latency_below_nothing_is_none() -> None:
    link = fit([(1000, 1.0), (2000, 2.2)])
    assert link.latency == 0
    assert 1000 / 1.1 < link.bandwidth < 1000


def test_bytes_that_take_no_time_tell_no_bandwidth() -> None:
    with pytest.raises(ConfigError, match=r"larger chunks take no longer; measure larger --sizes"):
        fit([(1000, 1.0), (2000, 0.9)])
    with pytest.raises(ConfigError, match="nothing was measured"):
        fit([])


def test_tiers_are_read_from_a_file_with_the_best_number_at_once(tmp_path: Path) -> None:
    rows = [row(size, 2e-3 + size / 1e9) for size in SIZES]
    rows += [row(size, 1e-3 + size / 4e9, concurrency=4) for size in SIZES]
    rows += [row(size, 1e-4 + size / 3e9, concurrency=8) for size in SIZES[:2]]
    rows += [row(size, 1e-4 + size / 9e9, verb="put") for size in SIZES]
    rows += [row(size, 5e-3 + size / 2e9, tier="redis", concurrency=2) for size in SIZES]
    disk, redis = read_measured(write(tmp_path, rows), 8 << 20)
    assert (disk.tier, disk.concurrency, disk.sizes) == ("disk", 4, 3)
    assert disk.link.latency == pytest.approx(1e-3)
    assert disk.link.bandwidth == pytest.approx(4e9)
    assert disk.off == pytest.approx(0, abs=1e-9)
    assert (redis.tier, redis.concurrency) == ("redis", 2)
    assert redis.link.latency == pytest.approx(5e-3)


def test_how_many_at_once_are_best_depends_on_the_size(tmp_path: Path) -> None:
    rows = [row(size, 1e-3 + size / 2e9) for size in SIZES]
    rows += [row(size, 1e-4 + size / 1e9, concurrency=4) for size in SIZES]
    file = write(tmp_path, rows)
    assert read_measured(file, 100_000)[0].concurrency == 4  # 0.2 ms, not 1.05
    assert read_measured(file, 10_000_000)[0].concurrency == 1  # 6 ms, not 10.1


def test_how_far_a_line_is_off_is_told(tmp_path: Path) -> None:
    rows = [row(1000, 1.0), row(1000, 3.0), row(1000, 3.0)]
    (found,) = read_measured(write(tmp_path, rows), 1000)
    # u = 1/t: what makes the parts that it is off smallest in squares is (1 + 1/9 + 1/9) / (1 + 1/3 + 1/3) a second
    assert found.link.seconds(1000) == pytest.approx(15 / 11)
    assert found.off == pytest.approx(1 - 15 / 33)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    rows = [row(size, 2e-3 + size / 1e9) for size in SIZES] + [row(1000, 1.0, tier="s3", gbs=None)]
    assert [each.tier for each in read_measured(write(tmp_path, rows), 1)] == ["disk"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no", "is no JSON: .*; write one with lmcache-core bench tier --json FILE"),
        ("[" * 100_000, "is no JSON: .*; write one with"),
        ("[]", "has no rows of tiers; write one with"),
        ('{"rows": 3}', "has no rows of tiers; write one with"),
        ('{"rows": [3]}', "has no rows of tiers; write one with"),
        ('{"rows": []}', "has no tier that was read; write one with"),
        ('{"rows": [{"verb": "get", "gbs": 1.0}]}', "row 0 has no tier, size and concurrency"),
        ('{"rows": [{"verb": "get", "gbs": "1", "tier": "a", "size": 1, "concurrency": 1}]}', "no rate in gbs"),
        ('{"rows": [{"verb": "get", "gbs": NaN, "tier": "a", "size": 1, "concurrency": 1}]}', "no rate in gbs"),
        ('{"rows": [{"verb": "get", "gbs": 1, "tier": "a", "size": -1, "concurrency": 1}]}', "that cannot be"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_measured(file, 1)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_measured(tmp_path / "nowhere", 1)
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match="larger than such a file can be"):
        read_measured(file, 1)


def test_a_tier_without_a_bandwidth_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tier 'disk', 1 at once: larger chunks take no longer"):
        read_measured(write(tmp_path, [row(1000, 1.0), row(2000, 0.9)]), 1)
