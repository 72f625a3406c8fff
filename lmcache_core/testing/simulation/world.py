"""One run: hosts and media drawn from a seed, what happens to them, and a rest at the end at which all must be well."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core import guard
from lmcache_core.config import BreakerConfig, Config, CpuConfig, ShareConfig, TierConfig
from lmcache_core.errors import ConfigError
from lmcache_core.namespace import Namespace
from lmcache_core.testing.simulation.backend import LocalBackend, RemoteBackend, SimulatedBackend
from lmcache_core.testing.simulation.content import CHUNK_BYTES, CHUNK_PAGES, PAGE_TOKENS, namespace
from lmcache_core.testing.simulation.host import Host
from lmcache_core.testing.simulation.loop import VirtualLoop
from lmcache_core.testing.simulation.medium import Medium
from lmcache_core.testing.simulation.rest import rest
from lmcache_core.testing.simulation.trace import Trace
from lmcache_core.testing.simulation.weather import Weather

__all__ = ["STEPS", "Outcome", "World", "run"]

STEPS = 40
"""Operations of engines in one run."""
CHECKED = 24
"""After so many callbacks all is checked, besides after each operation."""
LONGEST = 600.0
"""Virtual seconds in which something must happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run has ended.

    Args:
        seed: Which run it was.
        digest: Hash of its trace.
        failure: What was wrong; empty if nothing.
        lines: The end of its trace, or all of it.
        callbacks: How many there were.
        seconds: Virtual seconds.
    """

    seed: int
    digest: str
    failure: str
    lines: Sequence[str]
    callbacks: int
    seconds: float


class World:
    """See the module."""

    def __init__(self, seed: int, steps: int, *, keep_all: bool = False) -> None:
        self.trace = Trace(keep_all=keep_all)
        self.rng = rng = random.Random(f"{seed} world")
        self.steps = steps
        shuffled = rng.random() < 0.8
        self.loop = VirtualLoop(random.Random(f"{seed} loop"), self.trace, shuffled=shuffled, after_each=self._after)
        self.hosts: list[Host] = []
        self.weathers: dict[Host, list[Weather]] = {}
        self.media: dict[str, Medium] = {}
        kinds = rng.choice(("f", "f", "f", "f", "fw", "fs", "fws"))
        shards = rng.choice((1, 1, 1, 2))
        self.namespaces = [namespace(kinds, shards), namespace("f", shards, "other")]
        self.tiers = [self._draw_tier(number) for number in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]
        self.configs = [self._draw_config() for _ in range(rng.choice((1, 1, 1, 2)))]
        self.at_once = rng.choice((1, 3, 500))
        self.lives = 0
        self._callbacks = 0

    # Drawing

    def _draw_tier(self, number: int) -> dict[str, Any]:
        rng = self.rng
        return {
            "local": rng.random() < 0.5,
            "abortable": rng.random() < 0.5,
            "costly_probes": rng.random() < 0.5,
            "capacity": rng.choice((None, None, 2, 3, 6)),
            "room": rng.choice((None, None, None, 2, 4)),
            "write": rng.choice(("through", "through", "through", "evict", "never")),
            "admit": rng.choice(("always", "always", "always", "second-touch")),
            "policy": rng.choice(("lru", "lru", "s3fifo")),
            "min_prompt": rng.choice((0, 0, 0, 5 * PAGE_TOKENS)),
            "promote": rng.random() < 0.7,
            "read_timeout": rng.choice((0.02, 0.1, 0.5, 2.0)),
            "write_timeout": rng.choice((0.05, 0.2, 1.0, 5.0)),
            "concurrency": rng.choice((1, 1, 2, 4)),
            "quarantine": rng.choice((1, 2, 4)),
            "breaker": (rng.choice((1, 2, 3)), rng.choice((0.1, 0.5, 1.0)), rng.choice((1.0, 4.0))),
        }

    def _draw_config(self) -> Config:
        rng = self.rng
        tiers = []
        for number, drawn in enumerate(self.tiers):
            failures, cooldown, longest = drawn["breaker"]
            tiers.append(
                TierConfig(
                    backend="simulated",
                    name=f"t{number}",
                    capacity=drawn["capacity"] and drawn["capacity"] * CHUNK_BYTES,
                    write=drawn["write"],
                    admit=drawn["admit"],
                    min_prompt=drawn["min_prompt"],
                    promote=drawn["promote"],
                    policy=drawn["policy"],
                    read_timeout=drawn["read_timeout"],
                    write_timeout=drawn["write_timeout"],
                    concurrency=drawn["concurrency"],
                    quarantine=drawn["quarantine"] * CHUNK_BYTES,
                    breaker=BreakerConfig(failures=failures, cooldown=cooldown, max_cooldown=longest),
                )
            )
        shares: tuple[ShareConfig, ...] = ()
        if rng.random() < 0.2:
            shares = (ShareConfig(tenant="x", weight=2.0, cpu=2 * CHUNK_BYTES),)
        return Config(
            chunk_tokens=CHUNK_PAGES * PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            cpu=CpuConfig(capacity=rng.choice((1, 2, 3, 4, 6, 10)) * CHUNK_BYTES, policy=rng.choice(("lru", "s3fifo"))),
            tiers=tuple(tiers),
            shares=shares,
            share_timeout=rng.choice((2.0, 3600.0)),
            lease_timeout=rng.choice((0.5, 2.0, 10.0)),
            log_interval=1.0,
        )

    def _medium(self, place: int, number: int) -> Medium:
        """A local one for each place, a remote one for all."""
        drawn = self.tiers[number]
        name = f"m{number}" + (f"@{place}" if drawn["local"] else "")
        if name not in self.media:
            self.media[name] = Medium(name, drawn["room"] and drawn["room"] * CHUNK_BYTES)
        return self.media[name]

    # What happens

    def open(self, place: int) -> None:
        """Start a host where another has ended, or the first there."""
        rng = self.rng
        self.lives += 1
        name = f"n{place}.{self.lives}"
        backends: list[SimulatedBackend] = []
        weathers = []
        for number, drawn in enumerate(self.tiers):
            weather = Weather(random.Random(rng.random()), max(drawn["read_timeout"], drawn["write_timeout"]))
            if rng.random() < 0.3:
                weather.change()
            weathers.append(weather)
            medium = self._medium(place, number)
            mine = random.Random(rng.random())
            label, shards = f"{name}.t{number}", self.namespaces[0].shards
            if drawn["local"]:
                backends.append(LocalBackend(medium, weather, mine, self.trace, label, shards))
            else:
                backends.append(
                    RemoteBackend(
                        medium,
                        weather,
                        mine,
                        self.trace,
                        label,
                        shards,
                        abortable=drawn["abortable"],
                        costly_probes=drawn["costly_probes"],
                    )
                )
        model = self._draw_namespace()
        config, engines = self.configs[place], rng.choice((1, 2, 3))
        host = Host(name, self.loop, random.Random(rng.random()), self.trace, config, model, backends, engines)
        self.hosts[place : place + 1] = [host]
        self.weathers[host] = weathers

    def _draw_namespace(self) -> Namespace:
        return self.namespaces[0] if self.rng.random() < 0.8 else self.namespaces[1]

    def _after(self) -> None:
        self._callbacks += 1
        if self.trace.failure is not None:
            raise self.trace.failure
        if self._callbacks % CHECKED == 0:
            for host in self.hosts:
                if not host.dead:
                    host.check()

    def live(self) -> None:
        """Let engines work, and things happen to them."""
        rng = self.rng
        guard.MOST_AT_ONCE = self.at_once
        for place in range(len(self.configs)):
            self.open(place)
        done = 0
        while done < self.steps:
            before = self.operations
            some = rng.randint(1, 10)
            if not self.loop.run_until(lambda: self.operations >= before + some or self._failed(), LONGEST):  # noqa: B023
                self.trace.fail(f"nothing has happened in {LONGEST:g} s")
            self._raise()
            done += self.operations - before
            self._happen()

    @property
    def operations(self) -> int:
        """Operations of the engines that there are."""
        return sum(host.operations for host in self.hosts)

    def _failed(self) -> bool:
        return any(host.failed() for host in self.hosts) or bool(self.loop.failures)

    def _raise(self) -> None:
        for host in self.hosts:
            error = host.failed()
            if error is not None:
                raise error
        if self.loop.failures:
            self.trace.fail(self.loop.failures[0])
        if self.trace.failure is not None:
            raise self.trace.failure

    def _happen(self) -> None:
        rng = self.rng
        place = rng.randrange(len(self.hosts))
        host = self.hosts[place]
        what = rng.random()
        if what < 0.5 and self.weathers[host]:
            number = rng.randrange(len(self.weathers[host]))
            self.trace.add(f"{host.name}.t{number} weather {self.weathers[host][number].change():g}")
        elif what < 0.6:
            host.close(rng.choice((0.0, 0.1, 1.0, 5.0)))
            self._raise()
            self.open(place)
        elif what < 0.67:
            host.kill()
            self.open(place)

    def run(self) -> None:
        """Live, and come to rest."""
        self.live()
        self._raise()
        for host in self.hosts:
            for weather in self.weathers[host]:
                weather.clear_up()
        for host in self.hosts:
            rest(host)
            self._raise()
        for host in self.hosts:
            host.close(5.0)
            self._raise()

    def end(self) -> None:
        """Let go of everything, however it stands."""
        for host in self.hosts:
            if not host.dead:
                host.kill()
        self.loop.end()


def run(seed: int, steps: int = STEPS, *, keep_all: bool = False) -> Outcome:
    """Run the world of a seed. Never raises for what it finds."""
    at_once = guard.MOST_AT_ONCE
    world = World(seed, steps, keep_all=keep_all)
    collects = gc.isenabled()
    gc.disable()  # what is let go of in a cycle is found at moments that depend on more than the seed
    gc.freeze()  # when it is looked for, what was there before is not looked at
    failure = ""
    try:
        world.run()
    except (Exception, ConfigError) as error:  # noqa: BLE001 whatever it is, it is what was looked for
        failure = f"{type(error).__name__}: {error}"
        found = world.trace.failure
        if found is not None:
            failure = f"{type(found).__name__}: {found}"
    finally:
        guard.MOST_AT_ONCE = at_once
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what a killed process was about to await is never awaited
            world.end()
            gc.collect()
        gc.unfreeze()
        if collects:
            gc.enable()
    trace = world.trace
    return Outcome(seed, trace.digest, failure, list(trace.lines), world.loop.steps, trace.now)
