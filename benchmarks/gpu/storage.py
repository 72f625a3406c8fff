"""What of it is about GPUDirect Storage: frames between a drive and the GPU's memory, in a process of their own, since
KvikIO opens the GPU in its own way."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row

__all__ = ["MISSING", "carry_out"]

PATIENCE = 300.0
"""Seconds after which it counts as hanging."""
MISSING = "GPUDirect Storage: not looked at, KvikIO is missing: pip install 'lmcache-core[gds]'"


def carry_out(driver: str, *, rounds: int = 3, sizes: str = "1,8,32") -> list[Row]:
    """Move chunks both ways, past host memory and through it. Nothing if KvikIO is missing, which is said.

    Args:
        driver: The library of the GPU's driver.
        rounds: Of measuring.
        sizes: Of chunks, in MiB.

    Raises:
        AssertionError: What came back was not what had been stored, or it could not be moved, or that hung.
    """
    if importlib.util.find_spec("kvikio") is None:
        print(MISSING)
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = ["--driver", driver, "--rounds", str(rounds), "--sizes", sizes, "--out", str(out)]
        ended, told, complaints = _run([sys.executable, "-m", "benchmarks.gds", *options], Path(folder))
        if ended != 0 or not out.exists():
            last = "\n".join((told + complaints).splitlines()[-20:])
            if ended is None:
                late = f"it had not ended after {PATIENCE:g} s and was killed; look in dmesg and cufile.log"
                what = f"hangs or is very slow: {late}"
            else:
                what = "does not work on this machine"
            raise AssertionError(f"GPUDirect Storage {what}:\n{last}")
        print(told, end="", flush=True)
        return [Row(**row) for row in json.loads(out.read_text())]


def _run(command: list[str], folder: Path) -> tuple[int | None, str, str]:
    """The exit status, None if it has not ended in time, and what it has printed. What hangs in the system cannot even
    be killed: nobody waits for it."""
    out, err = folder / "out", folder / "err"
    with out.open("w") as told, err.open("w") as complaints:
        process = subprocess.Popen(command, stdout=told, stderr=complaints)
    try:
        ended = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        ended = None
    except BaseException:  # an interrupt too must leave nothing behind
        process.kill()
        raise
    if ended is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    return ended, out.read_text(errors="replace"), err.read_text(errors="replace")
