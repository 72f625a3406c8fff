"""Making connections: TCP or Unix socket, TLS, logging in. Blocking: to be run on a thread."""

from __future__ import annotations

import socket
import ssl
import time

from lmcache_backends.redis import problems
from lmcache_backends.redis.options import Address, RedisOptions, Url
from lmcache_backends.redis.resp import ConnectionLost, ErrorReply, RespSocket, command
from lmcache_core.errors import BackendError, ConfigError

_UNANSWERED_MS = 10_000
"""After this time without an acknowledgement the kernel takes the other end for dead."""


class Connector:
    """Makes connections by what the options say."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.url: Url = options.parsed()
        self.known = False
        """A connection could be made once."""
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """Of TLS; None without it. Files are read once they can be used, and not again.

        Raises:
            ConfigError: A file cannot be used.
        """
        if self.url.tls and self._context is None:
            options = self.options
            name = "tls_ca"
            try:
                context = ssl.create_default_context(cafile=options.tls_ca or None)
                name = "tls_cert"
                if options.tls_cert:
                    context.load_cert_chain(options.tls_cert, options.tls_key or None)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise ConfigError(f"redis: {name} {getattr(options, name)!r} cannot be used: {error}") from error
            if not options.tls_verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            self._context = context
        return self._context

    def connect(self, where: Address) -> RespSocket:
        """A connection that is logged in.

        Raises:
            BackendError: It cannot be had now.
            ConfigError: It can never be had with these options.
        """
        until = time.monotonic() + self.options.connect_timeout
        connection = None
        try:
            connection = RespSocket(self._open(where))
            self._log_in(where, connection, until)
            self.known = True
            connection.limit(None)  # from now on a call ends when the node's deadline aborts it
            good, connection = connection, None
            return good
        except ConnectionLost as error:
            cause = error.__cause__
            raise problems.of_connecting(
                where, cause if isinstance(cause, Exception) else error, self.url.tls, known=self.known
            ) from error
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise problems.of_connecting(where, error, self.url.tls, known=self.known) from error
        finally:
            if connection is not None:
                connection.close()

    def _open(self, where: Address) -> socket.socket:
        timeout = self.options.connect_timeout
        if where.path:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(timeout)
                sock.connect(where.path)
            except BaseException:  # whatever it was, the socket must not stay open
                sock.close()
                raise
            return sock
        sock = socket.create_connection((where.host, where.port), timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
            context = self.context()
            if context is None:
                return sock
            try:
                return context.wrap_socket(sock, server_hostname=where.host)
            except TimeoutError as error:
                raise problems.of_silence(where) from error
        except BaseException:  # as above
            sock.close()
            raise

    def _log_in(self, where: Address, connection: RespSocket, until: float) -> None:
        words: list[list[bytes]] = []
        if self.url.password:
            user = [self.url.username.encode()] if self.url.username else []
            words.append([b"AUTH", *user, self.url.password.encode()])
        if self.url.database:
            words.append([b"SELECT", b"%d" % self.url.database])
        words.append([b"PING"])
        connection.limit(max(0.001, until - time.monotonic()))
        connection.send([command(*each) for each in words])
        problem: BackendError | ConfigError | None = None
        for _ in words:
            reply = connection.reply()
            if isinstance(reply, ErrorReply) and problem is None:
                problem = problems.of_reply(where, reply)
        if problem is not None:
            raise problem
