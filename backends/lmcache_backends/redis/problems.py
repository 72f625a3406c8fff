"""What servers and networks say, as what a person should change."""

from __future__ import annotations

import errno
import socket
import ssl

from lmcache_backends.redis.options import Address
from lmcache_backends.redis.resp import ErrorReply
from lmcache_core.errors import BackendError, ConfigError

COMMANDS = "+ping +select +client +info +get +set +exists +unlink +hset +hgetall +cluster +scan +strlen"

_NEVER = {
    "WRONGPASS": "refuses the user name or the password; correct username and password, or those in the url",
    "NOAUTH": "asks for a password; write password: ${env:NAME}",
    "NOPERM": f"does not let this user run a command that is needed, or not on keys of this prefix; its ACL needs "
    f"{COMMANDS} and the pattern ~PREFIX:*, for PREFIX the tier's prefix; who only reads needs write: never",
    "DENIED": "is in protected mode and refuses other hosts; give it a password, or bind it to this network",
    "NOPROTO": "speaks another version of the protocol",
}
_NOT_NOW = {
    "LOADING": "is loading its data",
    "READONLY": "is a replica, which cannot be written to; name the primary in the url, or its sentinels with service",
    "MISCONF": "refuses writes because it cannot save to its disk; see stop-writes-on-bgsave-error",
    "CLUSTERDOWN": "says that its cluster is down",
    "MASTERDOWN": "is a replica that has lost its primary",
    "TRYAGAIN": "is moving slots of its cluster",
    "OOM": "is full, and its maxmemory-policy evicts nothing; set maxmemory-policy allkeys-lru",
    "BUSY": "is busy with a script",
    "WRONGTYPE": "has something else in the place of what is ours; delete it there, or choose another prefix",
}


def of_reply(where: Address, reply: ErrorReply, mode: str = "auto") -> BackendError | ConfigError:
    """An error reply as an exception. `mode` is the option."""
    said = f"redis at {where}"
    if (what := _NEVER.get(reply.code)) is not None:
        return ConfigError(f"{said} {what} ({reply})")
    if (what := _NOT_NOW.get(reply.code)) is not None:
        return BackendError(f"{said} {what} ({reply})")
    if reply.code in ("MOVED", "ASK"):
        advice = "write mode: cluster, or leave mode out"
        if mode == "auto":
            advice = "it does not tell this user so by INFO: allow it +info, or write mode: cluster"
        return ConfigError(f"{said} is a node of a cluster; {advice} ({reply})")
    text = str(reply)
    if "without any password configured" in text:
        return ConfigError(f"{said} has no password; delete password, and the one in the url ({text})")
    if "DB index is out of range" in text or "SELECT is not allowed" in text:
        return ConfigError(f"{said} does not have this database; write another number at the end of the url ({text})")
    return BackendError(f"{said} answers: {text}")


def of_silence(where: Address) -> BackendError:
    """It takes the connection and says nothing in TLS."""
    return BackendError(f"redis at {where} does not answer in TLS in time; if it does not speak it, write redis://")


def of_connecting(where: Address, error: Exception, tls: bool, *, known: bool = False) -> BackendError:
    """Why a connection cannot be made. `known` if one could be made before: then the options are right."""
    said = f"redis at {where}"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            return BackendError(f"{said}: its certificate has expired; renew it there")
        if error.verify_code in (18, 19, 20, 21):
            return BackendError(f"{said}: its certificate is signed by nobody known here; name the signer with tls_ca")
        return BackendError(f"{said}: its certificate cannot be trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
            return BackendError(f"{said} does not speak TLS at this port; write redis:// or its TLS port")
        if any(word in str(error) for word in ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "EOF occurred")):
            return BackendError(f"{said} ends TLS; if it wants a certificate of ours, name it with tls_cert ({error})")
        return BackendError(f"{said}: TLS fails: {error}")
    if isinstance(error, TimeoutError):
        return BackendError(f"{said} cannot be reached in time; is a firewall between, or is it frozen?")
    if isinstance(error, socket.gaierror):
        return BackendError(f"{said}: no host of this name is known ({error.strerror})")
    if isinstance(error, ConnectionRefusedError):
        return BackendError(f"{said}: nothing listens there; is the server started, and is the port right?")
    if isinstance(error, FileNotFoundError):
        return BackendError(f"{said}: there is no such socket; is the server started, with unixsocket set to this?")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return BackendError(f"{said}: this user may not open the socket; see unixsocketperm")
    if "b'HTTP/" in str(error):
        return BackendError(f"{said} is a server of HTTP; write the host and port of a Redis server")
    if known:
        return BackendError(f"{said}: {error}")
    if not tls:
        return BackendError(f"{said}: {error}; does it want TLS? Then write rediss://")
    return BackendError(f"{said}: {error}; if it wants a certificate of ours, name it with tls_cert")
