"""Serves a node to other processes of this host: one thread that listens, and one for each client."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.service import wire
from lmcache_core.service.address import Listener
from lmcache_core.service.session import Session

log = logging.getLogger(__name__)

MOST_CLIENTS = 256
JOIN_TIMEOUT = 5.0


class NodeServer:
    """The socket of a node at `path`, until closed.

    Only processes of the node's own user, and root, are served.

    Raises:
        ConfigError: The socket cannot be had.
    """

    def __init__(self, node: Node, path: str) -> None:
        self.path = path
        self._node = node
        self._keeper = DirectClient(node)
        """Has the pins that outlive the client who asked for them."""
        self._listener = Listener(path)
        self._sessions: dict[Session, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="lmcache-serve", daemon=True)
        self._thread.start()
        log.info("serving at %s", path)

    @property
    def sessions(self) -> list[Session]:
        """Clients that are connected."""
        with self._lock:
            return list(self._sessions)

    def close(self) -> None:
        """Send all clients away and listen no more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = dict(self._sessions)
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # ends the accept
        for session in sessions:
            session.stop()
        self._thread.join(JOIN_TIMEOUT)
        for thread in sessions.values():
            thread.join(JOIN_TIMEOUT)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                stream, _ = self._listener.socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a client could not be let in: %s", error)  # too many open files, say
                if threading.Event().wait(0.1):
                    return
                continue
            self._let_in(stream)

    def _let_in(self, stream: socket.socket) -> None:
        try:
            session = Session(self._node, stream, lambda: self.sessions, self._keeper)
        except OSError as error:
            log.warning("a client could not be let in: %s", error)
            stream.close()
            return
        refusal = None
        with self._lock:
            if session.uid not in (os.geteuid(), 0):
                refusal = f"user {session.uid} is not the node's"
            elif self._closed or len(self._sessions) >= MOST_CLIENTS:
                refusal = f"the node is closing, or has its {MOST_CLIENTS} clients"
            else:
                thread = threading.Thread(
                    target=self._run, args=(session,), name=f"lmcache-client-{session.pid}", daemon=True
                )
                self._sessions[session] = thread
                thread.start()
        if refusal is not None:
            log.warning("process %d is sent away: %s", session.pid, refusal)
            with contextlib.suppress(OSError):
                stream.sendall(wire.encode(wire.Failed("PermissionError", refusal)))
            session.end()

    def _run(self, session: Session) -> None:
        try:
            session.run()
        except Exception:  # a defect of ours must cost its client alone
            log.exception("the session of process %d ended", session.pid)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
