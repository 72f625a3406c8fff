"""One SGLang engine, in a process of its own that is told what to do by lines of JSON: `python -m tests.sglang.served`.

The first line has the engine's settings; each that follows a method and its arguments. An answer is a line that begins
with `ANSWER`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def _generate(engine: Any, prompts: list[list[int]], tokens: int, salt: str | None) -> list[dict[str, Any]]:
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    extra = {} if salt is None else {"cache_salt": [salt] * len(prompts)}
    answers = engine.generate(input_ids=prompts, sampling_params=parameters, **extra)
    return [
        {
            "tokens": answer["output_ids"],
            "cached": answer["meta_info"]["cached_tokens"],
            "details": answer["meta_info"].get("cached_tokens_details"),
        }
        for answer in answers
    ]


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.stdin.readline()))
    print("ANSWER", json.dumps("up"), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method == "generate":
            answer: Any = _generate(engine, *arguments)
        elif method == "flush":
            answer = bool(engine.flush_cache().success)
        elif method == "update":
            answer = list(engine.update_weights_from_disk(*arguments))
        else:
            raise ValueError(method)
        print("ANSWER", json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
