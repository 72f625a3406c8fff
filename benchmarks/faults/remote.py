"""Tiers that other hosts share, when the network or the server is bad: what a request pays for it, and for how long.

Real servers behind a relay that delays, throttles, cuts, damages, refuses or swallows what passes. An engine asks for
prompts that the tier holds, and stores new ones, before, while and after the fault lasts. Its figures: by how much the
slowest request was slower than one that is served well (`worst_added_ms`), how slow requests still are once the tier is
left alone (`then_ms`), how long it takes until it is (`open_s`), and until it gives hits again (`recover_s`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.campaign import Campaign, Fault, Run, until
from lmcache_core import Cache, Encoding, Group, GroupKind, Namespace
from tests.servers import gluster as gluster_servers
from tests.servers import redis as redis_servers
from tests.servers import s3 as s3_servers
from tests.servers.chaos import Chaos, chaos

__all__ = ["FAULTS"]

PAGE_TOKENS, CHUNK_PAGES, CHUNKS = 16, 4, 4
PAGE_BYTES = 256 << 10
"""A chunk has 1 MiB, a prompt 4."""
PROMPTS = 6
DEADLINE = 0.5
"""The tier's `read_timeout`."""
LASTS = 2.5
"""Seconds for which a fault lasts at least."""
MOST = 3 * DEADLINE + 1.0
"""Seconds after which a request counts as stuck, on a busy machine."""
BACK = 20.0
"""Seconds within which hits must be back when the cause is gone."""
QUICK = 20
"""Requests of which the median is taken once the tier is left alone."""


@dataclass
class Bad:
    """A fault of one tier."""

    breaks: Callable[[], object]
    heals: Callable[[], object]
    keeps: bool = True
    """Whether what was stored before must be there afterwards."""
    at_start: bool = False
    """Whether the cache is opened while it lasts."""
    turns: float = 0.0
    """Seconds after which it goes, and comes again, while it lasts."""


