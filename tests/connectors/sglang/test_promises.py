"""Promises: which pages they are for, and when they are let go of."""

from __future__ import annotations

from typing import Any

from lmcache_core.client import Held, Part
from lmcache_core.connectors.sglang.promises import Promise, Promises, Segment
from tests.connectors.sglang.host import prompt_keys

KEYS = prompt_keys(1, 8)


class Client:
    """Remembers what was released."""

    def __init__(self) -> None:
        self.released: list[Held] = []

    def release(self, held: Held) -> None:
        self.released.append(held)


def promise(client: Any, keys: list[bytes], until: float = 10.0) -> Promise:
    return Promise(client, keys, [Segment(0, Held(len(keys), [Part(0, 0, len(keys))]))], until)


def test_a_promise_is_for_its_own_pages_only() -> None:
    made = promise(Client(), KEYS[:4])
    other = prompt_keys(2, 4)
    assert made.place(KEYS[1:3]) == 1
    assert made.place(KEYS[2:8]) == 2
    assert made.place(other) is None
    assert made.place([*KEYS[1:2], *other]) is None  # a prompt that forks behind the first page
    made.read = 2
    assert made.place(KEYS[1:3]) is None


def test_what_is_being_copied_from_is_let_go_of_afterwards() -> None:
    client = Client()
    kept = Promises(2, lambda: 0.0)
    first, second = promise(client, KEYS), promise(client, KEYS)
    kept.add(first)
    assert kept.take(KEYS[2:]) == (first, 2)
    assert kept.take(KEYS[2:]) is None  # one at a time
    kept.add(second)
    assert (len(kept), client.released) == (1, [])
    kept.give_back(first, keep=True)
    assert len(client.released) == 1
    assert kept.take(KEYS) == (second, 0)
    kept.clear()
    assert len(client.released) == 1
    kept.give_back(second, keep=True)
    assert len(client.released) == 2


def test_the_newest_is_taken_and_what_has_been_read_is_let_go_of() -> None:
    client = Client()
    kept = Promises(4, lambda: 0.0)
    shorter, longer = promise(client, KEYS[2:6]), promise(client, KEYS)
    kept.add(shorter)
    kept.add(longer)
    assert kept.take(KEYS[3:]) == (longer, 3)
    longer.read = 8
    kept.give_back(longer, keep=True)
    assert kept.take(KEYS[3:]) == (shorter, 1)
    kept.give_back(shorter, keep=False)
    assert (len(kept), len(client.released)) == (0, 2)
