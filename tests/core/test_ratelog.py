"""One log line per kind of fault and interval."""

import logging

import pytest

from lmcache_core.ratelog import RateLog


def test_one_line_an_interval_and_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = RateLog(logging.getLogger("faults"), interval=10, clock=lambda: now)
    assert lines.warning("read", "cannot read %s", "a")
    assert not lines.warning("read", "cannot read %s", "b")
    assert not lines.warning("read", "cannot read %s", "c")
    assert lines.warning("write", "cannot write")
    now = 10.0
    assert lines.warning("read", "cannot read %s", "d")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read a",
        "cannot write",
        "cannot read d (2 more of this kind in the last 10 s)",
    ]
