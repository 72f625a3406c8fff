"""The backend: blobs of a container, and what the service says of them."""

from __future__ import annotations

from lmcache_backends.azure.options import AzureOptions
from lmcache_backends.objects.backend import ObjectBackend
from lmcache_backends.objects.faults import NO_CREDENTIALS, Dialect
from lmcache_backends.objects.service import ObstoreService

__all__ = ["DIALECT", "AzureBackend"]

_REFUSED = (
    "access is denied; correct access_key or sas_token, or give who signs in the role Storage Blob Data Contributor"
)

DIALECT = Dialect(
    door="azure",
    server="Azure Blob Storage",
    absent="BlobNotFound",
    gone="ContainerNotFound",
    never={
        "ContainerNotFound": "there is no such container; create it, or correct container",
        "ContainerBeingDeleted": "the container is being deleted; wait and create it, or correct container",
        "ResourceNotFound": "the server has no such account or container; correct account, container or endpoint",
        "InvalidResourceName": "the server takes no container of this name; correct container",
        "AccountIsDisabled": "the account is disabled; see its state in the portal",
        "AuthenticationFailed": "the server knows neither key nor token; correct account, access_key or sas_token",
        "AuthorizationFailure": _REFUSED,
        "AuthorizationPermissionMismatch": _REFUSED,
        "AuthorizationResourceTypeMismatch": _REFUSED,
        "AuthorizationServiceMismatch": _REFUSED,
        "AccessDenied": _REFUSED,
        "InsufficientAccountPermissions": _REFUSED,
        "NoAuthenticationInformation": _REFUSED,
        "BlobArchived": "blobs are archived; use a tier of access that can be read at once",
    },
    now={
        NO_CREDENTIALS: "no credentials can be had now; write access_key or sas_token, or see to what `identity` asks",
        "ServerBusy": "the server asks for fewer requests; lower connections",
        "Md5Mismatch": "what arrived at the server is not what was sent; look at the network in between",
    },
)


class AzureBackend(ObjectBackend):
    """Chunks as blobs of a container."""

    def __init__(self, options: AzureOptions) -> None:
        super().__init__(options, lambda: ObstoreService(options, options.url(), DIALECT))
