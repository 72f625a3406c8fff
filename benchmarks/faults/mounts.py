"""File systems of one run: loop devices and tmpfs that can be filled, cut off and made read-only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.faults.campaign import until

__all__ = ["LoopMount", "Tmpfs", "run"]

PATIENCE = 20.0
MIB = 1 << 20


def run(*command: str | Path) -> str:
    """Raises `OSError` with what the program said."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class _Mounted:
    """Unmounts itself at the end."""

    where: Path
    mounted = False

    def umount(self) -> None:
        """As soon as nobody uses it. Raises `OSError`."""
        problem = ""

        def gone() -> bool:
            nonlocal problem
            try:
                run("umount", self.where)
            except OSError as error:
                problem = str(error)
                return False
            return True

        if not until(gone, PATIENCE):
            raise OSError(problem)
        self.mounted = False

    def __exit__(self, *exc: object) -> None:
        if self.mounted:
            run("umount", "--lazy", self.where)


class LoopMount(_Mounted):
    """A file system in a file, mounted at `where`."""

    def __init__(self, path: Path, kind: str = "xfs", size: int = 320 * MIB, options: str = "") -> None:
        self.where = path / "mount"
        self.where.mkdir()
        self._image = path / "image"
        self._kind = kind
        self._options = options
        with open(self._image, "wb") as file:
            file.truncate(size)
        run(f"mkfs.{kind}", "-q", self._image)

    def mount(self) -> None:
        options = ",".join(filter(None, ["loop", self._options]))
        run("mount", "-t", self._kind, "-o", options, self._image, self.where)
        self.mounted = True

    def cut_power(self) -> None:
        """From now on the file system does nothing, and forgets what it has not yet made durable. xfs only."""
        run("xfs_io", "-x", "-c", "shutdown", self.where)

    def __enter__(self) -> LoopMount:
        self.mount()
        return self


class Tmpfs(_Mounted):
    """A small file system in memory."""

    def __init__(self, path: Path, size: int) -> None:
        self.where = path / "mount"
        self.where.mkdir()
        self._size = size

    def fill(self) -> None:
        """Leave no room in it."""
        with open(self.where / "others", "wb", buffering=0) as others:
            try:
                while True:
                    others.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        """Undo `fill`."""
        (self.where / "others").unlink()

    def __enter__(self) -> Tmpfs:
        run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", self.where)
        self.mounted = True
        return self
