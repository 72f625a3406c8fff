"""Bytes between memory and open files. Blocks, and raises `OSError`."""

from __future__ import annotations

import errno
import os
from typing import Protocol

__all__ = ["Mover", "PlainMover"]


class Mover(Protocol):
    """Moves whole values. Called from many threads at once."""

    def read(self, fd: int, into: memoryview) -> bool:
        """Fill `into` from the start of the file. False if the file ends before that.

        Raises:
            OSError: The medium failed.
        """
        ...

    def write(self, fd: int, data: memoryview) -> None:
        """Put all of `data` at the start of the file.

        Raises:
            OSError: The medium failed, or has no room.
        """
        ...


class PlainMover:
    """Reads and writes as the operating system has them, on the calling thread."""

    def read(self, fd: int, into: memoryview, offset: int = 0) -> bool:
        """The same from `offset` on, which a file that goes past the page cache takes as a multiple of 4096 only."""
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(fd, [into[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and done:
                    return False  # past the end of a file that was cut, O_DIRECT has no answer
                raise
            if not count:
                return False
            done += count
        return True

    def write(self, fd: int, data: memoryview, offset: int = 0) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwritev(fd, [data[done:]], offset + done)
