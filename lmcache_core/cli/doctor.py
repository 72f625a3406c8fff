"""`lmcache-core doctor`: tries every tier of a configuration and says what to fix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.cli.alone import shown_time
from lmcache_core.cli.doctor_advice import advise, memory_advice
from lmcache_core.cli.doctor_checks import Checked, check_tier, check_together
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import Column, add_json_option, is_terminal, print_json, print_table, visible
from lmcache_core.cli.running import connected
from lmcache_core.config import Config, TierConfig
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.service.address import socket_path
from lmcache_core.units import parse_duration

_COLUMNS = [
    Column("tier"),
    Column("backend"),
    Column("state"),
    *(Column(name, right=True) for name in ("open", "look up", "read", "write", "read GB/s", "write GB/s")),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    parser.add_argument("--tier", metavar="TIER", action="append", help="only this tier; may be given more than once")
    parser.add_argument(
        "--timeout", metavar="TIME", default="10s", help="how long a step may take (default: %(default)s)"
    )
    parser.add_argument("--socket", metavar="PATH", help="also say how the node at this socket is")
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Try the tiers. The exit code is 1 if one of them has a problem, or the node that is named has."""
    try:
        limit = parse_duration(arguments.timeout)
    except ConfigError as error:
        arguments.usage_error(f"--timeout: {error}")
    loaded = load_usable(arguments.config)
    config = loaded.config
    tiers = _chosen(config, arguments.tier, loaded.provenance.name)
    node = _node(arguments, config)
    checked = _check(tiers, limit, quiet=arguments.json)
    check_together(tiers, checked, limit)
    advise(tiers, checked)
    general = _general(config, node)
    well = not any(found.problems for found in checked) and (node is None or node["state"] == "serving")
    if arguments.json:
        plain = [each.plain() for each in checked]
        print_json({"file": loaded.provenance.name, "well": well, "node": node, "tiers": plain, "advice": general})
    else:
        _print(loaded.provenance.name, node, checked, general, well=well)
    return 0 if well else 1


def _chosen(config: Config, only: Sequence[str] | None, file: str) -> list[TierConfig]:
    if config.connect and not config.tiers:
        return []
    known = [tier.name for tier in config.tiers]
    if unknown := [name for name in only or () if name not in known]:
        raise ConfigError(f"there is no tier {unknown[0]!r}; {file} has {', '.join(known) or 'none'}")
    return [tier for tier in config.tiers if only is None or tier.name in only]


def _check(tiers: Sequence[TierConfig], limit: float, *, quiet: bool) -> list[Checked]:
    """One after the other: side by side they would take bandwidth from each other."""
    if quiet or not is_terminal(sys.stderr):
        return [check_tier(tier, limit, lambda _: None) for tier in tiers]
    from rich.console import Console  # only terminals need it

    checked = []
    console = Console(stderr=True)
    with console.status("") as status:

        def teller(name: str) -> Callable[[str], None]:
            return lambda step: status.update(f"{visible(name)}: {step}")

        for tier in tiers:
            checked.append(check_tier(tier, limit, teller(tier.name)))
    return checked


def _node(arguments: argparse.Namespace, config: Config) -> dict[str, Any] | None:
    """How the node is that is named, by `--socket` or `connect`; None if none is."""
    if arguments.socket is None and not config.connect:
        return None
    path = socket_path(arguments.socket or config.connect)
    node: dict[str, Any] = {"socket": path, "state": "serving", "why": None, "pid": None, "tiers": []}
    asked = argparse.Namespace(config=arguments.config, socket=path, command="doctor")
    try:
        with connected(asked) as (client, _):
            stats = client.stats()
            node["pid"] = client.node_pid
            node["tiers"] = [{"name": tier.name, "up": tier.up, "why": tier.why or None} for tier in stats.tiers]
    except LMCacheError as error:
        return node | {"state": "not there", "why": str(error)}
    down = [tier for tier in node["tiers"] if not tier["up"]]
    if down:
        why = "; ".join(f"{tier['name']} is down: {tier['why'] or 'no reason is known'}" for tier in down)
        return node | {"state": "a tier is down", "why": why}
    return node


def _general(config: Config, node: dict[str, Any] | None) -> list[str]:
    """What concerns no tier: memory, unless a node has taken it already."""
    from lmcache_core.hostpool import available_memory  # imports what moves KV

    general = []
    if not config.connect and (node is None or node["state"] == "not there"):
        general.append(memory_advice(config.cpu.capacity, available_memory()))
    if not config.tiers and not config.connect:
        general.append("there are no tiers: KV is gone when it leaves memory; see docs/configuration.md#tiers")
    return list(filter(None, general))


def _print(
    file: str, node: dict[str, Any] | None, checked: Sequence[Checked], general: list[str], *, well: bool
) -> None:
    if node is not None:
        process = "" if node["pid"] is None else f" (process {node['pid']})"
        print(visible(f"node {node['socket']}{process}: {node['state']}" + (f": {node['why']}" if node["why"] else "")))
    if checked:
        print_table(_COLUMNS, [_cells(found) for found in checked])
    lines = [(found.name, "fix", text) for found in checked for text in found.problems]
    lines += [(found.name, "advice", text) for found in checked for text in found.advice]
    lines += [("", "advice", text) for text in general]
    if lines:
        print()
    for name, kind, text in lines:
        named = not name or text.startswith(f"{name}: ")  # a backend says its own name
        print(visible(f"{kind}: {text}" if named else f"{kind}: {name}: {text}"))
    if not lines:
        print(("\n" if checked else "") + visible(f"{file}: all is well"))
    elif well:
        print(visible(f"{file}: works; see the advice above"))


def _cells(found: Checked) -> tuple[str, ...]:
    times = (found.open_s, found.contains_s, found.read_s, found.write_s)
    rates = (found.read_gbs, found.write_gbs)
    return (
        found.name,
        found.backend,
        found.state,
        *("-" if seconds is None else shown_time(seconds) for seconds in times),
        *("-" if rate is None else f"{rate:.2g}" for rate in rates),
    )
