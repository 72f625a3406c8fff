"""One log line per kind of fault and interval."""

import logging
import threading

import pytest

from lmcache_core.ratelog import LogWriter, RateLog


def test_one_line_an_interval_and_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = RateLog(logging.getLogger("faults"), interval=10, clock=lambda: now)
    assert lines.warning("read", "cannot read %s", "a")
    assert not lines.warning("read", "cannot read %s", "b")
    assert not lines.warning("read", "cannot read %s", "c")
    assert lines.warning("write", "cannot write")
    now = 10.0
    assert lines.warning("read", "cannot read %s", "d")
    assert not lines.warning("read", "cannot read %s", "e")
    now = 3609.5
    assert lines.warning("read", "cannot read %s", "f"), "the one left out may be an hour old"
    now = 3620.0
    assert lines.warning("read", "cannot read %s", "g")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot read a",
        "cannot write",
        "cannot read d (2 more of this kind in the last 10 s)",
        "cannot read f (1 more of this kind in the last 3600 s)",
        "cannot read g",
    ]


class Stuck(logging.Handler):
    """A handler that blocks, as one does whose pipe nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.go_on.wait()
        self.lines.append(record.getMessage())


def test_a_stuck_log_holds_up_nobody() -> None:
    logger, handler = logging.getLogger("stuck"), Stuck()
    logger.propagate = False
    logger.addHandler(handler)
    writer = LogWriter()
    lines = RateLog(logger, interval=0, writer=writer)
    assert lines.warning("a", "first %d", 1)
    assert handler.entered.wait(10)
    for number in range(writer.MOST + 10):
        lines.warning("a", "line %d", number)
    handler.go_on.set()
    writer.close(20)
    assert handler.lines == ["first 1", *(f"line {number}" for number in range(writer.MOST))]
