"""SIGTERM ends a command as Ctrl-C does: what it has begun is cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["end_in_order", "terminable"]

TERMINATED = 128 + signal.SIGTERM
"""Exit code, the one that shells tell of a process that SIGTERM has ended."""


def end_in_order(number: int, frame: FrameType | None) -> None:
    """What to do on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    raise SystemExit(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """While this lasts SIGTERM is heeded, where this is the thread that signals come to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end_in_order)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
