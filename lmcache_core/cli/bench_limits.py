"""What a machine does without a cache, measured beside a tier: a plain file, sockets to itself, or a copy in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lmcache_core.cli.alone import buffer
from lmcache_core.cli.bench import GB, PlainFile
from lmcache_core.config import TierConfig

__all__ = ["Limit", "limit_of"]

FILE_BYTES = 64 << 20
SECONDS = 0.3
ROUNDS = 2
_HERE = ("localhost", "127.0.0.1", "::1")


class Limit(NamedTuple):
    """GB/s of writing and reading, and what does so."""

    put: float
    get: float
    what: str


def limit_of(tier: TierConfig, nbytes: int, concurrency: int) -> Limit:
    """The limit that a tier can be compared with, measured now: blocks of `nbytes`, `concurrency` at once. Blocks.

    Raises:
        OSError: It cannot be measured.
    """
    directory = _directory(tier.options)
    if directory is not None:
        return _file(directory, nbytes, concurrency)
    if _is_here(tier.options):
        rate = _best(lambda: _sockets(nbytes, concurrency))
        return Limit(rate, rate, "sockets")
    rate = _best(lambda: _memcpy(nbytes))
    return Limit(rate, rate, "memcpy")


def _best(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(ROUNDS))


def _directory(options: Any) -> Path | None:
    path = getattr(options, "path", None)
    first = path[0] if isinstance(path, list) and path else path
    return Path(first).expanduser() if isinstance(first, str) and first else None


def _is_here(options: Any) -> bool:
    """Whether what a tier talks to is on this host: to others a socket is as fast as the network is, which nobody can
    tell without a program there."""
    for name in ("url", "endpoint"):
        text = getattr(options, name, "")
        if isinstance(text, str) and text:
            with suppress(ValueError):
                where = urlsplit(text)
                return where.scheme.startswith(("unix", "valkey+unix")) or where.hostname in _HERE
    return False


def _file(directory: Path, nbytes: int, concurrency: int) -> Limit:
    blocks = max(concurrency, FILE_BYTES // nbytes)
    with PlainFile(directory, nbytes, blocks, concurrency) as plain:
        total = blocks * nbytes / GB
        put = _best(lambda: total / _seconds(plain.write))
        return Limit(put, _best(lambda: total / _seconds(plain.read)), "plain file")


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _memcpy(nbytes: int) -> float:
    """One block after the other, of more memory than a cache of the CPU has."""
    total = max(1, FILE_BYTES // nbytes) * nbytes
    source, target = buffer(total), buffer(total)
    target[:] = source  # faults both in
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SECONDS or not done:
        for start in range(0, total, nbytes):
            target[start : start + nbytes] = source[start : start + nbytes]
        done += total
    return done / spent / GB


def _sockets(nbytes: int, concurrency: int) -> float:
    """Threads that send a block after the other to threads that receive them."""
    counts = [0] * concurrency
    until = time.perf_counter() + SECONDS
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = []
        for _ in range(concurrency):
            near = socket.create_connection(server.getsockname())
            pairs.append((near, server.accept()[0]))
    threads = [
        threading.Thread(target=target, args=arguments, daemon=True)
        for number, (near, far) in enumerate(pairs)
        for target, arguments in ((_send, (near, nbytes, until)), (_receive, (far, nbytes, counts, number)))
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started) / GB


def _send(near: socket.socket, nbytes: int, until: float) -> None:
    block = buffer(nbytes)
    with near:
        while time.perf_counter() < until:
            near.sendall(block)


def _receive(far: socket.socket, nbytes: int, counts: list[int], number: int) -> None:
    into = buffer(nbytes)
    with far:
        while count := far.recv_into(into):
            counts[number] += count
