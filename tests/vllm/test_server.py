"""vLLM's OpenAI server: hits from memory, from disk after a restart, and what its `/metrics` says of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.node.kv import until
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import ENVIRONMENT, prompt, transfer_config
from tests.vllm.models import BLOCK

TOKENS = 2100
THERE = TOKENS // BLOCK["llama"] * BLOCK["llama"]
ANSWER = 8
PROMPT = prompt(77, TOKENS)


class Server:
    """A running server."""

    def __init__(self, port: int, model: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._model = str(model)

    def fetch(self, path: str, body: Mapping[str, Any] | None = None, *, post: bool = False) -> str:
        data = None if body is None and not post else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    @property
    def listens(self) -> bool:
        """Whether it can be asked."""
        try:
            self.fetch("/health")
        except urllib.error.URLError:
            return False
        return True

    def answer(self) -> list[int]:
        """The tokens that come behind the prompt."""
        wanted = {
            "model": self._model,
            "prompt": PROMPT,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = json.loads(self.fetch("/v1/completions", wanted))["choices"]
        return list(choice["token_ids"])

    def metrics(self) -> dict[str, float]:
        """Ours by name and tier, and vLLM's own of hits."""
        found = re.findall(
            r"^vllm:(lmcache_core_\w+|external_prefix_cache_hits)_total\{([^}]*)\} (\S+)$",
            self.fetch("/metrics"),
            re.MULTILINE,
        )
        named = {}
        for name, labels, value in found:
            tier = re.search(r'tier="(\w+)"', labels)
            named[f"{name} {tier.group(1)}" if tier else name] = float(value)
        return named


@contextmanager
def serving(model: Path, cache: Mapping[str, Any]) -> Iterator[Server]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    words += ["--enforce-eager", "--max-model-len", "8192", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--kv-transfer-config", json.dumps(transfer_config(cache))]
    env = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        lines: list[str] = []
        up = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if "Application startup complete" in line:
                    up.set()
            up.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            up.wait(150)
            assert process.poll() is None, "".join(lines[-40:])
            server = Server(port, model)
            until(lambda: server.listens, 20)  # it says that it is up before it listens
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join(10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_server_hits_from_memory_and_after_a_restart_from_disk(
    models: Models, plain: Plain, tmp_path: Path
) -> None:
    model = models("llama")
    expected = plain("llama", [PROMPT], ANSWER)[0].tokens
    disk = {"backend": "disk", "path": str(tmp_path / "kv"), "capacity": "1GiB"}
    cache = {"cpu": {"capacity": "256MiB"}, "tiers": [disk]}
    with serving(model, cache) as server:
        assert server.answer() == expected
        server.fetch("/reset_prefix_cache", post=True)
        assert server.answer() == expected
        metrics = server.metrics()
        assert metrics["lmcache_core_stored_tokens"] == THERE
        assert metrics["lmcache_core_loaded_tokens cpu"] == THERE
        assert metrics["external_prefix_cache_hits"] == THERE
        assert metrics["lmcache_core_failed_tokens"] == metrics["lmcache_core_faults"] == 0
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.fetch("/v1/completions", {"model": "another", "prompt": 5, "max_tokens": "many"})
    with serving(model, cache) as server:
        assert server.answer() == expected
        metrics = server.metrics()
        assert metrics["lmcache_core_loaded_tokens disk"] == THERE
        assert metrics["external_prefix_cache_hits"] == THERE
        assert metrics["lmcache_core_faults"] == 0
