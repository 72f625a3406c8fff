"""Calls of a backend's verbs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.calls import BackendCalls
from lmcache_core.errors import BackendError
from lmcache_core.testing import make_key


def plain(answer: Any, *_: Any) -> Any:
    return answer


@pytest.mark.parametrize(
    ("verbs", "told"),
    [
        ({"contains": [False]}, "contains is not 'async def', as all verbs of a backend have to be"),
        (
            {"contains": None, "write": []},
            "contains and write are not 'async def', as all verbs of a backend have to be",
        ),
        (
            {"open": None, "contains": None, "delete": None},
            "open, contains and delete are not 'async def', as all verbs of a backend have to be",
        ),
    ],
)
@pytest.mark.parametrize("bounded", [False, True])
async def test_verbs_that_are_no_coroutines_are_named(verbs: dict[str, Any], told: str, bounded: bool) -> None:
    backend: Any = CpuBackend(CpuOptions())
    for verb, answer in verbs.items():
        setattr(backend, verb, partial(plain, answer))
    calls = BackendCalls(backend, "acme")
    with pytest.raises(BackendError) as refused:
        await (calls.bounded if bounded else calls.call)(backend.contains([make_key(1)]), 1.0)
    assert str(refused.value) == f"backend acme: {told}"


async def test_what_returns_a_coroutine_need_not_be_one() -> None:
    backend: Any = CpuBackend(CpuOptions())
    await backend.open()
    contains = backend.contains
    backend.contains = lambda keys: contains(keys)
    assert await BackendCalls(backend, "acme").call(backend.contains([make_key(1)]), 1.0) == [False]
    await backend.close()
