"""KvikIO: whether it is here, how it can move bytes on this machine, and what it is told. Blocks.

KvikIO has one set of settings for a process. Who tells it something says so here, so that no tier changes what another
one relies on.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lmcache_backends.gds.options import Compat, GdsOptions
from lmcache_core.errors import ConfigError

__all__ = ["Claims", "Way", "claims", "library", "way_of"]

_DRIVER = "libcuda.so.1"
_UDEV = "/run/udev"
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvgpu", "/dev/nvhost-ctrl")
_FDS = "/proc/self/fd"
_NVIDIA_FS = "/proc/driver/nvidia-fs"
_VARIABLE = "KVIKIO_COMPAT_MODE"
_DIRECT = ("auto_direct_io_read", "auto_direct_io_write")


def library() -> Any:
    """KvikIO's Python interface.

    Raises:
        ConfigError: It is not installed, or cannot be loaded.
    """
    try:
        importlib.import_module("kvikio.defaults")
        importlib.import_module("kvikio.cufile_driver")
        return importlib.import_module("kvikio")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvikio":
            raise ConfigError("gds: KvikIO is not installed; pip install 'lmcache-core[gds]'") from None
        raise _unloadable(error) from error
    except (ImportError, OSError, RuntimeError) as error:  # the last is what its search for CUDA's libraries raises
        raise _unloadable(error) from error


def _unloadable(error: Exception) -> ConfigError:
    why = str(error).strip().partition("\n")[0]
    return ConfigError(f"gds: KvikIO cannot be loaded: {why}; install what it lacks, or another build of it")


class Way(NamedTuple):
    """How bytes can be moved here."""

    device: bool
    """Whether a device's memory can be read and written at all."""
    cufile: bool
    """Whether cuFile does that. If not, KvikIO's compatibility mode does."""
    why: str
    """What is not as it could be, and what to do about it; empty if all is."""


