"""The host pool: one memfd that holds every chunk in host memory, and slots in it.

The pool is taken at once, checked against what the machine has free, and faulted in behind the scenes: a fresh page
costs 3 us, so a slot is handed out only from memory whose pages exist. Slots are extents, so a one-page tail takes a
quarter of a full chunk's room.

A `Slot` is counted: whoever needs the bytes to stay (residence in the pool, a tier that is being written, a copy to
the engine) holds a reference; at zero the room is free. The pool itself is not thread-safe but for `prefault`; its
owner calls it under one mutex.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable, Sequence

from lmcache_core.errors import PoolError, UsageError
from lmcache_core.extents import ExtentAllocator
from lmcache_core.frame import ALIGN, FrameShape
from lmcache_core.memory import available_memory as available_memory
from lmcache_core.units import format_size

log = logging.getLogger(__name__)

FAULT_STEP = 32 << 20
FAULT_PIECE = 1 << 20
"""While the system maps pages, nothing else of the process maps memory or lets go of it: 20 ms in one piece where it
has to make them first, less than 1 ms in such ones where it has made them."""
HUGE_PAGE = 2 << 20
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_INTERLEAVE, _MOVE = 3, 2
"""`MPOL_INTERLEAVE` and `MPOL_MF_MOVE`: see mbind(2)."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Its number, by kind of CPU: glibc has no function for it."""
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FREED = memoryview(b"")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Slot:
    """Room for one frame in the pool, counted. Not thread-safe: its owner's mutex guards the count."""

    __slots__ = ("_pool", "_refs", "form", "frame", "offset", "sealed", "tenant")

    def __init__(self, pool: HostPool, offset: int, nbytes: int, form: FrameShape) -> None:
        self._pool = pool
        self._refs = 1
        self.offset = offset
        self.form = form
        self.frame = pool.memory[offset : offset + nbytes]
        self.sealed = False
        """Whether the header in front of the payload is valid, so that the frame can be written to tiers."""
        self.tenant = ""
        """The tenant whose key it was encrypted with where it was read from."""

    @property
    def references(self) -> int:
        """How many holders there are; 0 once the room has been freed."""
        return self._refs

    def payload(self, shard: int = 0, pages: int | None = None) -> memoryview:
        """The first `pages` pages of one shard (all by default): `pages * page_bytes` writable bytes."""
        form = self.form
        start = form.header_bytes + shard * form.shard_bytes
        size = form.shard_bytes if pages is None else pages * form.page_bytes
        return self.frame[start : start + size]

    def payload_offset(self, shard: int = 0) -> int:
        """Where in the pool the payload of a shard begins."""
        return self.offset + self.form.header_bytes + shard * self.form.shard_bytes

    def acquire(self) -> None:
        """Become one more holder.

        Raises:
            UsageError: The slot has been freed.
        """
        if self._refs < 1:
            raise UsageError("a freed slot cannot be acquired again")
        self._refs += 1

    def release(self) -> None:
        """Stop being a holder; the last one frees the room.

        Raises:
            UsageError: There was no holder left.
        """
        if self._refs < 1:
            raise UsageError("a slot was released more often than it was acquired")
        self._refs -= 1
        if not self._refs:
            self._pool.give_back(self)


