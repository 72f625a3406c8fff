"""Modules in place of packages that SGLang imports and a text model on a CPU does not use: any name can be imported
from them, and using it is an error that says what is missing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["stand_in_for"]


def _placeholder(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(self: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{module}.{name} is a placeholder: the tests run without {module.split('.')[0]}")

        return type(name, (), {"__init__": missing})

    return find


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = fullname.startswith(f"{self._package}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _placeholder(module.__name__)  # type: ignore[method-assign]


def stand_in_for(package: str) -> Callable[[str], Any]:
    """Have all modules of a package be found. Returns the package's own `__getattr__`."""
    sys.meta_path.insert(0, _Submodules(package))
    return _placeholder(package)
