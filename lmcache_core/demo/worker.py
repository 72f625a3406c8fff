"""The process that does the work: `python -m lmcache_core.demo.worker SPEC`, once before the restart and once after it.

It prints one JSON object a line: `{"step": ..., "done": ...}` while it is at work, at last `{"result": ...}`. What the
second life needs to know of the first one lies in the run's folder.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lmcache_core.connectors.transformers import CachedModel
from lmcache_core.connectors.transformers.calls import FirstToken
from lmcache_core.demo.result import FOLLOW_UP, WORDS, Answer, Life, Measured, Spec
from lmcache_core.demo.settings import settings
from lmcache_core.demo.talk import FOLLOW_UP as FOLLOW_UP_QUESTION
from lmcache_core.demo.talk import QUESTIONS, Talk
from lmcache_core.demo.weights import load_model

__all__ = ["main"]

WARM_UP_TOKENS = 256


def main(argv: list[str]) -> int:
    """Read the specification, live, tell what came of it."""
    sys.stdout = sys.stderr  # what libraries print is no message
    spec = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Spec)
    model, tokenizer = load_model(_tell)
    model.generation_config = GenerationConfig(do_sample=False)  # type: ignore[no-untyped-call]
    worker = Worker(spec, model, Talk(tokenizer, spec.document_tokens))
    result = worker.before_restart() if spec.life == 1 else worker.after_restart()
    _say({"result": msgspec.to_builtins(result)})
    return 0


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def _tell(step: str, done: float) -> None:
    _say({"step": step, "done": done})


class Worker:
    """One life: a model, a cache, and the prompts to try on them."""

    def __init__(self, spec: Spec, model: PreTrainedModel, talk: Talk) -> None:
        self.spec = spec
        self.model = model
        self.talk = talk
        self.folder = Path(spec.folder)
        self.tier = spec.tier.get("name") or spec.tier.get("backend", "disk")
        self.answers: dict[str, Answer] = {}
        self.measured: list[Measured] = []

    # The two lives

    def before_restart(self) -> Life:
        """Everything without cache, then from memory, while the disk tier is written."""
        self._warm_up()
        self._without_cache(QUESTIONS[0], self.talk.first_turn(QUESTIONS[0]))
        for question in QUESTIONS[1:]:
            self._without_cache(question, self.talk.first_turn(question))
            self._once_more(QUESTIONS[0])  # in between, so that a machine that becomes slower or faster shows
        first = self.answers[QUESTIONS[0]]
        self._without_cache(FOLLOW_UP, self.talk.next_turn(first.prompt, first.tokens, FOLLOW_UP_QUESTION))
        with self._open() as cached:
            self._with_cache(cached, "filling", QUESTIONS[0], repeats=1)
            self._with_cache(cached, "memory", QUESTIONS[0], repeats=self.spec.repeats)
            for question in QUESTIONS[1:]:
                self._with_cache(cached, "question", question, repeats=self.spec.repeats)
            self._with_cache(cached, "turn", FOLLOW_UP, repeats=self.spec.repeats)
            _tell("wait for the tier", 0.0)
            flushed = cached.cache.flush(timeout=120)
            life = self._life(cached, flushed)
        self._remember()
        return life

    def after_restart(self) -> Life:
        """Everything from disk: memory is emptied before each measurement. A node that lives on has it in memory too,
        which comes first."""
        self._recall()
        with self._open() as cached:
            self._warm_up()
            if self.spec.socket:
                self._with_cache(cached, "shared", QUESTIONS[0], repeats=self.spec.repeats)
                self._with_cache(cached, "shared question", QUESTIONS[1], repeats=self.spec.repeats)
            self._with_cache(cached, "disk", QUESTIONS[0], repeats=self.spec.repeats, forget=True)
            self._with_cache(cached, "disk question", QUESTIONS[1], repeats=self.spec.repeats, forget=True)
            self._with_cache(cached, "disk turn", FOLLOW_UP, repeats=self.spec.repeats, forget=True)
            return self._life(cached, True)

    # Steps

    def _open(self) -> CachedModel:
        _tell("open the cache", 0.0)
        shared = {"connect": self.spec.socket, "call_timeout": "10s"}
        return CachedModel.open(self.model, shared if self.spec.socket else settings(self.spec.tier))

    def _warm_up(self) -> None:
        """Touch all weights and let the threads start, with other text than what is measured."""
        _tell("warm up", 0.0)
        ids = torch.arange(1000, 1000 + WARM_UP_TOKENS)[None]
        for tokens in (WARM_UP_TOKENS, 40):
            self._generate(self.model, ids[:, :tokens].tolist()[0], 4)

    def _without_cache(self, name: str, prompt: list[int]) -> None:
        """Compute an answer with the model alone: what all others are compared with."""
        with _layers_told(self.model, f"{WORDS['cold']}: {_shown(name)}"):
            output, ttft = self._generate(self.model, prompt, self.spec.tokens)
        answer = Answer(prompt, _new(output, prompt), self.talk.text(_new(output, prompt)))
        self.answers[name] = answer
        np.save(self._scores_path(name), _scores(output))
        self.measured.append(
            Measured("cold" if name == QUESTIONS[0] else "cold other", name, len(prompt), 0, {}, [ttft], True, 0.0)
        )

    def _once_more(self, name: str) -> None:
        """Measure the model alone again, to the first token."""
        (made,) = (each for each in self.measured if each.kind == "cold" and each.name == name)
        answer = self.answers[name]
        with _layers_told(self.model, f"{WORDS['cold']}, once more ({len(made.ttft_s) + 1}): {_shown(name)}"):
            output, ttft = self._generate(self.model, answer.prompt, 1)
        made.ttft_s.append(ttft)
        made.tokens_equal &= _new(output, answer.prompt) == answer.tokens[:1]
        made.max_logit_diff = max(made.max_logit_diff, self._logit_diff(name, output))

    def _with_cache(self, cached: CachedModel, kind: str, name: str, *, repeats: int, forget: bool = False) -> None:
        """Compute an answer once whole, to compare it, then only its first token, to measure more often."""
        made = None
        for number in range(repeats):
            _tell(f"{WORDS[kind].replace('disk', self.tier)}: {_shown(name)}", number / repeats)
            if forget:
                cached.cache.clear(["cpu"])
            once = self._compared(cached, kind, name, self.spec.tokens if number == 0 else 1)
            if made is None:
                made = once
                self.measured.append(made)
            elif (once.cached_tokens, once.tiers) == (made.cached_tokens, made.tiers):
                made.ttft_s += once.ttft_s
                made.tokens_equal &= once.tokens_equal

    def _compared(self, cached: CachedModel, kind: str, name: str, tokens: int) -> Measured:
        """Some tokens of an answer with the cache, and how they compare with those of the model alone."""
        prompt, expected = self.answers[name].prompt, self.answers[name].tokens[:tokens]
        output, _ = self._generate(cached, prompt, tokens)
        call = cached.last_call
        assert call is not None
        return Measured(
            kind,
            name,
            call.prompt_tokens,
            call.cached_tokens,
            dict(call.tiers),
            [call.ttft_s],
            _new(output, prompt) == expected,
            self._logit_diff(name, output),
            call.retrieve_s,
            call.store_s,
        )

    def _generate(self, model: PreTrainedModel | CachedModel, prompt: list[int], tokens: int) -> tuple[Any, float]:
        """Greedy tokens, exactly so many. Returns the output and the seconds to the first of them."""
        ids = torch.tensor([prompt])
        first = FirstToken()
        generate: Any = model.generate
        started = time.perf_counter()
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            logits_processor=LogitsProcessorList([first]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert first.at is not None
        return output, first.at - started

    def _life(self, cached: CachedModel, flushed: bool) -> Life:
        (tier,) = cached.cache.stats().tiers
        return Life(
            measured=self.measured,
            answers=self.answers,
            threads=torch.get_num_threads(),
            flushed=flushed,
            failures=dict(cached.failures),
            disk_bytes=tier.used or tier.counters.get("bytes_sent", 0),
            past_page_cache=tier.counters.get("buffered_fallback", 0) == 0,
        )

    # From one life to the next

    def _logit_diff(self, name: str, output: Any) -> float:
        """How far the first new token's logits are from the first ones of the model alone."""
        return float(np.abs(_scores(output) - np.load(self._scores_path(name))).max())

    def _scores_path(self, name: str) -> Path:
        number = [*QUESTIONS, FOLLOW_UP].index(name)
        return self.folder / f"scores-{number}.npy"

    def _remember(self) -> None:
        (self.folder / "answers.json").write_bytes(msgspec.json.encode(self.answers))

    def _recall(self) -> None:
        self.answers = msgspec.json.decode((self.folder / "answers.json").read_bytes(), type=dict[str, Answer])


def _new(output: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
    return tokens


def _scores(output: Any) -> np.ndarray[Any, Any]:
    scores: np.ndarray[Any, Any] = output.logits[0][0].float().numpy()
    return scores


def _shown(name: str) -> str:
    return FOLLOW_UP_QUESTION if name == FOLLOW_UP else name


class _layers_told:
    """Say how far the first pass through a model's layers is."""

    def __init__(self, model: PreTrainedModel, step: str) -> None:
        self._layers: Any = model.get_submodule("model.layers")
        self._step = step
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        _tell(self._step, 0.0)
        for number, layer in enumerate(self._layers, 1):
            self._handles.append(layer.register_forward_hook(self._hook(number / len(self._layers))))

    def _hook(self, done: float) -> Any:
        def passed(module: Any, inputs: Any, output: Any) -> None:
            handle = self._handles.pop(0)  # each layer once: in the order of the layers
            handle.remove()
            _tell(self._step, done)

        return passed

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
