"""Bytes between memory, a device's or the host's, and open files, by KvikIO. Blocks, and raises `OSError`.

KvikIO opens files by their names, and more than once. It is given the name of an open file, in /proc: so it has the
very file that was looked at, whatever its name means by now, and no link is followed.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from lmcache_backends.gds.library import claims, shortened
from lmcache_backends.nfs.moving import PlainMover

__all__ = ["CuFiles", "DeviceMemory", "PayloadFirst"]

_KNOWN = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EROFS, errno.EACCES),
    *(errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.EINVAL, errno.ENOMEM, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    errno.EFBIG,
)
"""Errors of files that KvikIO tells in words, and whose numbers others go by."""
_START = 4096
"""Bytes at the start of a frame without which its header is none."""


class DeviceMemory:
    """A piece of a device's memory, as libraries of Python hand it to each other."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._start = address
        self._end = address + nbytes
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }

    def __getitem__(self, behind: slice) -> DeviceMemory:
        """What is left of it behind so many bytes."""
        start = self._start + behind.start
        return DeviceMemory(start, self._end - start)


class CuFiles:
    """Moves bytes. Called from many threads at once. A call is one task of KvikIO's, and has ended when that has: what
    is split into several may leave some under way when one of them fails."""

    def __init__(self, kvikio: Any) -> None:
        self._open = kvikio.CuFile

    def read(self, fd: int, into: memoryview) -> bool:
        """Makes this a `Mover`."""
        return self.read_at(fd, into, into.nbytes, 0)

    def write(self, fd: int, data: memoryview, offset: int = 0) -> None:
        self.write_at(fd, data, data.nbytes, offset)

    def read_at(self, fd: int, into: memoryview | DeviceMemory, nbytes: int, offset: int) -> bool:
        """Fill `into`, of `nbytes`, with what is at `offset` of the file. False if the file ends before that."""
        try:
            with claims.moving(), self._open(f"/proc/self/fd/{fd}", "r") as file:
                return bool(file.pread(into, nbytes, offset, nbytes).get() == nbytes)
        except (RuntimeError, ValueError, MemoryError) as error:
            if str(error).endswith(": EOF"):
                return False
            raise _as_os_error(error) from error

    def write_at(self, fd: int, data: memoryview | DeviceMemory, nbytes: int, offset: int) -> None:
        """Put `data`, of `nbytes`, at `offset` of the file, which is open for reading and writing."""
        try:
            with claims.moving(), self._open(f"/proc/self/fd/{fd}", "r+") as file:
                done = 0
                while done < nbytes:  # as much as there was room for; the rest says whether there is more
                    left = nbytes - done
                    some = file.pwrite(data[done:], left, offset + done, left).get()
                    if not some:
                        raise OSError(errno.EIO, f"KvikIO writes nothing more after {done} of {nbytes} bytes")
                    done += some
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _as_os_error(error) from error


class PayloadFirst:
    """A `Mover` for what will be believed by its header: that is written once what is behind it is on the medium. So a
    machine that stops leaves no header in front of bytes that never came."""

    def __init__(self, mover: PlainMover | CuFiles) -> None:
        self._mover = mover

    def read(self, fd: int, into: memoryview) -> bool:
        return self._mover.read(fd, into)

    def write(self, fd: int, data: memoryview) -> None:
        self._mover.write(fd, data[_START:], _START)
        os.fdatasync(fd)
        self._mover.write(fd, data[:_START])


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, "KvikIO got no memory")
    text = shortened(error)
    for code in _KNOWN:
        if text.endswith(os.strerror(code)):
            return OSError(code, os.strerror(code))
    return OSError(errno.EREMOTEIO, f"KvikIO failed: {text}; see cufile.log where cuFile is used")
