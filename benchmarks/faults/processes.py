"""Processes that say on their standard output what happens, so that they can be killed at any moment and heard."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.faults.campaign import Run

__all__ = ["Aloud", "Talking", "say"]

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds for a process to say the next thing, on a busy machine."""


class Talking:
    """A Python process, from outside: `words` are what follows the interpreter's name, `quiet` drops what it logs."""

    def __init__(self, *words: str, quiet: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        )
        self.said: list[str] = []
        """Lines that nobody has taken down yet."""
        self._rest = b""

    def tell(self, line: bytes) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def hear_until(self, wanted: str) -> int:
        """The place in `said` of the next line that begins so, of those not read yet. Raises `EOFError` if the process
        ends before, `TimeoutError` if it hangs."""
        end = time.monotonic() + PATIENCE
        heard = len(self.said)
        while True:
            for number in range(heard, len(self.said)):
                if self.said[number].startswith(wanted):
                    return number
            heard = len(self.said)
            if not self._read(end - time.monotonic()):
                raise EOFError(f"a process ended with {self.process.wait()} before it said {wanted!r}")

    def kill(self) -> None:
        """End it. What it has said is in `said`."""
        self.process.kill()
        self.wait()

    def wait(self) -> None:
        """Hear it to its end."""
        while self._read(PATIENCE):
            pass
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self, seconds: float) -> bool:
        """Read what there is; False at the end. What a kill has cut off does not count."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], max(0.0, seconds))[0]:
            raise TimeoutError("a process has said nothing for too long")
        data = os.read(fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [line.decode() for line in lines]
        return bool(data)


class Aloud(Run):
    """A run whose outcome is said to whoever listens."""

    def wrong(self, what: str) -> None:
        say(f"! {what}")

    def lost(self, what: str) -> None:
        say(f"? {what}")


def say(line: str) -> None:
    """In one piece, whatever other threads say."""
    os.write(1, f"{line}\n".encode())
