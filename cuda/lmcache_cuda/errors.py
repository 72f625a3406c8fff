"""What this room raises: what happened, where, and what to do about it.

Nothing here knows the core, so these have a root of their own.
"""


class CudaError(Exception):
    """Root of all exceptions of this room."""


class UnavailableError(CudaError):
    """The driver or the compiler is not on this machine, or too old; the message says how to get it."""


class CompileError(CudaError):
    """The compiler refused the kernels; the message has its log."""


class DriverError(CudaError):
    """A call of the driver failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """As in `CUresult`."""


class ClosedError(CudaError):
    """What is asked for something has been closed."""


class GeometryError(CudaError, ValueError):
    """KV that lies as these kernels cannot copy it, or an argument that cannot be meant."""
