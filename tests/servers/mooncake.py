"""A Mooncake Store for tests and measurements: its master, and a host that gives memory.

Both come with `mooncake-transfer-engine-non-cuda`: `python mooncake.py MASTER BYTES` is such a host.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ != "__main__":
    from tests.servers.process import Process, accepts, free_ports, running

__all__ = ["lacking", "master", "store"]


def lacking() -> str:
    """What is missing, and how to get it; empty if nothing is."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install mooncake-transfer-engine-non-cuda"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"{error}: apt-get install libibverbs1"
    return ""


@contextmanager
def master(directory: Path, *arguments: str) -> Iterator[tuple[Process, int]]:
    """The master alone, and its port."""
    directory.mkdir(parents=True, exist_ok=True)
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.origin is not None
    rpc, metrics = free_ports(2)
    command = [str(Path(found.origin).with_name("mooncake_master")), f"--rpc_port={rpc}", "--rpc_address=127.0.0.1"]
    command += [f"--metrics_port={metrics}", "--metrics_host=127.0.0.1", *arguments]
    process = Process(command, directory / "master.log", lambda: accepts(rpc))
    with running(process):
        yield process, rpc


@contextmanager
def store(directory: Path, nbytes: int) -> Iterator[tuple[Process, Process, str]]:
    """The master, a host that gives so much memory, and where the master is."""
    with master(directory) as (process, port):
        where = f"127.0.0.1:{port}"
        ready = directory / "ready"
        command = [sys.executable, __file__, where, str(nbytes), str(ready)]
        host = Process(command, directory / "host.log", ready.exists)
        with running(host):
            yield process, host, where


def main(where: str, nbytes: int, ready: Path) -> None:
    from mooncake.store import MooncakeDistributedStore

    giving = MooncakeDistributedStore()
    if code := giving.setup("127.0.0.1", "P2PHANDSHAKE", nbytes, 1 << 24, "tcp", "", where):
        sys.exit(f"it cannot join: {code}")
    ready.touch()
    signal.pause()


if __name__ == "__main__":
    sys.path = [each for each in sys.path if Path(each).resolve() != Path(__file__).parent]  # this file's name is taken
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
