"""The end of a run: the weather is fine, engines have ended, and all must be well again in bounded time."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

from lmcache_core.client import Part
from lmcache_core.direct import DirectClient, DirectModel
from lmcache_core.health import CLOSE_TIMEOUT, OPEN_TIMEOUT
from lmcache_core.node import TICK
from lmcache_core.testing.simulation.content import keys, part_bytes
from lmcache_core.testing.simulation.host import Host

__all__ = ["rest"]

FRESH = "zyxw"
"""A prompt that no engine has stored."""


def rest(host: Host) -> None:
    """Bring a host to rest and check that nothing is lost, and that every tier is used again."""
    loop, node, trace = host.loop, host.node, host.trace
    host.come_to_rest(host.prefetch_seconds + 60)
    error = host.failed()
    if error is not None:
        raise error
    gc.collect()  # handles that were let go of in a cycle
    client = DirectClient(node)
    client.unpin_all()
    longest = max((backend.weather.longest for backend in host.backends), default=0.0)
    if not loop.run_until(lambda: not any(backend.busy for backend in host.backends), longest):
        trace.fail(f"{host.name}: calls of a backend have not ended")  # of the simulation, this would be a mistake
    if not loop.run_until(lambda: not node._prober._asking, host.read_seconds + 60):
        trace.fail(f"{host.name}: questions have not ended")  # one from before may still take a tier out of use
    _come_up(host)
    if not loop.run_until(lambda: not node.guard.index.leases, host.config.lease_timeout + 2 * TICK):
        trace.fail(f"{host.name}: leases have not ended by themselves")
    if not node.flush(host.write_seconds + host.read_seconds + 60):
        trace.fail(f"{host.name}: it has not come to rest")
    loop.pass_time(0.01)  # what is ready is done
    trace.add(f"{host.name} rests")
    for engine in host.engines:
        engine.client.unpin_all()
    if not loop.run_until(lambda: not any(runner.queued for runner in node.runners), 60):
        trace.fail(f"{host.name}: operations never end")
    host.watcher.at_rest()
    model = client.register(host.namespace)
    for number in range(len(node.runners)):
        _used_again(host, client, model, number)
    for text in ("abcd", "cccccc"):  # what is cleared while it is written
        _store(client, model, keys(text), None)
    loop.pass_time(host.rng.choice((0.0, 0.0002, 0.001)))
    client.clear()
    if not node.flush(60):
        trace.fail(f"{host.name}: it has not come to rest after a clear")
    loop.pass_time(2 * TICK)
    host.watcher.at_rest()
    host.watcher.empty()


def _come_up(host: Host) -> None:
    """Every tier is opened again."""
    node = host.node
    seconds = max((tier.breaker.max_cooldown for tier in host.config.tiers), default=0.0)
    seconds = 2 * (seconds + OPEN_TIMEOUT + CLOSE_TIMEOUT) + host.prefetch_seconds
    if not host.loop.run_until(lambda: all(runner.up for runner in node.runners), seconds):
        down = ", ".join(runner.config.name for runner in node.runners if not runner.up)
        host.trace.fail(f"{host.name}: {down} is well again and has not been used for {seconds:g} s")


def _used_again(host: Host, client: DirectClient, model: DirectModel, number: int) -> None:
    """A prompt that is stored now comes to a tier, and back from it."""
    tier = host.config.tiers[number]
    if tier.write != "through" or tier.admit != "always" or tier.min_prompt or host.namespace.shards > 1:
        return
    pages = keys(FRESH)
    client.clear()
    if not host.node.flush(60):
        host.trace.fail(f"{host.name}: it has not come to rest after a clear")
    if any(backend.medium.capacity is not None for backend in host.backends) or len(host.namespace.groups) > 1:
        return  # others may have taken all room
    if not _ended(host, _store(client, model, pages, ["cpu", tier.name]), "a store"):
        host.trace.fail(f"{host.name}: {tier.name} is well and has not taken a chunk")
    client.clear(None, ["cpu"])
    held = client.hold(model, pages, [tier.name])
    grants = client.grant(held, 0, 1)
    if not grants or grants[0].wait is None or not _ended(host, grants[0].wait, "a load"):
        host.trace.fail(f"{host.name}: {tier.name} is well and has not given a chunk back")
    (grant,) = client.grant(held, 0, 1)
    if grant.source is None or bytes(grant.source) != _bytes(model, pages, held.parts[0]):
        host.trace.fail(f"{host.name}: wrong bytes from {tier.name}")
    client.release(held)


def _store(client: DirectClient, model: DirectModel, pages: list[bytes], places: list[str] | None) -> Future[bool]:
    storing = client.begin_store(model, pages, (len(pages),), 0, places)
    for room in storing.rooms:
        room.target[:] = _bytes(model, pages, room.part)
        client.filled(room)
    return client.finish_store(storing).written


def _ended(host: Host, future: Future[Any], what: str) -> bool:
    if not host.loop.run_until(future.done, 60):
        host.trace.fail(f"{host.name}: {what} has not ended in 60 s of fine weather")
    return bool(future.result())


def _bytes(model: DirectModel, pages: list[bytes], part: Part) -> bytes:
    return part_bytes(model.spaces[part.group].digest, pages, part, 0)
