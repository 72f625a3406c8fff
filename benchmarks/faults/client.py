"""An engine in a process of its own at a node's socket, so that it can be killed at any moment.

    python -m benchmarks.faults.client SOCKET SEED TIMEOUT PATIENCE

It says `ready`, then stores, retrieves and aborts until it dies or its standard input ends, and says what goes wrong:
`! text` for what is wrong, `? text` for what is lost, and `= hits number` now and then.
"""

from __future__ import annotations

import logging
import random
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.campaign import Report
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, namespace
from benchmarks.faults.processes import Aloud, say
from lmcache_core import Cache
from lmcache_core.config import Config
from lmcache_core.service.remote import RemoteClient

PROMPTS = 24
MOST_PAGES = 4 * CHUNK_PAGES
THREADS = 2


def work(engine: Engine, rng: random.Random, ended: Callable[[], bool]) -> None:
    hits = 0
    while not ended():
        prompt = Prompt(rng.randrange(PROMPTS), rng.randint(1, MOST_PAGES))
        cache = engine.cache
        match rng.randrange(6):
            case 0 | 1 | 2:
                hits += engine.retrieve(prompt) > 0
            case 3 | 4:
                engine.store(prompt)
            case _:
                held = cache.client.hold(cache._model, cache.prompt(prompt.tokens).keys)
                cache.client.grant(held, 0, 2)
                if rng.random() < 0.5:
                    cache.client.release(held)
        if hits >= 20:
            say(f"= hits {hits}")
            hits = 0


def main(path: str, seed: str, timeout: str, patience: str) -> None:
    logging.disable(logging.CRITICAL)
    config = Config(call_timeout=float(timeout))
    run = Aloud(Report("a client"), 0, int(seed), Path())
    ended = threading.Event()
    with Cache(RemoteClient(path, config), namespace()) as cache:
        say("ready")
        threads = []
        for number in range(THREADS):
            engine = Engine(cache, run, deadline=float(patience))
            rng = random.Random(f"{seed} {number}")
            threads.append(threading.Thread(target=work, args=(engine, rng, ended.is_set)))
            threads[-1].start()
        select.select([sys.stdin], [], [])
        ended.set()
        for thread in threads:
            thread.join()
    say("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
