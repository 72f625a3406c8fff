"""A minute of conversations with aborts between them. `make soak` runs ten, and looks at memory too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm.soak import soak
from tests.vllm.conftest import Models


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conversations_hit_what_they_must_and_leave_nothing(models: Models, tmp_path: Path) -> None:
    soaked = soak(models("llama"), tmp_path, 60.0)
    assert soaked.hit_tokens == soaked.expected_tokens
    assert soaked.aborted > 100
    assert set(soaked.left.values()) == {0}
