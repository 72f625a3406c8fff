"""What went wrong with a request, and what to tell the user: one line that says what to change.

Bodies of errors are not passed on: servers write keys and signed headers into them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lmcache_core.errors import BackendError, ConfigError

__all__ = ["NO_CREDENTIALS", "TRIES_AGAIN", "Dialect", "Fault", "fault_of_text", "lacks", "told"]

TRIES_AGAIN = "the tier tries again by itself"

NO_CREDENTIALS = "no credentials"
"""There was no request, for want of something to sign it with."""

_PASSING_STATUS = frozenset({429, 500, 502, 503, 504})
_PASSING = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalError",
        "OperationAborted",
        "OperationTimedOut",
        "RequestTimeout",
        "ServerBusy",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
_FULL = frozenset({"QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "InsufficientStorage"})
_UNKNOWN_VERB = frozenset({"NotImplemented", "MethodNotAllowed"})
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"})

_STATUS = re.compile(r"status code: (\d{3})|with status (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_URL = re.compile(r"https?://[^\s\"]+")
_UNSIGNED = re.compile(r"token request|get-access-token")
_BEYOND = "Wanted range starting at"  # what obstore makes of an empty answer from where an object ends
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")

# What the clients write of a connection that failed, in the order in which it tells more.
_LINK = (
    (r"InvalidCertificate|CERTIFICATE_VERIFY|certificate verify", "the server's certificate is not accepted", False),
    (r"InvalidContentType|WRONG_VERSION_NUMBER|record layer failure", "the server does not speak TLS", False),
    (r"dns error|Name or service not known|gaierror|resolve", "its host has no address", True),
    (r"ConnectionRefused|[Cc]onnection refused|Connect call failed", "connection refused", True),
    (r"TimedOut|[Tt]imed out|Timeout|(Read|Connect) timeout", "no answer in time", True),
    (r"ConnectionReset|Connection reset|BrokenPipe", "the connection was reset", True),
    (
        r"IncompleteMessage|IncompleteBody|UnexpectedEof|[Dd]isconnected|closed|not enough data",
        "the connection ended early",
        True,
    ),
)


class Dialect(NamedTuple):
    """What a protocol calls things, and what to tell of them."""

    door: str
    """Name of the backend, and of the extra that has its library."""
    server: str
    """What speaks it."""
    absent: str
    """What it says of an object that is not there."""
    gone: str
    """What it says if there is no bucket of that name."""
    never: Mapping[str, str]
    """What can never work, by its code: what it means, and what to change. May name `{objects}`."""
    now: Mapping[str, str]
    """What does not work now."""


class Fault(Exception):
    """A request that failed. `status` is None if there was no answer; `code` is the protocol's name for the failure,
    or says in words what became of the connection."""

    def __init__(self, code: str, status: int | None = None, region: str = "", *, passing: bool | None = None) -> None:
        super().__init__(f"{code} ({status})" if status else code)
        self.code = code
        self.status = status
        self.region = region
        if passing is None:
            passing = status is None or status in _PASSING_STATUS or code in _PASSING
        self.passing = passing
        """Whether the same request may succeed soon."""

    @property
    def elsewhere(self) -> bool:
        """Whether the bucket is in another region."""
        return self.code in _ELSEWHERE or self.status == 301

    @property
    def full(self) -> bool:
        """Whether there is no room."""
        return self.code in _FULL or self.status == 507

    @property
    def unknown_verb(self) -> bool:
        """Whether the server cannot do such a thing at all."""
        return self.code in _UNKNOWN_VERB or self.status in (405, 501)


def fault_of_text(text: str) -> Fault:
    """The fault in an error's text, where there is nothing but text."""
    code, region = _CODE.search(text), _REGION.search(text)
    if _UNSIGNED.search(text):
        return Fault(NO_CREDENTIALS, passing=False)
    if _BEYOND in text:
        return Fault("InvalidRange", 416)
    status = _STATUS.search(text)
    if status is None and "redirect without LOCATION" in text:
        return Fault("PermanentRedirect", 301, region[1] if region else "")
    if status is None:
        text = _URL.sub("", text)
        for pattern, words, passing in _LINK:
            if re.search(pattern, text):
                return Fault(words, passing=passing)
        return Fault("the connection failed")
    number = int(status[1] or status[2])
    return Fault(code[1] if code else "", number, region[1] if region else "")


def told(
    fault: Fault, dialect: Dialect, place: str, objects: str, *, opening: bool = False
) -> BackendError | ConfigError:
    """The error to raise for a fault at `place`; when `opening`, a `ConfigError` for what can never work."""
    code = fault.code or ("AccessDenied" if fault.status == 403 else "")
    where = f"{dialect.door}: {place}"
    if code in dialect.never:
        line = f"{where}: {dialect.never[code].format(objects=objects)}"
        return (ConfigError if opening else BackendError)(line)
    if opening and not code and fault.status in (200, 404):
        return ConfigError(f"{where}: what answers there is no {dialect.server}; correct endpoint")
    if code in dialect.now:
        return BackendError(f"{where}: {dialect.now[code]}")
    if fault.status is None:
        return BackendError(f"{where}: {fault.code}; {TRIES_AGAIN}")
    answer = f"{fault.status} {fault.code}".strip()
    advice = TRIES_AGAIN if fault.passing else "look in the server's log"
    return BackendError(f"{where}: the server answers {answer}; {advice}")


def lacks(door: str, library: str, error: ImportError) -> ConfigError:
    """The error for a library that cannot be imported."""
    missing = isinstance(error, ModuleNotFoundError)
    what = f"{library} is not installed" if missing else f"{library} is of another version: {error}"
    return ConfigError(f"{door}: {what}; pip install 'lmcache-core[{door}]'")