def way_of(kvikio: Any, compat: Compat) -> Way:
    """How KvikIO, told what `compat` asks for, will move bytes."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        why = f"there is no CUDA driver ({error}), so no device, and host memory is moved by plain reads and writes"
        return Way(False, False, f"{why}; install NVIDIA's driver, or take nfs or disk")
    if not os.path.isdir(_FDS):
        return Way(False, False, f"{_FDS} cannot be read, by which KvikIO is given open files; mount /proc")
    if compat == "always":
        return Way(True, False, "as `compat: always` asks for")
    if known := claims.why_without_cufile:
        return Way(True, False, known)
    if kvikio.defaults.is_compat_mode_preferred():
        return Way(True, False, _why_without_cufile(kvikio))
    try:
        kvikio.cufile_driver.driver_open()
        kvikio.cufile_driver.driver_close()
    except RuntimeError as error:
        asked = kvikio.defaults.get("compat_mode") == kvikio.CompatMode.OFF and compat == "auto"
        though = f", though {_VARIABLE}={os.environ.get(_VARIABLE, 'OFF')} asks for it" if asked else ""
        why = f"cuFile does not start ({shortened(error)}){though}; see `gdscheck -p` and cufile.log"
        if compat == "auto":
            claims.without_cufile(kvikio, why)
        return Way(True, False, why)
    if not os.path.exists(_NVIDIA_FS):
        why = "nvidia-fs is not loaded, so cuFile itself copies through host memory where a drive cannot do without"
        return Way(True, True, f"{why}; see `gdscheck -p`")
    return Way(True, True, "")


def _why_without_cufile(kvikio: Any) -> str:
    if _VARIABLE in os.environ and kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
        return f"as {_VARIABLE}={os.environ[_VARIABLE]} asks for"
    if not any(map(os.path.exists, _GPUS)):
        return (
            f"there is a CUDA driver, but no GPU is to be seen ({_GPUS[0]} is missing); give this process one, as "
            "`--gpus all` does in a container, or take nfs or disk"
        )
    if not os.access(_UDEV, os.R_OK):
        return f"cuFile needs {_UDEV}, which cannot be read; in a container, --volume {_UDEV}:{_UDEV}:ro"
    return "KvikIO finds no cuFile; install nvidia-cufile-cu12, or CUDA's own"


def shortened(error: Exception) -> str:
    """What an error of KvikIO's says, without the place in KvikIO's sources."""
    text = " ".join(str(error).split())
    for ending in (".cpp:", ".hpp:"):
        before, found, after = text.partition(ending)
        if found and before.startswith(("KvikIO ", "cuFile ", "CUDA ", "Linux ")):
            return after.partition(": ")[2] or text
    return text


class Claims:
    """What tiers of this process have told KvikIO. The first of them decides, until the last one is closed: nothing is
    changed that another one relies on. Then all is put back but its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compat: dict[object, Compat] = {}
        self._before: dict[str, Any] = {}
        self._moving = 0
        self._without_cufile = ""

    def claim(self, kvikio: Any, owner: object, options: GdsOptions) -> list[str]:
        """Have KvikIO work as the options of a tier ask for, and return in what it does not, and what to do about it.
        May be repeated.

        Raises:
            ConfigError: Another tier needs it otherwise, or the environment asks for what it does not know.
        """
        settings = kvikio.defaults
        with self._lock:
            _check_environment(settings)
            others = self._compat.keys() - {owner}
            modes = {self._compat[other] for other in others} - {options.compat}
            if modes:
                raise ConfigError(
                    f"gds: compat: {options.compat} and {modes.pop()} cannot both be in one process; KvikIO has one "
                    "mode for all: write the same for all tiers"
                )
            self._compat[owner] = options.compat
            return _differences(settings, options) if others else self._decide(kvikio, options)

    def _decide(self, kvikio: Any, options: GdsOptions) -> list[str]:
        settings = kvikio.defaults
        self._put_back(settings)
        self._before = {name: settings.get(name) for name in ("compat_mode", *_DIRECT)}
        if options.compat != "auto":
            settings.set("compat_mode", kvikio.CompatMode.ON if options.compat == "always" else kvikio.CompatMode.OFF)
        for name in _DIRECT:
            settings.set(name, options.direct != "never")
        threads = settings.get("num_threads")
        if threads >= options.threads:
            return []
        if self._moving:
            return [
                f"KvikIO keeps {threads} threads, not {options.threads}: what an earlier opening has begun still "
                "hangs, and setting them would stop it for good; they are set at an opening after it has ended"
            ]
        settings.set("num_threads", options.threads)
        return []

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While this lasts, bytes are moved. KvikIO's threads are not set then: what waits for one of them could wait
        for ever."""
        with self._lock:
            self._moving += 1
        try:
            yield
        finally:
            with self._lock:
                self._moving -= 1

    def without_cufile(self, kvikio: Any, why: str) -> None:
        """Have KvikIO leave cuFile alone, which does not work. It would try it again with each file, or fail."""
        with self._lock:
            self._without_cufile = why
            kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)

    @property
    def why_without_cufile(self) -> str:
        """Why it does; empty if it does not."""
        return self._without_cufile

    def release(self, kvikio: Any, owner: object) -> None:
        """A tier needs nothing of it any more."""
        with self._lock:
            if self._compat.pop(owner, None) is not None and not self._compat:
                self._put_back(kvikio.defaults)

    def _put_back(self, settings: Any) -> None:
        for name, value in self._before.items():
            settings.set(name, value)
        self._before = {}
        self._without_cufile = ""


def _check_environment(settings: Any) -> None:
    try:
        settings.get("compat_mode")  # the first time KvikIO reads all of its variables
    except (ValueError, RuntimeError) as error:
        text = shortened(error)
        named = re.search(r"KVIKIO_[A-Z_]*[A-Z]", text)
        name = named[0] if named else _VARIABLE  # the only one that it does not name
        asked = f"{name}={os.environ.get(name, '')}"
        raise ConfigError(f"gds: {asked} is nothing that KvikIO takes ({text}); correct or unset it") from error


def _differences(settings: Any, options: GdsOptions) -> list[str]:
    """In what KvikIO works otherwise than a tier asks for that is not the first one."""
    found = []
    threads = settings.get("num_threads")
    if threads < options.threads:
        found.append(
            f"KvikIO has {threads} threads for all tiers of this process, not {options.threads}: it gets them when the "
            "first of them is opened; write the same `threads` for all"
        )
    past = settings.get("auto_direct_io_read")
    if past != (options.direct != "never"):
        way = "past" if past else "through"
        found.append(
            f"direct: {options.direct}, but KvikIO goes {way} the page cache for all tiers of this process, as the "
            "first of them asks for; write the same `direct` for all"
        )
    return found


claims = Claims()
