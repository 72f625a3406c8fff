"""Has vLLM answer prompts, one engine after another, in the interpreter that has it: reads JSON, and prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """For each engine its cache and the prompts; of each answer the tokens, and how many of the prompt were cached."""
    from tests.vllm.engine import ENVIRONMENT, Engine, Inside

    os.environ.update(ENVIRONMENT)
    asked = json.loads(sys.stdin.read())
    told = []
    for cache, prompts in asked["engines"]:
        engine = Engine(Path(asked["model"]), cache, {"load_timeout": "30s"}, max_model_len=2048)
        try:
            answers = [engine.generate([each])[0] for each in prompts]
            assert engine.run(Inside.flush)
        finally:
            engine.close()
        told.append([[answer.tokens, answer.cached] for answer in answers])
    print("TOLD " + json.dumps(told))


if __name__ == "__main__":
    main()
