"""KvikIO: whether it is here, how it can move bytes on this machine, and what it is told. Blocks.

KvikIO has one set of settings for a process. Who tells it something says so here, so that no tier changes what another
one relies on.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from typing import Any, NamedTuple

from lmcache_backends.gds.options import Compat, GdsOptions
from lmcache_core.errors import ConfigError

__all__ = ["Claims", "Way", "claims", "library", "way_of"]

_DRIVER = "libcuda.so.1"
_UDEV = "/run/udev"
_NVIDIA_FS = "/proc/driver/nvidia-fs"
_VARIABLE = "KVIKIO_COMPAT_MODE"


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
    if compat == "always":
        return Way(True, False, "as `compat: always` asks for")
    if kvikio.defaults.is_compat_mode_preferred():
        return Way(True, False, _why_without_cufile(kvikio))
    try:
        kvikio.cufile_driver.driver_open()
        kvikio.cufile_driver.driver_close()
    except RuntimeError as error:
        return Way(True, False, f"cuFile does not start ({shortened(error)}); see `gdscheck -p` and cufile.log")
    if not os.path.exists(_NVIDIA_FS):
        why = "nvidia-fs is not loaded, so cuFile itself copies through host memory where a drive cannot do without"
        return Way(True, True, f"{why}; see `gdscheck -p`")
    return Way(True, True, "")


def _why_without_cufile(kvikio: Any) -> str:
    if _VARIABLE in os.environ and kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
        return f"as {_VARIABLE}={os.environ[_VARIABLE]} asks for"
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
    """What tiers of this process have told KvikIO."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compat: dict[object, Compat] = {}
        self._before: Any = None

    def claim(self, kvikio: Any, owner: object, options: GdsOptions) -> None:
        """Have KvikIO work as the options of a tier ask for. May be repeated.

        Raises:
            ConfigError: Another tier needs it otherwise.
        """
        with self._lock:
            others = set(self._compat.values()) - {options.compat}
            if others:
                raise ConfigError(
                    f"gds: compat: {options.compat} and {others.pop()} cannot both be in one process; KvikIO has one "
                    "mode for all: write the same for all tiers"
                )
            settings = kvikio.defaults
            if not self._compat:
                self._before = settings.get("compat_mode")
            self._compat[owner] = options.compat
            if options.compat != "auto":
                mode = kvikio.CompatMode.ON if options.compat == "always" else kvikio.CompatMode.OFF
                settings.set("compat_mode", mode)
            for name in ("auto_direct_io_read", "auto_direct_io_write"):
                settings.set(name, options.direct != "never")
        if settings.get("num_threads") < options.threads:
            settings.set("num_threads", options.threads)  # which waits for all I/O that is under way

    def release(self, kvikio: Any, owner: object) -> None:
        """A tier needs nothing of it any more."""
        with self._lock:
            if self._compat.pop(owner, None) not in (None, "auto") and not self._compat:
                kvikio.defaults.set("compat_mode", self._before)


claims = Claims()
