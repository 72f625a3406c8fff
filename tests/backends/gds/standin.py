"""KvikIO as far as the tier asks for it, without a driver: what is asked of it is written down and strictly checked."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

ALIGN = 4096


class CompatMode(enum.Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class Call(NamedTuple):
    """One `pread` or `pwrite`."""

    verb: str
    device: bool
    nbytes: int
    offset: int
    tasks: int


class Memory:
    """Memory of a device: at addresses of the host that nobody but this class is to look at."""

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self._mapped = mmap.mmap(-1, nbytes)
        self._bytes = memoryview(self._mapped)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self._used = 0

    def allocate(self, nbytes: int) -> int:
        address = self._start + self._used
        self._used += -(-nbytes // ALIGN) * ALIGN
        assert self._used <= len(self._bytes)
        return address

    def at(self, address: int, nbytes: int) -> memoryview:
        start = address - self._start
        assert 0 <= start < start + nbytes <= len(self._bytes), "not the device's memory"
        return self._bytes[start : start + nbytes]

    def put(self, address: int, content: bytes | memoryview) -> None:
        self.at(address, len(content))[:] = content

    def get(self, address: int, nbytes: int) -> bytes:
        return bytes(self.at(address, nbytes))

    def copy_back(self, address: int, into: memoryview) -> None:
        into[:] = self.at(address, len(into))


class Future:
    """One transfer under way, on a thread of its own."""

    def __init__(self, file: OpenFile, move: Callable[[], int]) -> None:
        self._file = file
        self._outcome: int | Exception = RuntimeError("not ended")
        self._thread = threading.Thread(target=self._run, args=(move,), daemon=True)
        file.kvikio.under_way.add(self)
        self._thread.start()

    def _run(self, move: Callable[[], int]) -> None:
        self._file.kvikio.entered.release()
        self._file.kvikio.gate.wait()
        try:
            self._outcome = move()
        except Exception as error:  # noqa: BLE001  it is told by `get`
            self._outcome = error

    def get(self) -> int:
        self._thread.join()
        self._file.kvikio.under_way.discard(self)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class OpenFile:
    """An open file."""

    def __init__(self, kvikio: StandIn, path: str, flags: str) -> None:
        self.kvikio = kvikio
        assert flags in ("r", "r+"), "a file that is there is neither made nor cut"
        self.fd = os.open(path, os.O_RDONLY if flags == "r" else os.O_RDWR)
        kvikio.open_files.add(self)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.kvikio.under_way_of(self), "closed while a transfer was under way"
        os.close(self.fd)
        self.kvikio.open_files.discard(self)

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> Future:
        memory = self._memory("pread", buf, size, file_offset, task_size)
        return Future(self, lambda: self._read(memory, file_offset))

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> Future:
        memory = self._memory("pwrite", buf, size, file_offset, task_size)
        return Future(self, lambda: self._write(memory, file_offset))

    def _memory(self, verb: str, buf: Any, size: int, offset: int, task_size: int) -> memoryview:
        if self.kvikio.error:
            raise self.kvikio.error
        described = getattr(buf, "__cuda_array_interface__", None)
        if described is None:
            memory = memoryview(buf)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if not memory.readonly else 0
            whole = address % ALIGN == offset % ALIGN == size % ALIGN == 0
            assert whole or self.kvikio.short, "host memory and its places are of whole pages"
        else:
            (address, readonly), shape = described["data"], described["shape"]
            assert (described["typestr"], described["strides"], readonly) == ("|u1", None, False)
            memory = self.kvikio.memory.at(address, *shape)
        assert len(memory) == size
        self.kvikio.calls.append(Call(verb, described is not None, size, offset, -(-size // task_size)))
        return memory

    def _read(self, memory: memoryview, offset: int) -> int:
        content = os.pread(self.fd, len(memory), offset)
        if len(content) < len(memory):
            raise RuntimeError("KvikIO failure at: posix_io.hpp:173: POSIX error on pread: EOF")
        memory[:] = content
        for damage in self.kvikio.damage:
            memory[damage] ^= 1
        return self._told(len(content))

    def _write(self, memory: memoryview, offset: int) -> int:
        content = bytearray(memory)
        for damage in self.kvikio.damage:
            content[damage] ^= 1
        return self._told(os.pwrite(self.fd, content, offset))

    def _told(self, done: int) -> int:
        return done - self.kvikio.short


class Settings:
    """KvikIO's `defaults`."""

    def __init__(self, under_way: Callable[[], object]) -> None:
        self._under_way = under_way
        self.values: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO,
            "num_threads": 1,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.changed: list[str] = []
        self.cufile = True

    def get(self, name: str) -> Any:
        return self.values[name]

    def set(self, name: str, value: Any) -> None:
        assert name in self.values
        assert name != "num_threads" or not self._under_way(), "transfers under way would never end"
        self.changed.append(name)
        self.values[name] = value

    def is_compat_mode_preferred(self) -> bool:
        mode = self.values["compat_mode"]
        return mode is CompatMode.ON or (mode is CompatMode.AUTO and not self.cufile)


class Driver:
    """cuFile's driver."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.open = 0

    def driver_open(self) -> None:
        if self.error:
            raise self.error
        self.open += 1

    def driver_close(self) -> None:
        self.open -= 1


class StandIn:
    """The module `kvikio`."""

    CompatMode = CompatMode

    def __init__(self) -> None:
        self.defaults = Settings(lambda: self.under_way)
        self.cufile_driver = Driver()
        self.memory = Memory()
        self.calls: list[Call] = []
        self.open_files: set[OpenFile] = set()
        self.under_way: set[Future] = set()
        self.entered = threading.Semaphore(0)
        """Released by each transfer that has begun."""
        self.gate = threading.Event()
        """Transfers hang until it is set."""
        self.gate.set()
        self.error: Exception | None = None
        self.damage: tuple[int, ...] = ()
        """Places of a transfer at which a bit arrives wrong."""
        self.short = 0

    def CuFile(self, path: str, flags: str = "r") -> OpenFile:
        return OpenFile(self, path, flags)

    def under_way_of(self, file: OpenFile) -> list[Future]:
        return [future for future in self.under_way if future._file is file]
