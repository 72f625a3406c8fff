"""What holds of a cache in its own process holds of one that goes through a socket: the same tests, once more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.node import test_cache, test_tiers
from tests.service.kit import open_served

DIRECT_ONLY = {
    "test_a_forked_child_is_told_and_the_parent_goes_on",
    "test_a_closed_cache_says_so",
    "test_one_namespace_with_two_geometries_is_refused",
    "test_pinned_prompts_stay_until_unpinned",
    "test_small_chunks_share_calls",
}
"""Tests of what is different through a socket, which has tests of its own."""


def cases_of(module: Any) -> list[Callable[..., None]]:
    return [
        test
        for name, test in vars(module).items()
        if name.startswith("test_")
        and name not in DIRECT_ONLY
        and not inspect.iscoroutinefunction(test)
        and not inspect.signature(test).parameters
        and "open_cache" in test.__code__.co_names
    ]


@pytest.mark.parametrize("module", [test_cache, test_tiers], ids=["cache", "tiers"])
def test_there_are_many(module: Any) -> None:
    assert len(cases_of(module)) >= 8


@pytest.mark.parametrize("test", cases_of(test_cache) + cases_of(test_tiers), ids=lambda test: test.__name__)
def test_through_a_socket(test: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test.__globals__, "open_cache", partial(open_served, tmp_path))
    test()
