"""The small model of the demo, with its real weights and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.demo.weights import converted
from tests.vllm.engine import Engine, Inside

QUESTIONS = ["Which river is it about?", "What is 2 + 2?"]
DOCUMENT = "The Danube rises in the Black Forest and flows through ten countries to the Black Sea. " * 30


@pytest.fixture(scope="module")
def model() -> Path:
    return converted(lambda what, part: None)


def ask(inside: Inside, question: str) -> tuple[str, int, int]:
    """The answer's text, tokens of the prompt and how many of them were not computed."""
    from vllm import SamplingParams

    message = {"role": "user", "content": f"{DOCUMENT}\n\n{question}"}
    (output,) = inside.llm.chat([message], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return output.outputs[0].text, len(output.prompt_token_ids), output.num_cached_tokens


def test_smollm2_answers_from_the_cache_what_it_answers_without(model: Path) -> None:
    with Engine(model, {"cpu": {"capacity": "256MiB"}}, max_model_len=2048) as engine:
        text, tokens, cached = engine.run(ask, QUESTIONS[0])
        engine.run(Inside.forget)
        again = engine.run(ask, QUESTIONS[0])
        other = engine.run(ask, QUESTIONS[1])
    assert (tokens > 512, cached) == (True, 0)
    assert again == (text, tokens, tokens // 128 * 128)
    assert other[2] >= 512
    assert "Danube" in text
