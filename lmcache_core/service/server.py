"""Serves a node to other processes of this host: one thread that listens, and one for each client."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref

from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.node import Node
from lmcache_core.ratelog import RateLog
from lmcache_core.service import wire
from lmcache_core.service.address import Listener
from lmcache_core.service.session import Session

log = logging.getLogger(__name__)

MOST_CLIENTS = 256
OPERATORS = 8
"""Places besides these for operators' commands, which must come through when engines have taken all others."""
MOST_STRANGERS = 64
"""Connections that have not said yet whose they are."""
JOIN_TIMEOUT = 5.0
LOOK = 1.0
"""Seconds between two looks whether the socket is still there."""
PAUSE = 0.1
"""Seconds after a client could not be let in."""


class NodeServer:
    """The socket of a node at `path`, until closed.

    Only processes of the node's own user, and root, are served.

    Raises:
        ConfigError: The socket cannot be had.
    """

    def __init__(self, node: Node, path: str) -> None:
        self.path = path
        self._node = node
        self._keeper = DirectClient(node, pins=node.kept)
        """Has the pins that outlive the client who asked for them."""
        self._listener = Listener(path)
        self._sessions: dict[Session, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._faults = RateLog(log, node.config.log_interval)
        _servers.add(self)
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
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker:
            waker.setblocking(False)
            waker.connect(self.path)  # ends the accept
        for session in sessions:
            session.stop()
        self._thread.join(JOIN_TIMEOUT)
        for thread in sessions.values():
            thread.join(JOIN_TIMEOUT)
        self._listener.close()

    def abandon(self) -> None:
        """Close this process's copies of sockets and locks and nothing else, in a forked child: they would keep the
        path taken, and clients waiting, when the parent has ended."""
        self._closed = True
        self._listener.abandon()
        for session in self._sessions:
            session.abandon()

    def _listen(self) -> None:
        while not self._closed:
            try:
                self._listener.socket.settimeout(LOOK)
                stream, _ = self._listener.socket.accept()
            except TimeoutError:
                self._look()
            except OSError as error:
                if not self._closed:
                    log.warning("a client could not be let in: %s", error)  # too many open files, say
                    time.sleep(PAUSE)
            else:
                if self._closed:
                    stream.close()
                else:
                    self._let_in(stream)

    def _look(self) -> None:
        """Listen anew if somebody has removed the socket."""
        if not self._closed and not self._listener.there:
            try:
                self._listener.listen_anew()
            except (OSError, ConfigError) as error:
                self._faults.warning("gone", "the socket %s is gone, and cannot be made again: %s", self.path, error)
            else:
                log.warning("the socket %s was removed, and has been made again", self.path)

    def _let_in(self, stream: socket.socket) -> None:
        try:
            session = Session(self._node, stream, lambda: self.sessions, self._keeper, self._admit)
        except (OSError, MemoryError) as error:
            log.warning("a client could not be let in: %s", error)
            stream.close()
            return
        refusal, kind = None, ""
        with self._lock:
            if session.uid not in (os.geteuid(), 0):
                kind = "users"
                refusal = (
                    f"user {session.uid} is not the node's, {os.geteuid()}; use a node of your own, or be that user"
                )
            elif self._closed:
                refusal, kind = "the node is being closed", "closed"
            elif sum(not each.admitted for each in self._sessions) >= MOST_STRANGERS:
                kind = "strangers"
                refusal = f"{MOST_STRANGERS} connections have not said yet whose they are; try again"
            else:
                thread = threading.Thread(
                    target=self._run, args=(session,), name=f"lmcache-client-{session.pid}", daemon=True
                )
                try:
                    thread.start()
                    self._sessions[session] = thread
                except RuntimeError as error:  # the system gives no more threads
                    refusal, kind = str(error), "threads"
        if refusal is not None:
            self._faults.warning(f"sent away: {kind}", "process %d is sent away: %s", session.pid, refusal)
            with contextlib.suppress(OSError):
                stream.sendall(wire.encode(wire.Failed("PermissionError", refusal)))
            session.end()

    def _admit(self, session: Session) -> str | None:
        """Give a client that has said who it is its place. Returns why it has none, if it has none."""
        with self._lock:
            admitted = [each for each in self._sessions if each.admitted]
            engines = sum(not each.operator for each in admitted)
            refusal, kind = None, "engines"
            if not session.operator and engines >= MOST_CLIENTS:
                refusal = f"the node has its {MOST_CLIENTS} clients; close some that are not needed"
            elif len(admitted) >= MOST_CLIENTS + OPERATORS:
                kind = "operators"
                refusal = (
                    f"the node has its {MOST_CLIENTS} clients and {OPERATORS} commands of operators; end some that are "
                    "not needed, such as `lmcache-core status --watch`"
                )
            session.admitted = refusal is None
        if refusal is not None:
            self._faults.warning(f"sent away: {kind}", "process %d is sent away: %s", session.pid, refusal)
        return refusal

    def _run(self, session: Session) -> None:
        try:
            session.run()
        except Exception:  # a defect of ours must cost its client alone
            log.exception("the session of process %d ended", session.pid)
        finally:
            with self._lock:  # which whoever let it in holds until it is known
                self._sessions.pop(session, None)


_servers: weakref.WeakSet[NodeServer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for server in list(_servers):
        server.abandon()


os.register_at_fork(after_in_child=_leave_to_parent)
