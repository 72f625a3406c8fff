"""The client: obstore's for Google Cloud Storage."""

from __future__ import annotations

import os
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import GCSStore

from lmcache_backends.gcs.backend import DIALECT
from lmcache_backends.gcs.options import GcsOptions
from lmcache_backends.objects.rust import RustClient, link, no_retries
from lmcache_backends.objects.tally import Tally
from lmcache_core.errors import ConfigError

__all__ = ["make"]


def make(options: GcsOptions, tally: Tally, ca: str | None) -> RustClient:
    """A client, made on a thread: it reads files.

    Raises:
        ConfigError: The file of credentials is none.
    """
    url = options.url()
    # All that the environment could change is said here, but for who signs in.
    settings: dict[str, Any] = {"base_url": url, "skip_signature": False}
    if options.credentials:
        settings["application_credentials"] = os.path.expanduser(options.credentials)
    if options.token:
        settings["credential_provider"] = lambda: {"token": options.token, "expires_at": None}
    try:
        store = GCSStore(
            options.place_name(),
            client_options=link(options, url, ca),  # type: ignore[arg-type]
            retry_config=no_retries(options),  # type: ignore[arg-type]
            **settings,
        )
    except (BaseError, ValueError) as error:
        which = repr(options.credentials) if options.credentials else "of the environment"
        why = "there is no such file" if "No such file" in str(error) else "it is not of a kind that is known"
        problem = f"gcs: the credentials {which} cannot be read: {why}; correct credentials"
        raise ConfigError(problem) from None
    return RustClient(store, store, DIALECT, tally)
