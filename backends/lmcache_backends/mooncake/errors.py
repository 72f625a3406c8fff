"""Codes that the library returns, and what to tell of them."""

from __future__ import annotations

from lmcache_core.errors import BackendError, ConfigError

__all__ = ["ABSENT", "BUSY", "FULL", "NOT_FOUND", "TOO_SMALL", "TRANSFER", "failed", "lacks"]

FULL = -200
TOO_SMALL = -600
"""Of a read: the value is larger than the memory for it."""
NOT_FOUND = -704
TRANSFER = -800
ABSENT = frozenset({-703, NOT_FOUND, -707, -710, -712, -714})
"""There is no value now: none, one that is being written or removed, or one whose lease ran out in the middle."""
BUSY = frozenset({-703, -706, -708, -714})
"""It cannot be removed just now."""

_BY_ITSELF = "the tier tries again by itself"
_KNOWN = {
    -1: "the store does not work; look at the lines that Mooncake writes to standard error",
    -101: "a host that gave memory is gone; " + _BY_ITSELF,
    -601: f"the master does not know this host any more; {_BY_ITSELF}",
    TRANSFER: f"a transfer failed: the host that has the value may be gone; {_BY_ITSELF}",
    -900: f"the master does not answer; start it, or correct master; {_BY_ITSELF}",
    -901: f"the master does not answer in time; {_BY_ITSELF}",
}


def failed(code: int, master: str, what: str) -> BackendError:
    """The error for a code, met while doing `what`."""
    told = _KNOWN.get(code, "look at the lines that Mooncake writes to standard error")
    return BackendError(f"mooncake: {master}: {what} failed ({code}): {told}")


def lacks(error: ImportError) -> ConfigError:
    """The error for a library that cannot be imported."""
    if isinstance(error, ModuleNotFoundError):
        advice = "pip install 'lmcache-core[mooncake]', or mooncake-transfer-engine where CUDA is"
        return ConfigError(f"mooncake: mooncake is not installed; {advice}")
    if "libibverbs" in str(error):
        return ConfigError("mooncake: Mooncake needs libibverbs; on Debian, apt-get install libibverbs1")
    return ConfigError(
        f"mooncake: Mooncake cannot be loaded: {error}; without CUDA, pip install mooncake-transfer-engine-non-cuda"
    )
