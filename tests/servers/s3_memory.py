"""Objects in memory behind the few verbs of S3 that move bytes: `python s3_memory.py PORT [old]`.

For measurements: it receives into memory that is there already and sends from it, so what is measured is the client. It
checks no signatures. A thread for each connection. With `old` it is one of the servers that know neither conditions nor
requests that delete several objects.
"""

from __future__ import annotations

import re
import socket
import sys
import threading

_HEAD = 65536
_RANGE = re.compile(rb"bytes=(\d+)-(\d*)")
_COMMON = b'ETag: "0123456789abcdef0123456789abcdef"\r\nLast-Modified: Sun, 29 Nov 2026 15:00:00 GMT\r\n'

OLD = "old" in sys.argv[2:]

objects: dict[bytes, bytearray] = {}


def serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(_HEAD)
    try:
        while (end := receive_head(connection, head)) is not None:
            lines = bytes(head[:end]).split(b"\r\n")
            verb, target, _ = lines[0].split(b" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
            name = target.partition(b"?")[0]
            length = int(headers.get(b"content-length", 0))
            if headers.get(b"expect"):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if OLD and (b"if-none-match" in headers or verb == b"POST"):
                receive(connection, memoryview(bytearray(length)))
                answer(connection, b"501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>")
            elif verb == b"PUT":
                put(connection, name, length, headers)
            elif verb in (b"GET", b"HEAD"):
                get(connection, name, headers, body=verb == b"GET")
            else:
                receive(connection, memoryview(bytearray(length)))
                objects.pop(name, None)
                answer(connection, b"204 No Content")
    except OSError:
        pass
    finally:
        connection.close()


def put(connection: socket.socket, name: bytes, length: int, headers: dict[bytes, bytes]) -> None:
    kept = objects.get(name)
    conditional = kept is not None and headers.get(b"if-none-match") == b"*"
    target = kept if kept is not None and len(kept) == length and not conditional else bytearray(length)
    receive(connection, memoryview(target))
    if conditional:
        answer(connection, b"412 Precondition Failed")
    else:
        objects[name] = target
        answer(connection, b"200 OK")


def get(connection: socket.socket, name: bytes, headers: dict[bytes, bytes], *, body: bool) -> None:
    value = objects.get(name)
    if value is None:
        answer(connection, b"404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>" if body else b"")
        return
    part, status, extra = memoryview(value), b"200 OK", b""
    if found := _RANGE.match(headers.get(b"range", b"")):
        first = int(found[1])
        last = min(int(found[2] or len(value) - 1), len(value) - 1)
        part, status = part[first : last + 1], b"206 Partial Content"
        extra = b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, len(value))
    answer(connection, status, part if body else b"", extra, len(part))


def answer(
    connection: socket.socket,
    status: bytes,
    body: bytes | memoryview = b"",
    extra: bytes = b"",
    length: int | None = None,
) -> None:
    size = len(body) if length is None else length
    head = b"HTTP/1.1 %b\r\n%b%bContent-Length: %d\r\n\r\n" % (status, _COMMON, extra, size)
    parts = [memoryview(head), memoryview(body)]
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def receive_head(connection: socket.socket, head: bytearray) -> int | None:
    """Where the head of the next request ends, None when there is none."""
    while count := connection.recv_into(head, _HEAD, socket.MSG_PEEK):
        end = head.find(b"\r\n\r\n", 0, count)
        if end >= 0:
            connection.recv_into(head, end + 4, socket.MSG_WAITALL)
            return end
    return None


def receive(connection: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:], len(into) - done, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError
        done += count


def main(port: int) -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(64)
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
