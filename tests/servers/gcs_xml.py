"""The XML interface of Google Cloud Storage in front of fake-gcs-server, which has little of it: `python gcs_xml.py URL
PORT TOKEN`. What it lacks is asked of its JSON interface: writes with conditions and metadata, and what is missing when
nothing is found. Every request must bear the token.
"""

from __future__ import annotations

import json
import sys
from email.message import Message
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

_BOUNDARY = "one-part-and-the-other"
_META = "x-goog-meta-"


class Xml(BaseHTTPRequestHandler):
    """A client's connection, and one to the server behind it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.behind = HTTPConnection(behind.hostname or "", behind.port, timeout=60)

    def finish(self) -> None:
        self.behind.close()
        super().finish()

    def ask(
        self, verb: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, Message]:
        self.behind.request(verb, path, body=body or None, headers=headers or {})
        answer = self.behind.getresponse()
        return answer.status, answer.read(), answer.headers

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body))} | (headers or {})
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def named(self) -> tuple[str, str]:
        """Bucket and object."""
        bucket, _, name = urlsplit(self.path).path[1:].partition("/")
        return unquote(bucket), unquote(name)

    def absent(self) -> None:
        bucket, _ = self.named()
        status, _, _ = self.ask("GET", f"/storage/v1/b/{quote(bucket, safe='')}")
        self.refuse(404, "NoSuchKey" if status == 200 else "NoSuchBucket")

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {token}":
            self.refuse(401, "AuthenticationRequired")
        elif self.command == "PUT":
            self.put(body)
        elif self.command == "DELETE":
            status, _, _ = self.ask("DELETE", self.path)
            self.answer(204) if status == 200 else self.absent()
        elif not self.named()[1]:
            self.list()
        else:
            self.get()

    do_GET = do_HEAD = do_PUT = do_DELETE = handle_one

    def put(self, body: bytes) -> None:
        bucket, name = self.named()
        kept = {key[len(_META) :]: value for key, value in self.headers.items() if key.lower().startswith(_META)}
        told = {"name": name, "metadata": kept, "contentType": self.headers.get("Content-Type")}
        mark = f"--{_BOUNDARY}\r\nContent-Type: ".encode()
        parts = [mark, b"application/json\r\n\r\n", json.dumps(told).encode(), b"\r\n"]
        parts += [mark, b"application/octet-stream\r\n\r\n", body, f"\r\n--{_BOUNDARY}--\r\n".encode()]
        wanted = self.headers.get("x-goog-if-generation-match")
        query = "uploadType=multipart" + (f"&ifGenerationMatch={wanted}" if wanted else "")
        status, said, _ = self.ask(
            "POST",
            f"/upload/storage/v1/b/{quote(bucket, safe='')}/o?{query}",
            b"".join(parts),
            {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"},
        )
        if status == 200:
            made = json.loads(said)
            self.answer(200, headers={"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]})
        elif status == 412:
            self.refuse(412, "PreconditionFailed")
        elif status == 404:
            self.absent()
        else:
            self.refuse(status, "InternalError")

    def get(self) -> None:
        part = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        status, body, headers = self.ask("HEAD" if part else self.command, self.path)
        if status == 200 and part:
            first = int(part["Range"].removeprefix("bytes=").partition("-")[0])
            if first >= int(headers["Content-Length"]):  # the emulator would drop the connection
                self.refuse(416, "InvalidRange")
                return
            status, body, headers = self.ask(self.command, self.path, headers=part)
        if status == 404:
            self.absent()
        else:
            kept = ("content-", "etag", "last-modified", "x-goog-")
            self.answer(status, body, {key: value for key, value in headers.items() if key.lower().startswith(kept)})

    def list(self) -> None:
        status, body, _ = self.ask("GET", self.path)
        self.answer(status, body) if status == 200 else self.refuse(404, "NoSuchBucket")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each request would be too much."""


class Front(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


behind = urlsplit(sys.argv[1])
token = sys.argv[3]

if __name__ == "__main__":
    Front(("127.0.0.1", int(sys.argv[2])), Xml).serve_forever()
