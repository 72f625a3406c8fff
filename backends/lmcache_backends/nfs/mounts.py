"""Which file system a directory is on. An unmounted mount point is an empty directory like any other, and what is
written there fills the machine's own drive, unseen by all other hosts."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

__all__ = ["Mount", "is_of_one_machine", "mount_of"]

_OF_ONE_MACHINE = frozenset(
    {"autofs", "bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk"}
    | {"fuse.fuse-overlayfs", "hfsplus", "iso9660", "jfs", "msdos", "nilfs2", "ntfs", "ntfs3", "overlay", "ramfs"}
    | {"reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs", "bpf", "cgroup", "cgroup2"}
    | {"configfs", "debugfs", "devpts", "mqueue", "proc", "pstore", "securityfs", "sysfs", "tracefs"}
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the kernel's list of mounts."""

    point: str
    kind: str
    source: str


def mount_of(fd: int) -> Mount | None:
    """What the open directory `fd` is on; None if this system does not tell."""
    with contextlib.suppress(OSError):
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="surrogateescape") as info:
            (wanted,) = [line.split()[1] for line in info if line.startswith("mnt_id:")] or [""]
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                place, _, what = line.partition(" - ")
                fields = place.split()
                if fields[0] == wanted:
                    kind, source, *_ = what.split()
                    return Mount(_plain(fields[4]), kind, _plain(source))
    return None


def is_of_one_machine(mount: Mount) -> bool:
    """Whether other hosts see nothing of it. What is mounted at / is the machine itself, of whatever kind."""
    return mount.point == os.sep or mount.kind in _OF_ONE_MACHINE


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
