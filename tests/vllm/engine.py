"""vLLM engines, each in a process of its own, and how tests reach into them.

A test hands an engine functions of its module: they run in the engine's process, with an `Inside` as their first
argument, and their results come back. Processes are forked from one that has imported vLLM already, because the import
takes longer than all else.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from tests.vllm.models import VOCABULARY

__all__ = ["MODULE", "Answer", "Engine", "Failed", "Inside", "Stuck", "ours_of", "prompt", "transfer_config"]

P = ParamSpec("P")
T = TypeVar("T")

MODULE = "lmcache_core.connectors.vllm"
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PATIENCE = 10.0
"""Seconds after which an engine that answers within one is given up."""
LOGPROB = 1e-4
"""By which the logarithms of two probabilities may differ in float32, because batches are added up in another order."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Words that no other seed has in this order."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(tokens)]


class Answer(NamedTuple):
    """What an engine made of a prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Tokens of the prompt that were not computed."""

    def agrees(self, other: Answer) -> bool:
        """Whether another run came to the same."""
        return self.tokens == other.tokens and abs(self.logprobs[0] - other.logprobs[0]) < LOGPROB


def transfer_config(cache: Any, **options: Any) -> dict[str, Any]:
    """vLLM's settings by which it uses our connector."""
    return {
        "kv_connector": "LMCacheCoreConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": cache, **options},
    }


class Inside:
    """An engine as seen from its own process.

    Args:
        llm: vLLM's.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        """vLLM's engine core, where it is in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """Ours, on the scheduler's side; None in an engine without us."""
        return ours_of(self.core.scheduler.connector)

    @property
    def worker(self) -> Any:
        """Ours, on the worker's side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return ours_of(get_kv_transfer_group())

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int = 8, *, salt: str | None = None, **params: Any
    ) -> list[Answer]:
        """Answer prompts, all of them together; `params` are what a request may ask of the cache."""
        sampling = _sampling(tokens, params)
        asked: list[Any] = [{"prompt_token_ids": list(each)} for each in prompts]
        if salt is not None:
            asked = [each | {"cache_salt": salt} for each in asked]
        return [_answer(output) for output in self.llm.generate(asked, sampling, use_tqdm=False)]

    def drive(
        self,
        prompts: Mapping[str, Sequence[int]],
        tokens: int = 8,
        before_step: Callable[[int], Collection[str]] = lambda step: (),
    ) -> dict[str, Answer]:
        """Answer prompts step by step.

        Args:
            prompts: By the name of the request.
            tokens: To be made of each.
            before_step: Is told the number of each step, and names requests that are to be aborted.

        Raises:
            Stuck: The engine goes on without getting any further.
        """
        engine = self.llm.llm_engine
        for name, each in prompts.items():
            engine.add_request(name, {"prompt_token_ids": list(each)}, _sampling(tokens, {}))
        answers: dict[str, Answer] = {}
        give_up = time.monotonic() + PATIENCE
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                return answers
            if time.monotonic() > give_up:
                engine.abort_request([name for name in prompts if name not in answers])
                raise Stuck(f"no answer to {sorted(prompts.keys() - answers.keys())} after {step} steps")
            if aborted := list(before_step(step)):
                engine.abort_request(aborted)
            done = [
                output for output in engine.step() if output.finished and output.outputs[0].finish_reason != "abort"
            ]
            answers |= {output.request_id: _answer(output) for output in done}
        raise AssertionError

    def metric(self, name: str) -> int:
        """One of vLLM's own counters."""
        return sum(int(each.value) for each in self.llm.get_metrics() if each.name == f"vllm:{name}")

    def forget(self) -> None:
        """Have vLLM forget what it has cached itself."""
        assert self.llm.reset_prefix_cache()

    def settled(self) -> dict[str, int]:
        """What is still held of requests that are over. Everything is 0 when nothing has leaked."""
        side = self.connector._scheduler
        stats = side.client.stats()
        return {
            "requests": len(side._requests),
            "busy": int(not side.idle),
            "leases": stats.leases,
            "staged": stats.staged,
        }

    def flush(self) -> bool:
        """Wait until all tiers have what they shall have."""
        return bool(self.connector._scheduler.client.flush(30))

    def close(self) -> None:
        """Shut the engine down as vLLM does."""
        self.llm.llm_engine.engine_core.shutdown()


def ours_of(connector: Any) -> Any:
    """What vLLM has as its connector, or ours of those that it has."""
    several = getattr(connector, "sub_connectors", None)
    return connector if several is None else next(each for each in several if type(each).__module__.startswith(MODULE))


def _generate(inside: Inside, /, prompts: Sequence[Sequence[int]], tokens: int, **params: Any) -> list[Answer]:
    return inside.generate(prompts, tokens, **params)


def _sampling(tokens: int, params: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        extra_args={"kv_transfer_params": {"lmcache_core": dict(params)}} if params else None,
    )


def _answer(output: Any) -> Answer:
    (made,) = output.outputs
    return Answer(
        list(made.token_ids),
        [each[token].logprob for each, token in zip(made.logprobs, made.token_ids, strict=True)],
        output.num_cached_tokens,
    )


class Stuck(Exception):
    """An engine does not answer."""


class Failed(Exception):
    """Something was raised in the engine's process; the text is its traceback."""


class Engine:
    """An engine in a process of its own, as a context manager.

    Args:
        model: Its folder.
        cache: Our configuration; None for an engine without us.
        options: Further ones of the connector.
        environment: Variables besides those that all engines have.
        fresh: In a new interpreter, with another seed for hashes.
        settings: Arguments of vLLM's `LLM`.

    Raises:
        Failed: It did not start.
    """

    def __init__(
        self,
        model: Path,
        cache: Any = None,
        options: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        **settings: Any,
    ) -> None:
        if cache is not None:
            settings["kv_transfer_config"] = transfer_config(cache, **(options or {}))
        settings = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
            "disable_log_stats": False,
            **settings,
        }
        self._settings = settings
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self._start(fresh)

    def _start(self, fresh: bool) -> None:
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            context.set_forkserver_preload(["vllm", "vllm.v1.engine.llm_engine", "tests.vllm.engine"])
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=_live, args=(theirs, self._settings, self._environment), name="engine")
        self._process.start()
        theirs.close()
        try:
            self._result()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[Concatenate[Inside, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the engine's process.

        Raises:
            Failed: It raised something.
        """
        self._pipe.send((function, args, kwargs))
        result: T = self._result()
        return result

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **params: Any) -> list[Answer]:
        """As in `Inside`."""
        return self.run(_generate, prompts, tokens, **params)

    def restart(self) -> None:
        """Shut it down, and start it again in another process."""
        self.close()
        self._start(False)

    def close(self) -> None:
        """Shut it down."""
        try:
            if self._process.is_alive():
                self.run(Inside.close)
        finally:
            self._end()

    def _result(self) -> Any:
        try:
            good, result = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise Failed(f"the engine's process has ended with {self._process.exitcode}") from None
        if not good:
            raise Failed(result)
        return result

    def _end(self) -> None:
        self._pipe.close()  # upon which it ends by itself
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _live(pipe: Connection, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)

    def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception:  # noqa: BLE001  it is the test's
            pipe.send((False, traceback.format_exc()))
            return None
        pipe.send((True, None if isinstance(result, Inside) else result))
        return result

    def start() -> Inside:
        from vllm import LLM

        return Inside(LLM(**settings))

    inside = attempt(start)
    while inside is not None:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        attempt(function, inside, *args, **kwargs)
