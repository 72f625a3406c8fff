"""Bytes between memory and files, by a plugin of NIXL. Blocks."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from lmcache_core.errors import BackendError, ConfigError

__all__ = ["Mover", "library"]

_LIBRARIES = ("nixl", "nixl_cu13", "nixl_cu12")
_NEEDED = ("DRAM_SEG", "FILE_SEG")
_PAUSE = 0.0001
"""Seconds between two looks at a transfer."""

_names = itertools.count()


def library() -> Any:
    """NIXL's Python interface, by whichever name it is installed.

    Raises:
        ConfigError: It is not, or cannot be loaded.
    """
    for name in _LIBRARIES:
        try:
            module = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(
                f"nixl: NIXL cannot be loaded: {error}; install what it lacks, or another build"
            ) from error
        logging.getLogger("nixl").setLevel(logging.CRITICAL)  # it writes to standard output; errors are told here
        return module
    raise ConfigError("nixl: NIXL is not installed; pip install 'lmcache-core[nixl]'")


class Mover:
    """Agents of NIXL, one for each thread that moves bytes: they know no locks."""

    def __init__(self, api: Any, plugin: str, parameters: Mapping[str, str], path: str) -> None:
        self._api = api
        self._plugin = plugin
        self._parameters = dict(parameters)
        self._path = path
        self._own = threading.local()

    def check(self) -> None:
        """See whether the plugin can be used.

        Raises:
            ConfigError: It cannot.
        """
        bare = self._api.nixl_agent(self._name(), self._api.nixl_agent_config(backends=[]))
        known = sorted(bare.get_plugin_list())
        if self._plugin not in known or not set(_NEEDED) <= set(bare.get_plugin_mem_types(self._plugin)):
            why = "cannot move files here" if self._plugin in known else "is not one that this NIXL has"
            raise ConfigError(f"nixl: plugin {self._plugin} {why}; it has {', '.join(known)}; POSIX always can")
        self._agent()

    def write(self, fd: int, data: memoryview) -> None:
        """Put all of `data` at the start of a file. Raises `BackendError`."""
        self._move("WRITE", fd, data)

    def read(self, fd: int, into: memoryview) -> None:
        """Fill `into` from the start of a file that has as much. Raises `BackendError`."""
        self._move("READ", fd, into)

    def _move(self, verb: str, fd: int, memory: memoryview) -> None:
        agent, name = self._agent()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        known = []
        try:
            here = agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")
            known.append(here)
            there = agent.register_memory([(0, memory.nbytes, fd, "")], "FILE")
            known.append(there)
            handle = agent.initialize_xfer(verb, here.trim(), there.trim(), name)
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                    if state == "PROC":
                        time.sleep(_PAUSE)
            finally:
                agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001  its exceptions have no class in common but this one
            raise self._failed(verb, type(error).__name__) from None
        finally:
            for each in known:
                agent.deregister_memory(each)
        if state != "DONE":
            raise self._failed(verb, state)

    def _failed(self, verb: str, what: str) -> BackendError:
        doing = "writing to" if verb == "WRITE" else "reading from"
        where = f"nixl: {self._path}: {doing} a file by {self._plugin} failed ({what})"
        return BackendError(f"{where}; look at the lines that NIXL writes to standard error, and in dmesg")

    def _agent(self) -> tuple[Any, str]:
        if not hasattr(self._own, "agent"):
            name = self._name()
            agent = self._api.nixl_agent(name, self._api.nixl_agent_config(backends=[]))
            try:
                agent.create_backend(self._plugin, self._parameters)
            except Exception as error:  # noqa: BLE001  its exceptions have no class in common but this one
                raise ConfigError(
                    f"nixl: plugin {self._plugin} does not start with these parameters ({type(error).__name__}); "
                    "correct parameters, or look at the lines that NIXL writes to standard error"
                ) from None
            self._own.agent, self._own.name = agent, name
        return self._own.agent, self._own.name

    @staticmethod
    def _name() -> str:
        return f"lmcache-core-{os.getpid()}-{next(_names)}"
