"""Who we are to the server: keys that were written down, or those that the AWS tools would find, renewed in time.

Finding them reads files, asks other services and runs programs, so it is done on a thread, by botocore.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from lmcache_backends.s3.errors import lacks
from lmcache_backends.s3.options import S3Options
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.iothreads import IoThreads

__all__ = ["Identity", "Keys", "keep_quiet"]

_REGION = "us-east-1"
_LOOK_AGAIN = timedelta(minutes=10)
"""After which even keys without an end are looked up again: a file may have changed."""


def keep_quiet() -> None:
    """At DEBUG, botocore logs requests with their tokens and answers with keys in them. Whoever wants that sets the
    level of its logger, not only that of all."""
    for name in ("botocore", "aiobotocore"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


class Keys(NamedTuple):
    """What requests are signed with."""

    access_key: str
    secret_key: str
    token: str | None
    expires: datetime | None

    def __repr__(self) -> str:
        return f"Keys(access_key={self.access_key!r}, expires={self.expires})"


class Identity:
    """Keys of one backend."""

    def __init__(self, options: S3Options, threads: IoThreads) -> None:
        self._options = options
        self._threads = threads
        self._session: Any = None
        self._credentials: Any = None

    async def keys(self) -> Keys:
        """Keys that are good for some minutes.

        Raises:
            ConfigError: There are none.
            BackendError: They cannot be had now.
        """
        options = self._options
        if options.access_key:
            return Keys(options.access_key, options.secret_key, options.session_token or None, None)
        return await self._threads.run(self._look_up)

    async def region(self) -> str:
        """The region of the environment or the profile."""
        return await self._threads.run(self._look_up_region)

    def _look_up_region(self) -> str:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region or self._options.access_key:
            return region or _REGION
        with self._faults():
            return self._opened().get_config_variable("region") or _REGION

    def _look_up(self) -> Keys:
        with self._faults():
            if self._credentials is None or not hasattr(self._credentials, "refresh_needed"):
                self._session = None  # what does not renew itself is read again
                self._credentials = self._opened().get_credentials()
            if self._credentials is None:
                raise ConfigError(
                    "s3: no credentials are found in the environment, in files or from a role; write access_key and "
                    "secret_key, or profile"
                )
            frozen = self._credentials.get_frozen_credentials()
        again = datetime.now(UTC) + _LOOK_AGAIN
        ends = getattr(self._credentials, "_expiry_time", None)
        expires = min(again, ends.astimezone(UTC)) if isinstance(ends, datetime) else again
        return Keys(frozen.access_key, frozen.secret_key, frozen.token, expires)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """What botocore raises, as our own; without its text, which may have what a program printed."""
        try:
            exceptions = importlib.import_module("botocore.exceptions")
        except ImportError as error:
            raise lacks("aioboto3", error) from error
        try:
            yield
        except (exceptions.BotoCoreError, exceptions.ClientError, OSError) as error:
            who = f"profile {self._options.profile!r}" if self._options.profile else "the environment"
            raise BackendError(
                f"s3: no credentials can be had now from {who} ({type(error).__name__}); see whether the AWS tools work"
            ) from None

    def _opened(self) -> Any:
        if self._session is None:
            module = importlib.import_module("botocore.session")
            keep_quiet()
            self._session = module.Session(profile=self._options.profile or None)
            known = self._session.available_profiles
            if self._options.profile and self._options.profile not in known:
                names = ", ".join(known) or "none"
                raise ConfigError(f"s3: there is no profile {self._options.profile!r}; known are {names}")
        return self._session
