"""What a user may write beside `backend: azure`."""

from __future__ import annotations

import base64
import binascii
import re
from typing import ClassVar, Literal

from lmcache_backends.objects.options import ObjectOptions, shown
from lmcache_core.units import Secret

__all__ = ["AzureOptions"]

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)
_SECRETS = frozenset({"access_key", "sas_token"})


class AzureOptions(ObjectOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a container.

    Raises:
        InvalidSetting: One of them cannot work; the message says what to write.
    """

    door: ClassVar[str] = "azure"
    scheme: ClassVar[str] = "az"
    holder: ClassVar[str] = "container"
    allowed: ClassVar[re.Pattern[str]] = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
    example: ClassVar[str] = "https://account.blob.core.windows.net"

    container: str
    """Name of the container, or `az://container/prefix`. It must exist."""
    account: str
    """Name of the storage account."""
    endpoint: str = ""
    """URL of the server, with the account where it is not in the name of the host, such as
    `http://127.0.0.1:10000/devstoreaccount1`. Without one `https://<account>.blob.core.windows.net`."""
    access_key: Secret = ""
    """Key of the account; best as `${env:NAME}` or `${file:/path}`."""
    sas_token: Secret = ""
    """Shared access signature in place of a key: the text behind the `?` of a signed URL."""
    identity: Literal["auto", "client_secret", "workload_identity", "managed_identity", "azure_cli"] = "auto"
    """Who signs in where there is neither key nor signature, as the variables `AZURE_*` of the environment say: a
    service principal, a pod, the machine, or a person. `auto` takes the first of them that is set up, else the
    machine; what expires is renewed."""

    def __post_init__(self) -> None:
        self.check()
        self.check_url(self.endpoint, path=True)
        if not _ACCOUNT.fullmatch(self.account):
            advice = "write 3 to 24 letters and digits, as in the URL of the account"
            raise self.refused("account", f"account {self.account!r} is no name of an account; {advice}")
        if self.access_key and self.sas_token:
            raise self.refused("sas_token", "access_key and sas_token both say who we are; write one of the two")
        if self.identity != "auto" and (self.access_key or self.sas_token):
            key = "access_key" if self.access_key else "sas_token"
            raise self.refused("identity", f"{key} says who we are already; delete it, or identity")
        try:
            base64.b64decode(self.access_key, validate=True)
        except binascii.Error:
            raise self.refused("access_key", "access_key is no key of an account; copy all of it") from None

    def __repr__(self) -> str:
        return shown(self, _SECRETS)

    def url(self) -> str:
        """Of the server."""
        return self.endpoint.rstrip("/") or f"https://{self.account}.blob.core.windows.net"
