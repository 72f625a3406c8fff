"""What two processes on one disk path could do to each other."""

from __future__ import annotations

import threading
from pathlib import Path

from lmcache_backends.disk.shard import segment_sizes


def test_a_segment_that_is_given_back_while_others_count_is_no_failure(tmp_path: Path) -> None:
    """A segment is removed without the node's lock, so it may go between its listing and its `stat`."""
    stop = threading.Event()

    def come_and_go() -> None:
        segment = tmp_path / "segment-00000001"
        while not stop.is_set():
            segment.write_bytes(bytes(4096))
            segment.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(5000):
            assert set(segment_sizes(str(tmp_path))) <= {1}
    finally:
        stop.set()
        thread.join()