class HostPool:
    """Memory of one node for chunks.

    Args:
        capacity: Bytes, rounded up to whole pages.
        hugepages: Take 2 MiB pages from the system's reserve.
        prefault: Fault the memory in on a thread of its own. Off, it is all usable at once and faulted by first use.
        numa_nodes: That the memory lies on, by turns; wherever the system puts it if there are none.

    Raises:
        PoolError: The machine hasn't that much memory free, or no huge pages, or no such NUMA node.
    """

    def __init__(
        self, capacity: int, *, hugepages: bool = False, prefault: bool = True, numa_nodes: Sequence[int] = ()
    ) -> None:
        unit = HUGE_PAGE if hugepages else ALIGN
        self.capacity = -(-capacity // unit) * unit
        if self.capacity < ALIGN:
            raise PoolError("cpu.capacity must be at least 4KiB")
        _check_free(self.capacity, hugepages)
        self.fd = _memfd(self.capacity, hugepages)
        self._map = mmap.mmap(self.fd, self.capacity)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if numa_nodes:
            _place(self.address, self.capacity, numa_nodes)
        # Where the system lets programs ask for them (shmem_enabled is `advise`), pages of 2 MiB without a reserve.
        _libc.madvise(self.address, self.capacity, _MADV_HUGEPAGE)
        self.slots = 0
        """Slots that are held by anybody."""
        self._extents = ExtentAllocator(0 if prefault else self.capacity)
        self._stop = threading.Event()
        self._faulter: threading.Thread | None = None
        self._prefault = prefault
        self._makes_pages = not hugepages and not _makes_huge_pages()
        log.info("host pool: %s of host memory%s", format_size(self.capacity), " in huge pages" if hugepages else "")

    @property
    def usable(self) -> int:
        """Bytes that are faulted in."""
        return self._extents.capacity

    @property
    def used(self) -> int:
        """Bytes in slots that are held by anybody."""
        return self._extents.capacity - self._extents.free_bytes

    def allocate(self, form: FrameShape) -> Slot | None:
        """A slot for a frame of that shape with one reference, or None when no room is contiguous."""
        nbytes = form.nbytes
        offset = self._extents.allocate(nbytes)
        if offset is None:
            return None
        self.slots += 1
        return Slot(self, offset, nbytes, form)

    def give_back(self, slot: Slot) -> None:
        """Free the room of a slot whose last reference is gone. Called by the slot."""
        self.slots -= 1
        self._extents.free(slot.offset, len(slot.frame))
        slot.frame = _FREED

    def start_prefault(self, mutex: threading.Lock, grown: Callable[[], None] = lambda: None) -> None:
        """Fault the memory in, first step before this returns, the rest on a daemon thread that adds each step to the
        usable room under `mutex` and calls `grown` after the last one."""
        if not self._prefault:
            return
        self._fault_step(0, mutex)
        self._faulter = threading.Thread(
            target=self._fault_all, args=(mutex, grown), name="lmcache-prefault", daemon=True
        )
        self._faulter.start()

    def close(self) -> None:
        """Let go of the memory. Views that are still held keep their part of it alive."""
        self._stop.set()
        if self._faulter is not None:
            self._faulter.join()
        self.memory.release()
        with contextlib.suppress(BufferError):  # somebody still holds a view
            self._map.close()
        os.close(self.fd)

    def _fault_all(self, mutex: threading.Lock, grown: Callable[[], None]) -> None:
        for start in range(FAULT_STEP, self.capacity, FAULT_STEP):
            if self._stop.is_set():
                return
            self._fault_step(start, mutex)
        grown()

    def _fault_step(self, start: int, mutex: threading.Lock) -> None:
        size = min(FAULT_STEP, self.capacity - start)
        if self._makes_pages:
            with contextlib.suppress(OSError):  # then they are made as they are mapped
                os.posix_fallocate(self.fd, start, size)
        if not populate(self.address, start, size):
            self.memory[start : start + size : ALIGN] = bytes(-(-size // ALIGN))  # kernels before 5.14
        with mutex:
            self._extents.grow(size)


def populate(address: int, start: int, size: int) -> bool:
    """Have the pages of a mapping there, so that no copy stops for them; lets go of the GIL. False where the kernel
    cannot (before 5.14)."""
    return not any(
        _libc.madvise(address + piece, min(FAULT_PIECE, start + size - piece), _MADV_POPULATE_WRITE)
        for piece in range(start, start + size, FAULT_PIECE)
    )


def _makes_huge_pages() -> bool:
    """Whether the system makes pages of 2 MiB where they are mapped; made before that, they would be small."""
    try:
        with open(SHMEM_ENABLED) as file:
            setting = file.read()
    except OSError:
        return False
    return not ("[never]" in setting or "[deny]" in setting)


def _place(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Have memory lie on these NUMA nodes by turns, also what is there of it already."""
    missing = [node for node in nodes if not os.path.isdir(f"/sys/devices/system/node/node{node}")]
    if missing:  # the system would pass them over
        raise _not_placed(nodes, f"there is no node {missing[0]}")
    number = _MBIND.get(platform.machine())
    words = (ctypes.c_ulong * (max(nodes) // _WORD + 1))()
    for node in nodes:
        words[node // _WORD] |= 1 << node % _WORD
    arguments = (address, nbytes, _INTERLEAVE, words, ctypes.c_ulong(len(words) * _WORD + 1), _MOVE)
    if number is None or _libc.syscall(number, ctypes.c_void_p(arguments[0]), ctypes.c_ulong(nbytes), *arguments[2:]):
        raise _not_placed(nodes, "not known on this kind of CPU" if number is None else os.strerror(ctypes.get_errno()))


def _not_placed(nodes: Sequence[int], reason: str) -> PoolError:
    return PoolError(
        f"cpu.numa_nodes: memory cannot be placed on {', '.join(map(str, nodes))} ({reason}); see "
        "/sys/devices/system/node/online for the nodes that there are, or leave it out"
    )


def _memfd(capacity: int, hugepages: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if hugepages else 0)
    fd = os.memfd_create("lmcache-pool", flags)
    try:
        os.ftruncate(fd, capacity)
        if hugepages:
            os.posix_fallocate(fd, 0, capacity)
        # Others map it too: nobody may take memory away from under them.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise PoolError(
            f"cpu.hugepages: the system has no {format_size(capacity)} of huge pages reserved ({error.strerror}); "
            f"reserve them with 'sysctl vm.nr_hugepages={capacity // HUGE_PAGE}' or write 'hugepages: false'"
        ) from error
    return fd


def _check_free(capacity: int, hugepages: bool) -> None:
    if hugepages:
        return  # the reserve is asked for when it is taken
    free = available_memory()
    if free is not None and capacity > free:
        raise PoolError(
            f"cpu.capacity is {format_size(capacity)} but only {format_size(free)} of memory is free; "
            "write a smaller cpu.capacity. The pool is one for all engine processes of this node, not one a process"
        )
