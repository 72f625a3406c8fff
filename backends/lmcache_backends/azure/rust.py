"""The client: obstore's for Azure."""

from __future__ import annotations

from typing import Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore

from lmcache_backends.azure.backend import DIALECT
from lmcache_backends.azure.options import AzureOptions
from lmcache_backends.objects.rust import RustClient, link, no_retries
from lmcache_backends.objects.tally import Tally
from lmcache_core.errors import ConfigError

__all__ = ["make"]


def make(options: AzureOptions, tally: Tally, ca: str | None) -> RustClient:
    """A client, made on a thread: it reads the authorities that this host trusts.

    Raises:
        ConfigError: The environment does not say what `identity` asks for.
    """
    url = options.url()
    # All that the environment could change is said here, but for who signs in.
    settings: dict[str, Any] = {
        "account_name": options.account,
        "endpoint": url,
        "use_emulator": False,
        "use_fabric_endpoint": False,
        "skip_signature": False,
        "credential_type": options.identity,
    }
    if options.access_key:
        settings |= {"account_key": options.access_key, "credential_type": "access_key"}
    elif options.sas_token:
        settings |= {"sas_key": options.sas_token.removeprefix("?"), "credential_type": "sas_token"}
    try:
        store = AzureStore(
            options.place_name(),
            client_options=link(options, url, ca),  # type: ignore[arg-type]
            retry_config=no_retries(options),  # type: ignore[arg-type]
            **settings,
        )
    except (BaseError, ValueError):
        who = f"identity {options.identity!r} needs" if options.identity != "auto" else "the environment has unusable"
        problem = f"azure: {who} variables AZURE_*; set them, or write access_key or sas_token"
        raise ConfigError(problem) from None
    return RustClient(store, store, DIALECT, tally)
