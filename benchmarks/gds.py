"""Payloads between files and a device, past host memory and through it.

    python -m benchmarks.gds [--driver libcuda.so.1] [--directory DIR] [--rounds 5] [--sizes 1,8,32] [--out FILE]

Without `--driver` the driver is a fake whose device is the host: KvikIO is in compatibility mode then, and what is seen
is what checking costs and not what a GPU gains. Each figure is the median over rounds; who moves first changes by
turns. A chunk is one shard of four pages; as many as have 128 MiB are moved in one call. What is read is compared with
what was written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.disks import scratch
from benchmarks.harness import Row
from lmcache_backends.gds import GdsBackend, GdsOptions
from lmcache_core.frame import seal, verify
from lmcache_core.protocols import DirectWrite, ReadResult, WriteResult
from tests.backends.gds.kit import MIB, Device, Framed, Gpu, framed

TOTAL = 128 * MIB
SIZES = "1,8,32"
FAKE = Path(__file__).parents[1] / "tests/backends/gds/fake_driver.cc"
Turn = Callable[[], Awaitable[None]]


def sizes_of(text: str) -> list[int]:
    """Sizes of chunks, in MiB, as they are written."""
    try:
        sizes = [int(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    most = TOTAL // MIB
    if not sizes or not all(1 <= size <= most for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: write sizes from 1 to {most}, in MiB, as in {SIZES}")
    return sizes


def rounds_of(text: str) -> int:
    """How many, as it is written."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write a number from 1 on")
    return int(text)


class Moves:
    """The ways of one size of chunk."""

    def __init__(self, gpu: Device, directory: Path, size: int) -> None:
        self._gpu = gpu
        self.chunks = [framed(number, pages=4, shards=1, page_bytes=size // 4) for number in range(TOTAL // size)]
        self.nbytes = len(self.chunks) * size
        self._there = [one.on(gpu) for one in self.chunks]
        self.checked = GdsBackend(GdsOptions(path=f"{directory}/{size}"))
        self.trusting = GdsBackend(GdsOptions(path=f"{directory}/{size}", trust=True))

    def turns(self) -> dict[str, Turn]:
        return {
            "write, through host memory": self._write_through,
            "write, direct, compared": lambda: self._write(self.checked),
            "write, direct, trusted": lambda: self._write(self.trusting),
            "read, through host memory": self._read_through,
            "read, direct, compared": lambda: self._read(self.checked),
            "read, direct, trusted": lambda: self._read(self.trusting),
        }

    async def _write(self, backend: GdsBackend) -> None:
        results = await backend.write_direct(self._there, self._gpu.copy_back)
        assert results == [WriteResult.STORED] * len(results)

    async def _read(self, backend: GdsBackend) -> None:
        reads = [one.pages(0, 0, 4, there.addresses[0]) for one, there in zip(self.chunks, self._there, strict=True)]
        results = await backend.read_direct(reads, self._gpu.copy_back)
        assert results == [ReadResult.HIT] * len(results)

    async def _write_through(self) -> None:
        def gather(one: Framed, there: DirectWrite) -> None:
            self._gpu.copy_back(there.addresses[0], one.payload)
            seal(one.frame, one.form, one.chunk.key.space, one.chunk.parent, one.chunk.pages)

        pairs = zip(self.chunks, self._there, strict=True)
        await asyncio.gather(*(asyncio.to_thread(gather, *pair) for pair in pairs))
        results = await self.checked.write([one.plain() for one in self.chunks])
        assert results == [WriteResult.STORED] * len(results)

    async def _read_through(self) -> None:
        def scatter(one: Framed, there: DirectWrite) -> None:
            verify(one.frame, one.form, one.chunk.key.space, one.chunk.parent, one.chunk.pages)
            self._gpu.put(there.addresses[0], one.payload)

        results = await self.checked.read([one.chunk.key for one in self.chunks], [one.frame for one in self.chunks])
        assert results == [ReadResult.HIT] * len(results)
        await asyncio.gather(
            *(asyncio.to_thread(scatter, *pair) for pair in zip(self.chunks, self._there, strict=True))
        )

    def check(self) -> None:
        """What lies on the device is what was read last, and must be what was stored."""
        for one, there in zip(self.chunks, self._there, strict=True):
            if self._gpu.get(there.addresses[0], len(one.payload)) != bytes(one.payload):
                raise AssertionError("a chunk came back with other bytes")

    def spoil(self) -> None:
        """Have other bytes on the device."""
        for one, there in zip(self.chunks, self._there, strict=True):
            self._gpu.put(there.addresses[0], bytes(len(one.payload)))


async def measure(gpu: Gpu, directory: Path, size: int, rounds: int) -> list[Row]:
    """Figures of one size of chunk, in GB/s.

    Raises:
        AssertionError: What was read is not what was written.
    """
    moves = Moves(gpu, directory, size)
    await moves.checked.open()
    await moves.trusting.open()
    turns = moves.turns()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        in_turn = list(turns.items())
        for name, turn in in_turn[number % len(in_turn) :] + in_turn[: number % len(in_turn)]:
            began, busy = time.perf_counter(), time.process_time()
            await turn()
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - began, time.process_time() - busy))
    moves.spoil()
    await turns["read, direct, trusted"]()
    moves.check()
    rows = []
    for name, times in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        speed, spent = moves.nbytes / seconds / 1e9, cpu / moves.nbytes * 1e9
        print(f"{size // MIB:3} MiB  {name:28} {speed:5.2f} GB/s  {spent:5.2f} CPU s/GB")
        words = name.replace("through host memory", "through").replace("compared", "checked").split(", ")
        rows.append(Row(f"gds.{'.'.join(words)}.{size // MIB}", speed, "GB/s", None, None))
    await moves.checked.close()
    await moves.trusting.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gds")
    parser.add_argument("--driver", help="the library of a real driver; by default a fake is built")
    parser.add_argument("--directory", type=Path, default=None, help="the drive to measure")
    parser.add_argument("--rounds", type=rounds_of, default=5)
    parser.add_argument("--sizes", type=sizes_of, default=SIZES, help=f"of chunks, in MiB; default: {SIZES}")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    if arguments.driver is None:
        with tempfile.TemporaryDirectory() as made:
            library = f"{made}/libcuda.so.1"
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
            subprocess.run(["g++", *options, "-o", library, str(FAKE)], check=True)
            again = [sys.executable, "-m", "benchmarks.gds", *sys.argv[1:], "--driver", library]
            raise SystemExit(subprocess.run(again, env=os.environ | {"LD_LIBRARY_PATH": made}).returncode)
    gpu = Gpu(arguments.driver)
    with scratch(arguments.directory) as directory:
        rows: list[Row] = []
        for size in arguments.sizes:
            rows += asyncio.run(measure(gpu, directory, size * MIB, arguments.rounds))
    if arguments.out:
        arguments.out.write_text(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
