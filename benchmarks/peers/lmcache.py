"""Rows of LMCache's multiprocess server, of the same work as `node.*`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, Scale, at_most, rate
from benchmarks.nodes import COPIES, ENGINES, LOOKUPS
from benchmarks.workload import CHUNK_TOKENS, DIM, ELEMENT, HEADS

__all__ = ["ROWS", "lmcache"]

VERBS = ("store", "retrieve")
ROWS = [*(f"node.lookup.{chunks}.lmcache" for chunks in LOOKUPS), *(f"node.{verb}.lmcache" for verb in VERBS)]
BLOCK_TOKENS = 16
LOOKUP_DIM = 2
"""Of a head where nothing is copied; 4 KiB for 64 tokens, as in our rows."""
ROOT = Path(__file__).parents[2]


def lmcache(scale: Scale) -> Iterator[Row]:
    """Rows `node.*.lmcache`, beside the limits of ours; none without an interpreter that has LMCache."""
    if scale.lmcache_python is None:
        return
    work = {
        "layers": scale.layers,
        "heads": HEADS,
        "dim": DIM,
        "chunk_tokens": CHUNK_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "copies": COPIES,
        "rounds": max(1, scale.rounds // 3),
        "lookups": list(LOOKUPS),
        "lookup_dim": LOOKUP_DIM,
        "calls": max(1, scale.calls // ENGINES),
    }
    found = [_measured(scale.lmcache_python, work) for _ in range(ENGINES)]
    for chunks, most in LOOKUPS.items():
        took = [each for one in found for each in one["lookup"][str(chunks)]]
        yield at_most(f"node.lookup.{chunks}.lmcache", statistics.median(took) * 1e6, "us", most)
    nbytes = CHUNK_TOKENS * scale.layers * 2 * HEADS * DIM * ELEMENT
    for verb in VERBS:
        took, limits = ([each for one in found for each in one[verb][what]] for what in ("took", "limits"))
        yield rate(f"node.{verb}.lmcache", nbytes, took, limits)


def _measured(python: Path, work: dict[str, Any]) -> Any:
    """What `lmcache_daemon` says, with a server and a client of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
    words = [str(python), "-m", "benchmarks.peers.lmcache_daemon", json.dumps(work)]
    ran = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise SystemExit(f"{python} could not measure LMCache")
    return json.loads(ran.stdout.splitlines()[-1])
