"""numpy arrays over memory that somebody else owns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["array_over"]


class _Memory:
    def __init__(self, interface: dict[str, object], owners: object) -> None:
        self.__array_interface__ = interface
        self.owners = owners


def array_over(
    address: int, shape: tuple[int, ...], typestr: str, *, owners: object, strides: tuple[int, ...] | None = None
) -> NDArray[Any]:
    """A writable array at `address`, in C order unless `strides` (in bytes) are given.

    It and every array made from it keep `owners` alive. Nothing is checked: an index inside the array must be the
    address of memory that the owners hold.
    """
    interface = {"version": 3, "data": (address, False), "shape": shape, "typestr": typestr, "strides": strides}
    return np.asarray(_Memory(interface, owners))
