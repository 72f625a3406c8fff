"""As SGLang calls: one thread looks up, one reads, one stores, and the scheduler clears now and then."""

from __future__ import annotations

import gc
import queue
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.connectors.sglang.hostpages import Buffer, HostPages
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.direct import DirectClient
from lmcache_core.wrappers.faulty import Faulty, every
from tests.connectors.sglang.host import Host, opened, prompt_keys

ROUNDS = 150
PROMPTS = [prompt_keys(number, 24) for number in range(6)]
SHORT = Options(read_timeout=0.2, lookup_timeout=0.2, store_timeout=0.1, retry_after=0.01, promises=4)


@pytest.mark.parametrize("remote", [False, True])
def test_three_threads_at_once(remote: bool, tmp_path: Path) -> None:
    faulty = Faulty(CpuBackend(CpuOptions()), {"read": every(9)})
    reading, storing = Host(), Host()
    wrong: list[str] = []
    failed: list[BaseException] = []
    found: queue.Queue[tuple[list[bytes], list[bytes]] | None] = queue.Queue()
    stored = threading.Event()

    with opened(faulty, capacity=300_000, options=SHORT, remote=tmp_path if remote else None) as world:
        store = world.store

        def look_up() -> None:
            chosen = random.Random(1)
            stored.wait(10)
            for _ in range(ROUNDS):
                keys = chosen.choice(PROMPTS)
                start = chosen.choice([0, 0, chosen.randrange(24)])
                pages = store.exists(keys[start:], keys[:start])
                shorter = chosen.choice([pages, pages // 2])  # another rank has less
                if shorter:
                    found.put((keys[start : start + shorter], keys[:start]))
            found.put(None)

        def read() -> None:
            hits = 0
            while (asked := found.get()) is not None:
                keys, prefix = asked
                for at in range(0, len(keys), 8):
                    part = keys[at : at + 8]
                    got = store.get(part, reading.pages.view(range(len(part))), [*prefix, *keys[:at]])
                    wrong.extend(f"{n} of {len(part)}" for n in range(got) if not reading.holds(n, part[n]))
                    hits += got
                    if got < len(part):
                        break
            assert hits > 0

        def keep() -> None:
            chosen = random.Random(2)
            for number in range(ROUNDS):
                keys = chosen.choice(PROMPTS)
                start = chosen.choice([0, chosen.randrange(24)])
                for page, key in enumerate(keys[start:]):
                    storing.write(page, key)
                store.set(keys[start:], storing.pages.view(range(24 - start)), keys[:start])
                stored.set()
                if number % 40 == 39:
                    store.clear()
                elif number % 10 == 9:
                    DirectClient(world.node).clear(None, ["cpu"])

        def watched(work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  told below
                    failed.append(error)
                    stored.set()
                    found.put(None)

            return run

        threads = [threading.Thread(target=watched(work)) for work in (look_up, read, keep)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert (failed, wrong) == ([], [])
        assert store.promises <= 4


def test_memory_is_kept_as_long_as_its_pages() -> None:
    class Owner:
        """Of the memory."""

    memory, owner = np.zeros((1, 4, 64), np.uint8), Owner()
    gone = weakref.ref(owner)
    pages = HostPages([Buffer(memory.ctypes.data, 64, 64)], 4, 4, owner)
    del owner
    gc.collect()
    assert gone() is not None
    view = pages.view([1])
    del pages, view
    gc.collect()
    assert gone() is None
