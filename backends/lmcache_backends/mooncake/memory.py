"""Memory that the library may use: registered while it is lent. Blocks."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lmcache_backends.mooncake.errors import failed

__all__ = ["Memory"]


class Memory:
    """Of one opening. A range that several calls use at once is registered once."""

    def __init__(self, store: Any, master: str) -> None:
        self._store = store
        self._master = master
        self._lock = threading.Lock()
        self._lent: dict[tuple[int, int], int] = {}
        self._own = threading.local()

    @contextmanager
    def lent(self, view: memoryview) -> Iterator[int]:
        """The address of memory that the library may use meanwhile."""
        place = (np.frombuffer(view, np.uint8).ctypes.data, view.nbytes)
        with self._lock:
            if place not in self._lent:
                self._register(*place)
            self._lent[place] = self._lent.get(place, 0) + 1
        try:
            yield place[0]
        finally:
            with self._lock:
                self._lent[place] -= 1
                if not self._lent[place]:
                    del self._lent[place]
                    self._store.unregister_buffer(place[0])

    def scratch(self) -> tuple[mmap.mmap, int]:
        """A page of this thread's own, and its address."""
        if not hasattr(self._own, "page"):
            page = mmap.mmap(-1, mmap.PAGESIZE)
            address = np.frombuffer(page, np.uint8).ctypes.data
            self._register(address, mmap.PAGESIZE)
            self._own.page, self._own.address = page, address
        return self._own.page, self._own.address

    def _register(self, address: int, nbytes: int) -> None:
        code = self._store.register_buffer(address, nbytes)
        if code:
            raise failed(code, self._master, "registering memory")