class View:
    """KV of one request: each page's bytes follow from its key."""

    def __init__(self, keys: list[bytes], *, filled: bool) -> None:
        self._keys = keys
        self.pages = np.zeros((len(keys), PAGE_BYTES), np.uint8)
        if filled:
            for number, key in enumerate(keys):
                self.pages[number] = self._content(key)

    @staticmethod
    def _content(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(int.from_bytes(key[:8], "little")).integers(0, 256, PAGE_BYTES, np.uint8)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        np.frombuffer(into, np.uint8).reshape(pages, -1)[:] = self.pages[first_page : first_page + pages]

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self.pages[first_page : first_page + pages] = np.frombuffer(source, np.uint8).reshape(pages, -1)

    def wrong(self, pages: int) -> int:
        """How many of the first pages are not what they should be."""
        return sum(not np.array_equal(self.pages[n], self._content(self._keys[n])) for n in range(pages))


def namespace() -> Namespace:
    group = Group(
        kind=GroupKind.FULL, layers=(0,), page_layer_bytes=PAGE_BYTES, dtype="float16", kv_heads=8, head_size=512
    )
    return Namespace(weights="model", groups=(group,), page_tokens=PAGE_TOKENS, encoding=Encoding(layout="canonical"))


class Engine:
    """Asks for prompts and stores some, and takes the time of each."""

    def __init__(self, cache: Cache, run: Run) -> None:
        self._cache = cache
        self._run = run
        self._new = 1000

    def tokens(self, prompt: int) -> list[int]:
        first = prompt << 10
        return list(range(first, first + CHUNKS * CHUNK_PAGES * PAGE_TOKENS))

    def store(self, prompt: int) -> Any:
        keys = self._cache.prompt(self.tokens(prompt))
        return self._cache.store(keys, View(list(keys.keys), filled=True))

    def ask(self, prompt: int) -> tuple[int, float]:
        """How many pages come, and after how long."""
        self._cache.clear(["cpu"])
        keys = self._cache.prompt(self.tokens(prompt))
        view = View(list(keys.keys), filled=False)
        start = time.perf_counter()
        got = self._cache.retrieve(keys, view).tokens // PAGE_TOKENS
        took = time.perf_counter() - start
        if view.wrong(got):
            self._run.wrong(f"{view.wrong(got)} of {got} pages of prompt {prompt}")
        if took > MOST:
            self._run.lost(f"a request took {took:.1f} s")
        return got, took

    def store_new(self) -> None:
        """Store something, which must not wait for the tier."""
        self._new += 1
        start = time.perf_counter()
        self.store(self._new)
        if time.perf_counter() - start > 1.0:
            self._run.lost(f"a store took {time.perf_counter() - start:.1f} s")

    @property
    def up(self) -> bool:
        return self._cache.stats().tiers[0].up


def inject(make: Callable[[Path], Any], campaign: Campaign) -> None:
    """Run a fault. `make` starts what is needed: a context manager of the tier's settings and the fault."""
    for run in campaign:
        with run, make(run.path) as (tier, bad):
            _one(run, tier, bad)


def _one(run: Run, tier: dict[str, Any], bad: Bad) -> None:
    settings = {
        "chunk_tokens": PAGE_TOKENS * CHUNK_PAGES,
        "page_tokens": PAGE_TOKENS,
        "cpu": {"capacity": "32MiB"},
        "tiers": [
            tier | {"read_timeout": DEADLINE, "write_timeout": 15.0, "breaker": {"cooldown": 0.2, "max_cooldown": 1.0}}
        ],
    }
    whole = CHUNKS * CHUNK_PAGES
    if bad.at_start:
        bad.breaks()
    with Cache.open(settings, namespace()) as cache:
        engine = Engine(cache, run)
        well = 0.0
        if not bad.at_start:
            for prompt in range(PROMPTS):
                if not engine.store(prompt).wait(30):
                    run.lost("a prompt was not stored though all was well")
            took = [engine.ask(prompt) for prompt in range(PROMPTS)]
            if any(pages != whole for pages, _ in took):
                run.lost(f"of {whole} pages {[pages for pages, _ in took]} came though all was well")
            well = statistics.median(seconds for _, seconds in took)
            bad.breaks()
        worst, opened, then = _meanwhile(run, engine, bad)
        run.figure("worst_added_ms", max(0.0, worst - well) * 1e3)
        if opened is not None:
            run.figure("open_s", opened)
            run.figure("then_ms", then * 1e3)
        bad.heals()
        healed = time.perf_counter()
        if bad.at_start or not bad.keeps:
            back = until(lambda: engine.up and engine.store(0).wait(5) and engine.ask(0)[0] == whole, BACK)
        else:
            back = until(lambda: engine.ask(0)[0] == whole, BACK)
        if back:
            run.recovered()
            run.figure("recover_s", time.perf_counter() - healed)
        if back and bad.keeps and not bad.at_start:
            gone = [prompt for prompt in range(PROMPTS) if not until(lambda p=prompt: engine.ask(p)[0] == whole, 5)]  # type: ignore[misc]
            if gone:
                run.lost(f"prompts {gone} are gone")


def _meanwhile(run: Run, engine: Engine, bad: Bad) -> tuple[float, float | None, float]:
    """The slowest request while the fault lasts, when the tier was left alone, and the median of requests then."""
    start = turned = time.perf_counter()
    worst, opened, broken = 0.0, None, True
    alone: list[float] = []
    number = 0
    while time.perf_counter() - start < LASTS or (opened is not None and len(alone) < QUICK and not bad.turns):
        if bad.turns and time.perf_counter() - turned > bad.turns:
            (bad.heals if broken else bad.breaks)()
            broken, turned = not broken, time.perf_counter()
        was_up = engine.up
        pages, took = engine.ask(number % PROMPTS)
        run.seen("hits" if pages else "misses")
        worst = max(worst, took)
        if not was_up and not engine.up:
            alone.append(took)
        if opened is None and not engine.up:
            opened = time.perf_counter() - start
        if number % 5 == 0:
            engine.store_new()
        number += 1
        time.sleep(0.01)  # an engine does something else too
        if time.perf_counter() - start > 4 * LASTS:
            break
    if bad.turns and not broken:
        bad.breaks()
    return worst, opened, statistics.median(alone) if alone else 0.0


# Where the tiers are


def _network(relay: Chaos, name: str) -> Bad:
    """Faults of any network."""

    def gone() -> None:
        relay.refuse = True
        relay.cut()

    def slow(**how: Any) -> Callable[[], None]:
        def break_() -> None:
            for key, value in how.items():
                setattr(relay, key, value)

        return break_

    breaks: dict[str, Callable[[], object]] = {
        "down at start": gone,
        "dies": gone,
        "flapping": gone,
        "2 s latency": slow(latency=2.0),
        "1 MB/s": slow(bytes_per_second=1e6),
        "resets after 300 kB": slow(cut_after=300_000),
        "wrong bytes": slow(damage=0.5),
        "swallows everything": slow(silent=True),
    }
    # What was read wrong is deleted.
    return Bad(
        breaks[name],
        relay.well,
        keeps=name != "wrong bytes",
        at_start=name == "down at start",
        turns=0.4 if name == "flapping" else 0.0,
    )


NETWORK = (
    "down at start",
    "dies",
    "flapping",
    "2 s latency",
    "1 MB/s",
    "resets after 300 kB",
    "wrong bytes",
    "swallows everything",
)


@contextmanager
def _redis(name: str, path: Path) -> Iterator[tuple[dict[str, Any], Bad]]:
    with redis_servers.valkey(path / "valkey") as server, chaos(server.port) as relay:
        tier = {"backend": "redis", "url": f"redis://127.0.0.1:{relay.port}", "connect_timeout": DEADLINE}

        def password(set_: bool) -> None:
            server.settings.clear()
            if not set_:
                server.settings["password"] = "now"
            server.run("CONFIG", "SET", "requirepass", "now" if set_ else "")
            server.settings.clear()
            relay.cut()

        def room(enough: bool) -> None:
            server.run("CONFIG", "SET", "maxmemory", "0" if enough else "1mb")

        own = {
            "is killed": Bad(server.process.kill, server.process.restart, keeps=False),
            "freezes": Bad(server.process.freeze, server.process.thaw),
            "is full": Bad(partial(room, False), partial(room, True)),
            "revokes access": Bad(partial(password, True), partial(password, False)),
        }
        yield tier, own[name] if name in own else _network(relay, name)


REDIS = ("is killed", "freezes", "is full", "revokes access")


@contextmanager
def _s3(name: str, path: Path) -> Iterator[tuple[dict[str, Any], Bad]]:
    with s3_servers.seaweed(path / "weed") as server, chaos(server.port) as relay:
        server.make_bucket("faults")
        tier = {
            "backend": "s3",
            "bucket": "faults",
            "endpoint": f"http://127.0.0.1:{relay.port}",
            "access_key": s3_servers.ACCESS_KEY,
            "secret_key": s3_servers.SECRET_KEY,
        }

        def answers(status: str, code: str) -> Callable[[], None]:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()

            def answer() -> None:
                relay.answer = head + body

            return answer

        own = {
            "freezes": Bad(server.freeze, server.thaw),
            "is full": Bad(answers("507 Insufficient Storage", "InsufficientStorage"), relay.well),
            "revokes access": Bad(answers("403 Forbidden", "AccessDenied"), relay.well),
        }
        yield tier, own[name] if name in own else _network(relay, name)


S3 = ("freezes", "is full", "revokes access")


@contextmanager
def _small(path: Path) -> Iterator[None]:
    """A file system of its own, without a drive."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


@contextmanager
def _nfs(name: str, path: Path) -> Iterator[tuple[dict[str, Any], Bad]]:
    with ExitStack() as stack:
        brick = path / "gluster" / "brick"
        if name in ("is full", "is read only"):
            stack.enter_context(_small(brick))
        volume = stack.enter_context(gluster_servers.volume(path / "gluster", relayed=name in NFS_NETWORK))
        shared = volume.one.path / "kv"
        tier = {"backend": "nfs", "path": str(shared)}

        def damage() -> None:
            for file in (volume.brick / "kv").rglob("*"):
                if file.is_file() and file.stat().st_size > PAGE_BYTES and ".glusterfs" not in file.parts:
                    with open(file, "r+b") as opened:
                        opened.seek(PAGE_BYTES // 2)
                        byte = opened.read(1)
                        opened.seek(PAGE_BYTES // 2)
                        opened.write(bytes([byte[0] ^ 0x55]))

        def fill() -> None:
            free = os.statvfs(brick)
            os.posix_fallocate(
                filling := os.open(brick / "filling", os.O_CREAT | os.O_WRONLY), 0, free.f_bavail * free.f_bsize
            )
            os.close(filling)

        own = {
            "is full": Bad(fill, lambda: os.unlink(brick / "filling")),
            "is read only": Bad(partial(_remount, brick, "ro"), partial(_remount, brick, "rw")),
            "freezes": Bad(volume.one.freeze, volume.one.thaw),
            "flapping": Bad(volume.one.freeze, volume.one.thaw, turns=0.4),
            "its server dies": Bad(volume.server.kill, volume.server.restart),
            "its server freezes": Bad(volume.server.freeze, volume.server.thaw),
            "wrong bytes": Bad(damage, lambda: None, keeps=False),
        }
        if volume.relay is not None:
            yield tier, _network(volume.relay, name)
        else:
            yield tier, own[name]


NFS = ("freezes", "flapping", "its server dies", "its server freezes", "wrong bytes", "is full", "is read only")
NFS_NETWORK = ("2 s latency", "1 MB/s", "resets after 300 kB", "swallows everything")


@dataclass(frozen=True)
class Remote(Fault):
    """A fault of a tier that needs a server."""

    lacking: Callable[[], str] = lambda: ""

    def missing(self) -> str:
        return self.lacking() or super().missing()


def _faults(
    tier: str, names: tuple[str, ...], make: Callable[..., Any], lacking: Callable[[], str], runs: int, seconds: float
) -> list[Fault]:
    return [
        Remote(f"{tier}, {name}", runs, partial(inject, partial(make, name)), 1, seconds=seconds, lacking=lacking)
        for name in names
    ]


FAULTS: list[Fault] = [
    *_faults("redis", (*REDIS, *NETWORK), _redis, partial(redis_servers.lacking, "valkey"), 3, 5.0),
    *_faults("s3", (*S3, *NETWORK), _s3, s3_servers.lacking, 2, 9.0),
    *_faults("nfs", (*NFS, *NFS_NETWORK), _nfs, gluster_servers.lacking, 2, 5.0),
]
