"""Drives that fail while the cache is open: real file systems on loop devices. Nothing is ever wrong, a failure or a
full disk is said, and opening again is all it takes when the drive is back."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_core.errors import BackendError
from lmcache_core.protocols import ChunkKey, ReadResult, WriteResult
from tests.backends.disk.kit import (
    KIB,
    MIB,
    OpenStore,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    get,
    opened,
    put,
    taken,
    use_up,
)

pytestmark = pytest.mark.needs_root
SMALL = 64 * KIB


def system(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


class Disk:
    """A file system of its own in a file."""

    def __init__(self, path: Path, kind: str, size: int) -> None:
        self.kind = kind
        self._image, self.path = path / "image", path / "disk"
        self.path.mkdir()
        with open(self._image, "wb") as file:
            file.truncate(size)
        system(f"mkfs.{kind}", "-q", self._image)

    def mount(self, how: str = "") -> None:
        system("mount", "-o", f"loop{how}", self._image, self.path)

    def unmount(self) -> None:
        system("umount", self.path)

    def again(self) -> None:
        """As after a restart of the host."""
        self.unmount()
        self.mount()

    def device(self) -> str:
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            (device,) = [line.split(" - ")[1].split()[1] for line in file if line.split()[4] == str(self.path)]
        return os.path.basename(device)


@contextmanager
def disk(path: Path, kind: str, size: int, how: str = "") -> Iterator[Disk]:
    for program in (f"mkfs.{kind}", "mount", "umount"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing")
    made = Disk(path, kind, size)
    try:
        made.mount(how)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a {kind} on a loop device cannot be mounted here: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        subprocess.run(["umount", "--lazy", made.path], check=False, capture_output=True)


def assert_never_wrong(store: OpenStore, *keys: ChunkKey, nbytes: int = SMALL) -> None:
    """Each is a miss, a failure, or the bytes that were stored."""
    for key in keys:
        number = int.from_bytes(key.page[:8], "big")
        try:
            found = get(store, key, nbytes)
        except BackendError:
            continue
        assert not isinstance(found, bytes) or found == chunk(number, nbytes).data


def test_the_kernel_makes_the_file_system_read_only_under_an_open_cache(tmp_path: Path) -> None:
    """As ext4 does after an error of the drive. A `remount` by hand is refused while files are open for writing."""
    with disk(tmp_path, "ext4", 64 * MIB, ",errors=remount-ro") as drive:
        trigger = Path("/sys/fs/ext4", drive.device(), "trigger_fs_error")
        if not trigger.exists():
            pytest.skip(f"{trigger} is missing, so no error can be made")
        held = [chunk(i, SMALL) for i in range(20)]
        with opened(drive.path, segment=MIB) as store:
            fill(store, *held)
            assert subprocess.run(
                ["mount", "-o", "remount,ro", drive.path], check=False, capture_output=True
            ).returncode
            trigger.write_text("1")
            for number in range(40, 60):
                with pytest.raises(BackendError, match=r"the file system is read-only|the drive reports an error"):
                    put(store, chunk(number, SMALL))
            with pytest.raises(BackendError, match=r"read-only|the drive reports"):
                store.delete([held[0].key])
            assert_holds(store, *held)
            assert_lacks(store, chunk(40, SMALL))
        with pytest.raises(BackendError, match="the file system is read-only"), opened(drive.path):
            pass
        drive.unmount()
        subprocess.run(["fsck.ext4", "-p", tmp_path / "image"], check=False, capture_output=True)
        drive.mount()
        with opened(drive.path, segment=MIB) as store:
            found = [c for c in held if store.contains(c.key)]
            assert_holds(store, *found)
            fill(store, *[chunk(i, SMALL) for i in range(40, 60)])
            assert_holds(store, *[chunk(i, SMALL) for i in range(40, 60)])


def test_a_path_is_remounted_read_only_between_openings(tmp_path: Path) -> None:
    path = tmp_path / "bound"
    path.mkdir()
    try:
        system("mount", "--bind", path, path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a bind mount is not possible here: {error.stderr.decode().strip()}")
    try:
        with opened(path) as store:
            fill(store, chunk(0))
            refused = subprocess.run(["mount", "-o", "bind,remount,ro", path], check=False, capture_output=True)
            assert refused.returncode, "files are open for writing"
            fill(store, chunk(1))
        system("mount", "-o", "bind,remount,ro", path)
        with pytest.raises(BackendError, match="the file system is read-only"), opened(path):
            pass
        system("mount", "-o", "bind,remount,rw", path)
        with opened(path) as store:
            assert_holds(store, chunk(0), chunk(1))
    finally:
        system("umount", path)


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_a_power_cut_loses_nothing_that_was_durable(tmp_path: Path, direct: str) -> None:
    if shutil.which("xfs_io") is None:
        pytest.skip("xfs_io is missing")
    held: list[int] = []
    with disk(tmp_path, "xfs", 320 * MIB) as drive:
        options = {"fsync": True, "segment": 2 * MIB, "direct": direct}
        with opened(drive.path / "kv", **options) as store:
            fill(store, *[chunk(i, SMALL) for i in range(40)])
            store.delete([chunk(i).key for i in range(0, 40, 2)])
            fill(store, *[chunk(i, SMALL) for i in range(100, 120)])
            held = [*range(1, 40, 2), *range(100, 120)]
            system("xfs_io", "-x", "-c", "shutdown", drive.path)
            for number in range(200, 205):
                with pytest.raises(BackendError, match="the drive reports an error"):
                    put(store, chunk(number, SMALL))
            with pytest.raises(BackendError, match="the drive reports an error"):
                store.delete([chunk(1).key])
            assert_never_wrong(store, *[chunk(i).key for i in (*held, *range(200, 205))])
        with pytest.raises(BackendError, match="the drive reports an error"), opened(drive.path / "kv"):
            pass
        drive.again()
        with opened(drive.path / "kv", **options) as store:
            assert_holds(store, *[chunk(i, SMALL) for i in held])
            assert_lacks(store, *[chunk(i, SMALL) for i in (*range(0, 40, 2), *range(200, 205))])
            assert store.count("log_records_damaged") == store.count("entries_lost") == 0
            fill(store, *[chunk(i, SMALL) for i in range(200, 205)])
            assert_holds(store, *[chunk(i, SMALL) for i in range(200, 205)])


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_file_system_that_others_fill_is_full_and_works_on(tmp_path: Path, kind: str) -> None:
    with disk(tmp_path, kind, (48 if kind == "ext4" else 320) * MIB) as drive:
        options = {"capacity": 2**30, "segment": 4 * MIB}
        held = [chunk(i, MIB) for i in range(6)]
        with opened(drive.path / "kv", **options) as store:
            fill(store, *held)
            with pytest.raises(OSError, match="No space left"):
                use_up(drive.path / "others")
            results = put(store, *[chunk(i, MIB) for i in range(100, 130)])
            assert results[-1] is WriteResult.FULL
            stored = [chunk(100 + i, MIB) for i, result in enumerate(results) if result is WriteResult.STORED]
            assert_holds(store, *held, *stored)
            store.touch([c.key for c in held])
            store.delete([c.key for c in held[:4]])
            fill(store, chunk(200, MIB))
            assert_holds(store, *held[4:], *stored, chunk(200, MIB))
        with opened(drive.path / "kv", **options) as store:
            assert_holds(store, *held[4:], *stored, chunk(200, MIB))
            assert_lacks(store, *held[:4])
            # Only this gives the room back before it returns: xfs does what an unlink leaves to do in the background.
            os.truncate(drive.path / "others", 0)
            fill(store, *held[:4])
            assert_holds(store, *held)


def test_a_drive_that_is_pulled_is_found_again(tmp_path: Path) -> None:
    """Unmounted lazily, so that nothing that is open notices, and what lies below the mount point shows."""
    with disk(tmp_path, "ext4", 64 * MIB) as drive:
        (drive.path / "kv").mkdir()
        with opened(drive.path / "kv") as store:
            fill(store, chunk(0))
            system("umount", "--lazy", drive.path)
            with pytest.raises(BackendError, match=r"No such file or directory|was removed while in use"):
                put(store, chunk(1))
            assert_holds(store, chunk(0))
        drive.mount()
        with opened(drive.path / "kv") as store:
            assert_holds(store, chunk(0))
            assert_lacks(store, chunk(1))
            fill(store, chunk(1))
            assert get(store, chunk(2).key) is ReadResult.MISS


def test_a_capacity_beyond_the_file_system_counts_as_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """500TiB written for 500GiB: the first chunk must not take the whole drive."""
    with disk(tmp_path, "ext4", 64 * MIB) as drive:
        with opened(drive.path, capacity=500 * 2**40, min_free="10%") as store:
            fill(store, *[chunk(i, SMALL) for i in range(3)])
            capacity = store.usage().capacity
            assert capacity is not None
            assert 40 * MIB < capacity < 64 * MIB
            assert taken(drive.path) < capacity // 8
        (record,) = [record for record in caplog.records if "the capacity is" in record.message]
        assert "the capacity is 500TiB there, but the file system has" in record.message


def test_a_file_system_that_others_have_filled_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path, "ext4", 64 * MIB) as drive:
        (drive.path / "of others").write_bytes(bytes(30 * MIB))
        with opened(drive.path, capacity=30 * MIB, segment=MIB, min_free=10 * MIB) as store:
            results = put(store, *[chunk(i, SMALL) for i in range(300)])
            assert results.count(WriteResult.FULL) > 50
            assert store.count("min_free_reached") > 0
        said = [record.message for record in caplog.records if "is down to min_free" in record.message]
        assert len(said) == 1
        assert "Remove what else lies there, or lower capacity or min_free" in said[0]
