"""What a cubin says of its kernels. It is an ELF file, with notes for the driver in sections named `.nv.info`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

EM_CUDA = 190
_WITH_VALUE, _WITH_DATA = 3, 4
_FRAME_SIZE, _PARAMETER_BYTES = 0x11, 0x19


class Kernel(NamedTuple):
    parameter_bytes: int
    frame_bytes: int
    """Memory of each thread's own: what did not fit into registers."""


def kernels(cubin: bytes) -> dict[str, Kernel]:
    assert cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin, 18) == (EM_CUDA,)
    sections = dict(_sections(cubin))
    symbols = sections[".symtab"]
    strings = sections[".strtab"]
    frames = {}
    for attribute, data in _notes(sections[".nv.info"]):
        if attribute == _FRAME_SIZE:
            symbol, size = struct.unpack("<II", data)
            frames[_string(strings, struct.unpack_from("<I", symbols, 24 * symbol)[0])] = size
    found = {}
    for name, section in sections.items():
        if name.startswith(".nv.info."):
            kernel = name.removeprefix(".nv.info.")
            (size,) = (
                int.from_bytes(data, "little") for attribute, data in _notes(section) if attribute == _PARAMETER_BYTES
            )
            found[kernel] = Kernel(size, frames[kernel])
    return found


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = cubin[headers[names][4] :]
    for name, _, _, _, offset, length in headers:
        yield _string(strings, name), cubin[offset : offset + length]


def _notes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _WITH_DATA:
            yield attribute, section[at : at + value]
            at += value
        elif form == _WITH_VALUE:
            yield attribute, value.to_bytes(2, "little")


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
