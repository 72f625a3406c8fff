"""GlusterFS: a brick and mounts of it that know of each other by the network only, as those of several hosts would.

Server, client and translators are those of a plain volume, as `gluster volume create` puts them together; glusterd,
which would write the same files, is left out: it wants a fixed port and the machine's directories for itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.chaos import Chaos, chaos
from tests.servers.process import Process, accepts, free_ports, running

__all__ = ["Mount", "Volume", "lacking", "volume"]

_PROGRAMS = {"glusterfsd": "glusterfs-server", "glusterfs": "glusterfs-client", "fusermount3": "fuse3"}
_TOP = "kv"


def lacking() -> str:
    """What is missing, and how to get it; empty if nothing is."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program, path=path) is None]
    if missing:
        return f"GlusterFS is missing: apt-get install {' '.join(missing)}"
    if os.geteuid():
        return "root is missing: GlusterFS is mounted"
    return "" if os.path.exists("/dev/fuse") else "/dev/fuse is missing: GlusterFS is mounted by FUSE"


@dataclass
class Mount:
    """A mount, and the client process behind it: frozen, the mount hangs."""

    path: Path
    process: Process

    def freeze(self) -> None:
        """Let it hang. Returns when none of its threads runs: what one of them has taken from the kernel before it
        stops cannot be given up by whoever asked for it, not even by being killed."""
        self.process.freeze()
        tasks = Path("/proc", str(self.process.process.pid), "task")
        until = time.monotonic() + 30
        while {(each / "stat").read_text().rpartition(")")[2].split()[0] for each in tasks.iterdir()} != {"T"}:
            assert time.monotonic() < until, "a stopped process runs"
            time.sleep(0.002)

    def thaw(self) -> None:
        self.process.thaw()


@dataclass
class Volume:
    """One volume, mounted twice."""

    one: Mount
    two: Mount
    brick: Path
    """Where the server keeps what is stored, as files."""
    server: Process
    relay: Chaos | None
    """Between `one` and the server, if that was asked for."""
    true: Mount
    """Believes nothing that it has not just asked the server for; the others may be a second behind."""


@contextmanager
def volume(directory: Path, *, relayed: bool = False) -> Iterator[Volume]:
    """A new volume with all it has in `directory`. It leaves nothing behind, whatever happens. `directory / "brick"`
    may be there already, as a file system of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    brick = directory / "brick"
    brick.mkdir(exist_ok=True)
    (port,) = free_ports(1)
    (directory / "server.vol").write_text(_server(brick, port))
    (directory / "client.vol").write_text(_client(port))
    (directory / "true.vol").write_text(_client(port, caching=False))
    with ExitStack() as stack:
        command = ["glusterfsd", "-N", "-f", str(directory / "server.vol"), "-l", str(directory / "server.log")]
        command += ["-p", str(directory / "server.pid")]
        server = Process(command, directory / "server.out", lambda: accepts(port))
        stack.enter_context(running(server))
        relay = stack.enter_context(chaos(port)) if relayed else None
        (directory / "one.vol").write_text(_client(port if relay is None else relay.port))
        one = stack.enter_context(_mounted(directory, "one", "one.vol"))
        two = stack.enter_context(_mounted(directory, "two"))
        never = ("--entry-timeout=0", "--attribute-timeout=0", "--negative-timeout=0", "--direct-io-mode=enable")
        true = stack.enter_context(_mounted(directory, "true", "true.vol", *never))
        yield Volume(one, two, brick, server, relay, true)


@contextmanager
def _mounted(directory: Path, name: str, volume: str = "client.vol", *how: str) -> Iterator[Mount]:
    path = directory / name
    path.mkdir()
    command = ["glusterfs", "-N", "-f", str(directory / volume), "-l", str(directory / f"{name}.log")]
    command += ["-p", str(directory / f"{name}.pid"), f"--volume-name={_TOP}", *how, str(path)]
    try:
        process = Process(command, directory / f"{name}.out", lambda: os.path.ismount(path))
        with running(process):  # ended first: what waits for it then fails, and nothing keeps the mount busy
            yield Mount(path, process)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def _server(brick: Path, port: int) -> str:
    return _stack(
        {
            "storage/posix": [f"directory {brick}"],
            "features/access-control": [],
            "features/locks": [],
            "features/upcall": ["cache-invalidation off"],
            "performance/io-threads": [],
            "protocol/server": [
                "transport-type tcp",
                "transport.address-family inet",
                "transport.socket.bind-address 127.0.0.1",
                f"transport.socket.listen-port {port}",
                "auth.addr.io-threads.allow 127.0.0.1",
            ],
        }
    )


def _client(port: int, *, caching: bool = True) -> str:
    connection = ["transport-type tcp", "transport.address-family inet", "remote-host 127.0.0.1"]
    connection += [f"remote-port {port}", "remote-subvolume io-threads", "send-gids true"]
    translators: dict[str, list[str]] = {
        "protocol/client": connection,
        "cluster/distribute": [],
        "features/utime": ["noatime on"],
    }
    if caching:
        names = ("write-behind", "open-behind", "quick-read", "md-cache")
        translators |= {f"performance/{name}": [] for name in names}
    return _stack({**translators, "performance/io-threads": []}, top=_TOP)


def _stack(translators: dict[str, list[str]], top: str = "") -> str:
    """A volume file: each translator above the one before it, under its own name, the last one under `top`."""
    lines: list[str] = []
    below = ""
    for number, (kind, options) in enumerate(translators.items(), 1):
        name = top if top and number == len(translators) else kind.rpartition("/")[2]
        lines += [f"volume {name}", f"    type {kind}", *(f"    option {option}" for option in options)]
        lines += [f"    subvolumes {below}"] if below else []
        lines += ["end-volume", ""]
        below = name
    return "\n".join(lines)
