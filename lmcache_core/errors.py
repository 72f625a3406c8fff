"""Every exception this project raises: what happened, where, and what to do about it.

A miss is never an exception. An exception that reaches a caller is either a mistake of the caller (`ConfigError`,
`PluginError`, `LayoutError`), or a failure of a backend (`BackendError`) that the node turns into misses.
"""


class LMCacheError(Exception):
    """Root of all exceptions of this project."""


class ConfigError(LMCacheError):
    """The configuration cannot be used; the message names file, line, key and what to write instead."""


class PluginError(LMCacheError):
    """A plugin named in the configuration cannot be loaded; the message lists what is installed."""


class LayoutError(LMCacheError, ValueError):
    """KV, tokens or keys of a shape or type that cannot be cached; the message says which is expected."""


class PoolError(LMCacheError):
    """The host pool cannot be taken from this machine's memory."""


class BackendError(LMCacheError):
    """A backend failed to carry out a request. Nothing of the request may be served; the medium may recover."""


class TransferError(LMCacheError):
    """A device failed to copy KV, or cannot be used for it; the message says what its driver said, and what to do."""


class FrameError(LMCacheError):
    """Bytes that claim to be a chunk and are not: truncated, altered, or of another namespace or version."""


class UsageError(LMCacheError):
    """An argument or a handle that cannot be meant, such as a double release. Always a bug of the caller."""


class ClosedError(LMCacheError):
    """The node, pool or backend has been closed."""
