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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.node.kv import until
from tests.service.kit import serving as node
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

    def ask(self, tokens: Sequence[int] = PROMPT, **more: Any) -> tuple[list[int], int]:
        """The tokens that come behind a prompt, and how many of the prompt's were not computed."""
        wanted = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        answer = json.loads(self.fetch("/v1/completions", wanted))
        (choice,) = answer["choices"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return list(choice["token_ids"]), int(details.get("cached_tokens") or 0)

    def answer(self) -> list[int]:
        """The tokens that come behind the prompt."""
        return self.ask()[0]

    def forget(self) -> None:
        """Have vLLM forget what it has cached itself."""
        self.fetch("/reset_prefix_cache", post=True)

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
def serving(model: Path, cache: Mapping[str, Any], *more: str) -> Iterator[Server]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    words += [
        "--enforce-eager",
        "--max-model-len",
        "8192",
        "--enable-prompt-tokens-details",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    words += ["--kv-transfer-config", json.dumps(transfer_config(cache)), *more]
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
        server.forget()
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


OTHER, THIRD = prompt(78, 700), prompt(79, 500)
TENANT = {"cache_salt": "a tenant"}


def asking(**params: Any) -> dict[str, Any]:
    """What a request says to ask of the cache."""
    return {"kv_transfer_params": {"lmcache_core": params}}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_requests_ask_for_less_and_replicas_of_a_server_share_a_node(
    models: Models, plain: Plain, tmp_path: Path
) -> None:
    """Of two engines behind one server either answers; what the prompt finds does not depend on which."""
    model = models("llama")
    expected = plain("llama", [OTHER, THIRD], ANSWER)
    right = {tuple(OTHER): expected[0].tokens, tuple(THIRD): expected[1].tokens}
    cache: dict[str, Any] = {"page_tokens": 128, "chunk_tokens": 128, "cpu": {"capacity": "64MiB"}}
    # Of a request: what it asks for, and what it finds. The engines forget what they have themselves after each.
    asked: list[tuple[list[int], dict[str, Any], int]] = [
        (OTHER, asking(store=False), 0),
        (OTHER, {}, 0),
        (OTHER, {}, 640),
        (OTHER, asking(load=False), 0),
        (OTHER, asking(max_load_tokens=300), 256),
        (OTHER, asking(max_load_tokens=0), 0),
        (OTHER, asking(tiers=["disk"]), 640),
        (OTHER, TENANT | asking(store=False), 0),
        (OTHER, TENANT, 0),
        (OTHER, TENANT, 640),
        (THIRD, asking(tiers=["disk"]), 0),
        (THIRD, asking(tiers=["cpu"]), 384),  # memory is always stored to
        (THIRD, asking(tiers=[]), 0),
        # What nobody knows costs the request its cache, and the server nothing.
        (OTHER, asking(tiers=["tape"]), 0),
        (OTHER, asking(lode=True), 0),
        (OTHER, {"kv_transfer_params": {"lmcache_core": 5}}, 0),
        (OTHER, {"kv_transfer_params": {"other": [1]}}, 640),
    ]
    with (
        node(tmp_path, **cache) as (_, socket),
        serving(model, {"connect": str(socket)}, "--data-parallel-size", "2") as server,
    ):
        for number, (tokens, params, cached) in enumerate(asked):
            answer, found = server.ask(tokens, **params)
            assert (number, found) == (number, cached)
            assert answer == right[tuple(tokens)]
            server.forget()
