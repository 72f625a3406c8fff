"""Real SGLang engines on this machine's CPU, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.node.kv import until

__all__ = ["ENVIRONMENT", "MODULE", "PAGE", "STANDINS", "Answer", "Engine", "extra_config", "prompt"]

MODULE = "lmcache_core.connectors.sglang"
STANDINS = Path(__file__).parent / "standins"
ROOT = Path(__file__).parents[2]
PAGE = 16
"""Tokens of a page, where nothing else is said."""
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
START = 300.0
"""Seconds that an engine may take to start."""
ANSWER = 60.0


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that no other seed has in this order."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, 500) for _ in range(tokens)]


class Answer(NamedTuple):
    """What an engine made of a prompt."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt that were not computed."""
    storage: int
    """Those of them that came from storage."""
    backend: str
    """Which storage that was."""


def extra_config(cache: Any, **options: Any) -> dict[str, Any]:
    """SGLang's extra configuration by which it uses our backend."""
    return {
        "backend_name": "lmcache_core",
        "module_path": MODULE,
        "class_name": "HiCacheBackend",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "config": cache,
        **options,
    }


class Engine:
    """An engine that uses our backend.

    Args:
        model: Its folder.
        extra: See `extra_config`.
        layout: Of its host pool.
        environment: Variables besides those of this process.
        settings: Other arguments of SGLang.
    """

    def __init__(
        self,
        model: Path,
        extra: Mapping[str, Any],
        *,
        layout: str = "page_first",
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "mem_fraction_static": 0.3,
            "max_total_tokens": 8192,
            "max_running_requests": 4,
            "context_length": 2048,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "log_level": "warning",
            "page_size": PAGE,
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_mem_layout": layout,
            "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
            "hicache_write_policy": "write_through",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(dict(extra)),
            "hicache_storage_prefetch_policy": "wait_complete",
            "enable_cache_report": True,
        }
        variables = {**ENVIRONMENT, "PYTHONPATH": f"{STANDINS}{os.pathsep}{ROOT}"}
        self.lines: list[str] = []
        """What it has written to its log."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.served"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | variables | dict(environment or {}),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments | settings) + "\n")
        self._process.stdin.flush()
        try:
            self._answer(START)
        except BaseException:  # whatever it is, no engine stays behind
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, seconds: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        late = threading.Timer(seconds, self._kill)
        late.start()
        try:
            for line in stdout:
                if line.startswith("ANSWER "):
                    return json.loads(line.removeprefix("ANSWER "))
                self.lines.append(line.rstrip())
        finally:
            late.cancel()
        raise RuntimeError("the engine has ended:\n" + "\n".join(self.lines[-60:]))

    def _ask(self, *call: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER)

    def generate(self, tokens: Sequence[int], wanted: int = 8, salt: str | None = None) -> Answer:
        """Answer a prompt."""
        (answer,) = self.generate_all([tokens], wanted, salt)
        return answer

    def generate_all(self, prompts: Sequence[Sequence[int]], wanted: int = 8, salt: str | None = None) -> list[Answer]:
        """Answer prompts, all of them together."""
        return [
            Answer(
                got["tokens"],
                got["cached"],
                (got["details"] or {}).get("storage", 0),
                (got["details"] or {}).get("storage_backend", ""),
            )
            for got in self._ask("generate", [list(each) for each in prompts], wanted, salt)
        ]

    def flush(self) -> None:
        """Have the engine forget what it has in its own memory, which it doesn't while it is still storing."""
        until(lambda: bool(self._ask("flush")))

    def update(self, model: Path) -> list[Any]:
        """Change its weights in place. Returns whether that worked, and what was said."""
        return list(self._ask("update", str(model)))

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """End it, as SGLang ends: its processes are killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._kill()
        self._process.wait()
        self._process.stdout.close()
