"""Why a server cannot be reached, found out step by step when a request failed without an answer. Blocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lmcache_backends.objects.faults import TRIES_AGAIN, Fault
from lmcache_core.errors import BackendError, ConfigError

__all__ = ["trusting", "unreachable"]

_EXPIRED, _NOT_YET, _OTHER_HOST = 10, 9, 62
"""Of OpenSSL, `X509_V_ERR_*`."""
_ALERT, _HANDSHAKE = b"\x15", b"\x16"
"""Types of TLS records."""


def unreachable(
    door: str, url: str, timeout: float, ca: str | None, fault: Fault, *, verify: bool
) -> BackendError | ConfigError:
    """The error that says why nothing comes back from `url`; `fault` is what a request made of it."""
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    where = f"{door}: {parts.scheme}://{parts.netloc}"
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(host):
        proxy = urlsplit(proxy).hostname
        return BackendError(f"{where}: {fault.code}, by the proxy {proxy}; look there, or add {host} to NO_PROXY")
    try:
        with socket.create_connection((host, port), timeout) as connection:
            if secure:
                with trusting(ca, verify=verify).wrap_socket(connection, server_hostname=host):
                    pass
            elif fault.code != "no answer in time" and _speaks_tls(connection, host):
                return ConfigError(
                    f"{where}: the server speaks HTTPS; write endpoint: https://{parts.netloc}{parts.path}"
                )
    except ssl.SSLCertVerificationError as error:
        return _refused(where, host, error)
    except ssl.SSLError:
        return ConfigError(
            f"{where}: the server does not speak HTTPS; write endpoint: http://{parts.netloc}{parts.path}"
        )
    except socket.gaierror:
        return BackendError(f"{where}: there is no host {host}; correct endpoint, or the network's names")
    except ConnectionRefusedError:
        return BackendError(f"{where}: connection refused; start the server, or correct endpoint; {TRIES_AGAIN}")
    except TimeoutError:
        return BackendError(f"{where}: no connection within {timeout:g} s; look at firewalls, or correct endpoint")
    except OSError as error:
        return BackendError(f"{where}: {error.strerror or error}; {TRIES_AGAIN}")
    return BackendError(f"{where}: {fault.code}; {TRIES_AGAIN}")


def _refused(where: str, host: str, error: ssl.SSLCertVerificationError) -> BackendError | ConfigError:
    if error.verify_code in (_EXPIRED, _NOT_YET):
        when = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return BackendError(f"{where}: the server's certificate {when}; renew it, or set this host's clock")
    if error.verify_code == _OTHER_HOST or "match" in error.verify_message:
        return ConfigError(f"{where}: the server's certificate is not for {host}; write the name that it is for")
    return ConfigError(f"{where}: the server's certificate is of an unknown authority; write its file as ca_file")


def _speaks_tls(connection: socket.socket, host: str) -> bool:
    """Whether a hello is answered by a handshake or an alert. `wrap_socket` would leave a socket behind on a connection
    that was reset."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = trusting(None, verify=False).wrap_bio(coming, going, server_hostname=host)
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    try:
        connection.sendall(going.read())
        answer = connection.recv(1)
    except OSError:
        return False
    return answer in (_ALERT, _HANDSHAKE)


def trusting(ca: str | None, *, verify: bool) -> ssl.SSLContext:
    """Whom to trust: the usual authorities, and those of `ca`; all, unless it is to `verify`."""
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(cadata=ca)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
