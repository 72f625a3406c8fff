"""`lmcache-core serve`: a node as a process of its own, for all engines of this host."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from types import FrameType

import msgspec

from lmcache_core.assembly import build_node
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import visible
from lmcache_core.errors import ConfigError
from lmcache_core.service.address import AUTO, socket_path
from lmcache_core.tier import TierRunner
from lmcache_core.units import format_size

WAKE = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config", metavar="FILE", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="where to listen; by default the configuration's `socket`, else `auto`"
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop by SIGTERM or SIGINT; then write what is queued and end."""
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    loaded = load_usable(arguments.config)
    config = loaded.config
    if config.connect:
        where = loaded.provenance.nearest(("connect",))
        raise ConfigError(
            f"{where}: connect: this is a configuration of a node's clients; name that of the node, with `cpu` and "
            "`tiers`, with --config"
        )
    path = socket_path(arguments.socket or config.socket or AUTO)
    config = msgspec.structs.replace(config, socket=path)
    with build_node(config) as node:
        node.standalone = True

        def told(number: int, frame: FrameType | None) -> None:
            node.drained.set()

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, told)
        tiers = ", ".join(map(_told, node.runners)) or "none"
        line = f"serving at {path}: {format_size(node.pool.capacity)} of host memory, tiers: {tiers}"
        print(visible(line), flush=True)
        notify_manager("READY=1")
        # Woken now and then: Python runs a handler only when the main thread runs, which a signal need not wake.
        while not node.drained.wait(WAKE):
            pass
        notify_manager("STOPPING=1")
        print("stopping: writing what is queued", file=sys.stderr, flush=True)
    return 0


def _told(runner: TierRunner) -> str:
    return runner.config.name + ("" if runner.up else f" (down, it is tried again: {runner.health.why})")


def notify_manager(state: str) -> None:
    """Tell systemd, if it wants to know, what this service is doing; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
