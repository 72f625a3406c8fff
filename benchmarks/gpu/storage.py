"""What of it is about GPUDirect Storage: frames between a drive and the GPU's memory, in a process of their own, since
KvikIO opens the GPU in its own way."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row

__all__ = ["MISSING", "carry_out"]

MISSING = "GPUDirect Storage: not looked at, KvikIO is missing: pip install 'lmcache-core[gds]'"


def carry_out(driver: str, *, rounds: int = 3, sizes: str = "1,8,32") -> list[Row]:
    """Move chunks both ways, past host memory and through it. None if KvikIO is missing, which is said.

    Args:
        driver: The library of the GPU's driver.
        rounds: Of measuring.
        sizes: Of chunks, in MiB.

    Raises:
        AssertionError: What came back was not what had been stored, or it could not be moved.
    """
    if importlib.util.find_spec("kvikio") is None:
        print(MISSING)
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = ["--driver", driver, "--rounds", str(rounds), "--sizes", sizes, "--out", str(out)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.gds", *options], capture_output=True, text=True)
        if done.returncode or not out.exists():
            last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise AssertionError(f"GPUDirect Storage does not work on this machine:\n{last}")
        print(done.stdout, end="", flush=True)
        return [Row(**row) for row in json.loads(out.read_text())]
