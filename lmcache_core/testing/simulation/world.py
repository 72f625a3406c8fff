"""One run: hosts and media drawn from a seed, what happens to them, and a rest at the end at which all must be well."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core import guard, pace
from lmcache_core.errors import ConfigError
from lmcache_core.testing.simulation.backend import LocalBackend, RemoteBackend, SimulatedBackend
from lmcache_core.testing.simulation.drawing import draw_config, draw_namespaces, draw_tier
from lmcache_core.testing.simulation.host import Host
from lmcache_core.testing.simulation.loop import VirtualLoop
from lmcache_core.testing.simulation.medium import Medium
from lmcache_core.testing.simulation.rest import rest
from lmcache_core.testing.simulation.trace import Trace
from lmcache_core.testing.simulation.weather import Weather

__all__ = ["STEPS", "Outcome", "World", "run"]

STEPS = 60
"""Operations of engines in one run."""
CHECKED = 24
"""After so many callbacks all is checked, besides after each operation."""
SLOW = 50.0
"""How much slower engines are while another host is opened or closed, which may take a minute."""
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
        self.media: dict[str, Medium] = {}
        self.namespaces = draw_namespaces(rng)
        self.tiers = [draw_tier(rng, number) for number in range(rng.choice((0, *(1, 1, 1, 1), *(2, 2, 2), 3)))]
        self.configs = [draw_config(rng, self.tiers) for _ in range(rng.choice((1, 1, 1, 2)))]
        self.at_once = rng.choice((1, 3, 500))
        self.fewest = rng.choice((1, 1, pace.FEWEST))
        self.lives = 0
        self._callbacks = 0

    # What happens

    def _medium(self, place: int, number: int) -> Medium:
        """A local one for each place, a remote one for all."""
        drawn = self.tiers[number]
        name = f"m{number}" + (f"@{place}" if drawn.local else "")
        if name not in self.media:
            self.media[name] = Medium(name, drawn.room)
        return self.media[name]

    def _backend(self, place: int, number: int, host: str, weather: Weather) -> SimulatedBackend:
        drawn = self.tiers[number]
        rng, shards = random.Random(self.rng.random()), self.namespaces[0].shards
        about = (self._medium(place, number), weather, rng, self.trace, f"{host}.t{number}", shards)
        if drawn.local:
            return LocalBackend(*about)
        return RemoteBackend(*about, abortable=drawn.abortable, costly_probes=drawn.costly_probes)

    def open(self, place: int) -> None:
        """Start a host where another has ended, or the first there."""
        rng = self.rng
        self.lives += 1
        name = f"n{place}.{self.lives}"
        weathers = []
        for drawn in self.tiers:
            late = max(drawn.config.read_timeout, drawn.config.write_timeout)
            weathers.append(Weather(random.Random(rng.random()), late))
            if rng.random() < 0.5:
                weathers[-1].change()
        backends = [self._backend(place, number, name, weather) for number, weather in enumerate(weathers)]
        model = self.namespaces[0] if rng.random() < 0.8 else self.namespaces[1]
        config, engines = self.configs[place], rng.choice((1, 2, 3, 4))
        try:
            host = Host(name, self.loop, random.Random(rng.random()), self.trace, config, model, backends, engines)
        except ConfigError as error:  # a backend has refused its options, and the node with it
            self.trace.add(f"{name} does not open: {error}")
            self.open(place)
            return
        self.hosts[place : place + 1] = [host]

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
        guard.MOST_AT_ONCE, pace.FEWEST = self.at_once, self.fewest
        for place in range(len(self.configs)):
            self.open(place)
        done = 0
        while done < self.steps:
            before = self.operations
            some = rng.randint(1, 8)
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
        if what < 0.5 and host.backends:
            number = rng.randrange(len(host.backends))
            backend = host.backends[number]
            mood = backend.weather.change()
            self.trace.add(f"{host.name}.t{number} weather {mood:g}")
            if mood == 1.0 and not host.node.runners[number].up and not backend.busy and backend.medium.values:
                key = rng.choice(list(backend.medium.values))
                del backend.medium.values[key]  # whatever happens to a drive that nobody uses: it is scanned again
        elif what < 0.67:
            for other in self.hosts:
                other.pace = SLOW
            if what < 0.6:
                host.close(rng.choice((0.0, 0.1, 1.0, 5.0)))
                self._raise()
            else:
                host.kill()
            self.open(place)
            for other in self.hosts:
                other.pace = 1.0

    def run(self) -> None:
        """Live, and come to rest."""
        self.live()
        self._raise()
        for host in self.hosts:
            for backend in host.backends:
                backend.weather.clear_up()
            host.resting = True
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
    constants = guard.MOST_AT_ONCE, pace.FEWEST
    world = World(seed, steps, keep_all=keep_all)
    collects = gc.isenabled()
    gc.disable()  # what is let go of in a cycle is found at moments that depend on more than the seed
    gc.freeze()  # when it is looked for, what was there before is not looked at
    failure = ""
    unawaited = warnings.catch_warnings()
    unawaited.__enter__()  # a task that is cancelled, or killed, before its first step never awaits what it was given
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 whatever it is, it is what was looked for
        failure = f"{type(error).__name__}: {error}"
        found = world.trace.failure
        if found is not None:
            failure = f"{type(found).__name__}: {found}"
    finally:
        guard.MOST_AT_ONCE, pace.FEWEST = constants
        world.end()
        gc.collect()
        gc.unfreeze()
        unawaited.__exit__(None, None, None)
        if collects:
            gc.enable()
    trace = world.trace
    return Outcome(seed, trace.digest, failure, list(trace.lines), world.loop.steps, trace.now)
