"""S3 Express in front of a server that knows none: `python s3_express.py UPSTREAM PORT`.

Answers CreateSession, and refuses a request for a directory bucket's objects that names no session of the last five
minutes. Whether it is signed with the session's keys it does not check.
"""

from __future__ import annotations

import sys
import time
import uuid
from datetime import UTC, datetime, timedelta

from aiohttp import ClientSession, web

_LIVES = 300
_TOKEN = "x-amz-s3session-token"
_OWN = {_TOKEN, "host"}
_OF_THE_LINK = {"transfer-encoding", "content-length", "content-encoding", "server", "date", "connection"}
_UPSTREAM = web.AppKey("upstream", ClientSession)

sessions: dict[str, float] = {}


async def handle(request: web.Request) -> web.Response:
    if request.method == "GET" and "session" in request.query:
        return new_session()
    bucket = request.path.split("/")[1]
    alive = sessions.get(request.headers.get(_TOKEN, ""), 0.0) > time.time()
    if bucket.endswith("--x-s3") and "/" in request.path[1:] and not alive:
        return web.Response(status=400, text="<Error><Code>ExpiredToken</Code></Error>")
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
    async with request.app[_UPSTREAM].request(
        request.method,
        sys.argv[1] + request.raw_path,
        headers=headers,
        data=await request.read(),
        skip_auto_headers=["Accept-Encoding"],
    ) as answer:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_THE_LINK}
        body = await answer.read()
        if request.method == "HEAD" and (length := answer.headers.get("Content-Length")):
            kept["Content-Length"] = length
        return web.Response(status=answer.status, body=body, headers=kept)


def new_session() -> web.Response:
    token = uuid.uuid4().hex
    sessions[token] = time.time() + _LIVES
    ends = datetime.now(UTC) + timedelta(seconds=_LIVES)
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>'
        f"<SessionToken>{token}</SessionToken><SecretAccessKey>s</SecretAccessKey>"
        f"<AccessKeyId>AKX{token[:8]}</AccessKeyId><Expiration>{ends:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
        "</Credentials></CreateSessionResult>"
    )
    return web.Response(content_type="application/xml", text=text)


async def connect(app: web.Application) -> None:
    app[_UPSTREAM] = ClientSession(auto_decompress=False)


def main(port: int) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{any:.*}", handle)
    app.on_startup.append(connect)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[2]))
