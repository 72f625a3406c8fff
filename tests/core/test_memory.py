"""Memory that can be taken, by what a machine and its cgroups say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmcache_core.memory import available_memory

MIB = 1 << 20
FREE = 1000 * MIB
UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""
V2 = "35 24 0:30 {top} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory"
CPU = "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


def machine(root: Path, groups: str = "", mounts: str = "") -> Path:
    """A root directory with `/proc`: 1,000 MiB are free."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemFree: 5 kB\nMemAvailable: {FREE // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(f"22 27 0:21 / /proc rw - proc proc rw\n{CPU}\n{mounts}\n")
    return root


def group(root: Path, path: str, files: Mapping[str, int | str]) -> None:
    """One cgroup; numbers are of MiB."""
    directory = root / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name).write_text(f"{value * MIB if isinstance(value, int) else value}\n")


def test_without_cgroups_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == FREE
    assert available_memory(tmp_path / "nowhere") is None
    assert available_memory() is not None


def test_version_2_of_a_container_is_the_top_of_what_is_mounted(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n", V2.format(top="/", mount="/sys/fs/cgroup"))
    group(tmp_path, "/sys/fs/cgroup", {"memory.max": 300, "memory.current": 100})
    assert available_memory(tmp_path) == 200 * MIB


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"a": "max", "b": "max", "c": "max"}, 1000),
        ({"a": "max", "b": "max", "c": 300}, 290),
        ({"a": 500, "b": "max", "c": "max"}, 400),
        ({"a": 500, "b": 200, "c": "max"}, 150),
        ({"a": 150, "b": 200, "c": 300}, 50),
        ({"a": 5000, "b": 4000, "c": 3000}, 1000),
        ({"a": 90, "b": 4000, "c": 3000}, 0),
    ],
)
def test_of_nested_groups_the_lowest_limit_counts(tmp_path: Path, limits: dict[str, int | str], left: int) -> None:
    machine(tmp_path, "0::/a/b/c\n", V2.format(top="/", mount="/sys/fs/cgroup"))
    group(tmp_path, "/sys/fs/cgroup", {"memory.stat": "inactive_file 5\n"})  # the top has neither of the two
    group(tmp_path, "/sys/fs/cgroup/a", {"memory.max": limits["a"], "memory.current": 100})
    group(tmp_path, "/sys/fs/cgroup/a/b", {"memory.max": limits["b"], "memory.current": 50})
    group(tmp_path, "/sys/fs/cgroup/a/b/c", {"memory.max": limits["c"], "memory.current": 10})
    group(tmp_path, "/sys/fs/cgroup/a/other", {"memory.max": 1, "memory.current": 0})
    assert available_memory(tmp_path) == left * MIB


def test_pages_of_files_that_nobody_uses_are_free(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a\n", V2.format(top="/", mount="/sys/fs/cgroup"))
    stat = f"anon 1\nfile 9\ninactive_file {70 * MIB}\nactive_file 3"
    group(tmp_path, "/sys/fs/cgroup/a", {"memory.max": 300, "memory.current": 100, "memory.stat": stat})
    assert available_memory(tmp_path) == 270 * MIB


@pytest.mark.parametrize("beside", ["", "0::/\n"], ids=["alone", "with version 2 beside it"])
def test_version_1(tmp_path: Path, beside: str) -> None:
    mounts = V1.format(top="/", mount="/sys/fs/cgroup/memory")
    mounts += "\n" + V2.format(top="/", mount="/sys/fs/cgroup/unified")
    machine(tmp_path, f"4:cpu,cpuacct:/x\n3:memory:/slice/unit\n1:name=systemd:/x\n{beside}", mounts)
    unlimited: dict[str, int | str] = {"memory.limit_in_bytes": str(UNLIMITED), "memory.usage_in_bytes": 2000}
    group(tmp_path, "/sys/fs/cgroup/memory", unlimited)
    group(tmp_path, "/sys/fs/cgroup/memory/slice", {"memory.limit_in_bytes": 400, "memory.usage_in_bytes": 150})
    group(tmp_path, "/sys/fs/cgroup/memory/slice/unit", unlimited)
    group(tmp_path, "/sys/fs/cgroup/unified", {"cgroup.procs": ""})
    assert available_memory(tmp_path) == 250 * MIB
    stat = f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n"
    files: dict[str, int | str] = {"memory.limit_in_bytes": 200, "memory.usage_in_bytes": 110, "memory.stat": stat}
    group(tmp_path, "/sys/fs/cgroup/memory/slice/unit", files)
    assert available_memory(tmp_path) == 190 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/", "/../other", "/elsewhere"])
def test_a_container_whose_groups_are_named_as_the_host_names_them(tmp_path: Path, path: str) -> None:
    """Only the container's own group is mounted, at the place of the top."""
    machine(tmp_path, f"3:memory:{path}\n", V1.format(top="/docker/abc", mount="/sys/fs/cgroup/memory"))
    group(tmp_path, "/sys/fs/cgroup/memory", {"memory.limit_in_bytes": 300, "memory.usage_in_bytes": 100})
    assert available_memory(tmp_path) == 200 * MIB


def test_another_place_and_a_name_with_a_space(tmp_path: Path) -> None:
    machine(tmp_path, "0::/my unit\n", V2.format(top="/", mount="/mnt/c\\040g"))
    group(tmp_path, "/mnt/c g/my unit", {"memory.max": 300, "memory.current": 100})
    assert available_memory(tmp_path) == 200 * MIB


@pytest.mark.parametrize("told", ["", "many", "-5", "\xff\xfe"])
def test_what_makes_no_sense_is_no_limit(tmp_path: Path, told: str) -> None:
    machine(tmp_path, "0::/a\nnonsense\n", V2.format(top="/", mount="/sys/fs/cgroup") + "\nnonsense\n1 2 - cgroup2")
    group(tmp_path, "/sys/fs/cgroup/a", {"memory.max": told, "memory.current": 100})
    assert available_memory(tmp_path) == FREE
