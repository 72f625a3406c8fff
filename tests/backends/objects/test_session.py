"""Requests that end while nobody waits for them any more."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_backends.objects.faults import Fault
from lmcache_backends.objects.session import Session
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3 import S3Options


@pytest.mark.parametrize("turns", range(1, 4))
@pytest.mark.parametrize("late", [False, True], ids=["by itself", "when it is cancelled"])
async def test_what_fails_just_when_its_caller_gives_up_is_told_to_nobody(turns: int, late: bool) -> None:
    """asyncio would report it on the event loop, in a log that may block: at whichever moment the caller gives up."""
    service: Any = SimpleNamespace(bulk=0)
    session = Session(S3Options(bucket="kv-tests"), service, Tally())
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def fails() -> None:
        try:
            if late:
                await asyncio.Event().wait()
        finally:
            raise Fault("AccessDenied (403)")

    asking = asyncio.ensure_future(session._all([fails()]))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises((asyncio.CancelledError, Fault)):
        await asking
    del asking
    await asyncio.sleep(0)  # what is called back has been
    gc.collect()
    assert told == []
    assert session._tasks == set()
    await session.close()
