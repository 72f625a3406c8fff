"""An engine in a process of its own: does what its standard input says, one line each, and says what came of it."""

from __future__ import annotations

import json
import logging
import os
import sys

from tests.node.kv import PAGE_TOKENS, PageView, retrieve, tokens
from tests.service.kit import remote


def main(path: str) -> None:
    logging.disable(logging.CRITICAL)
    cache = remote(path, call_timeout=float(os.environ.get("CALL_TIMEOUT", "10")))
    held = []
    print("ready", flush=True)
    for line in sys.stdin:
        verb, text = line.split()
        prompt = cache.prompt(tokens(text))
        answer: object
        match verb:
            case "store":
                result = cache.store(prompt, PageView.of(prompt.keys))
                answer = result.stored // PAGE_TOKENS, result.wait(10)
            case "retrieve":
                answer = retrieve(cache, text)
            case "lookup":
                answer = cache.lookup(prompt).tokens // PAGE_TOKENS
            case "hold":
                held.append(cache.client.hold(cache._model, prompt.keys))
                answer = held[-1].pages, len(cache.client.grant(held[-1], 0, 8))
            case "reserve":
                held.append(cache.client.begin_store(cache._model, prompt.keys))  # type: ignore[arg-type]
                answer = len(held[-1].rooms)  # type: ignore[attr-defined]
            case "pin":
                answer = cache.pin(prompt) // PAGE_TOKENS
            case _:
                raise ValueError(verb)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
