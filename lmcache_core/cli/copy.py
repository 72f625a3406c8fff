"""`lmcache-core copy`: from one tier to another, checked on the way; what is there already is passed over."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from lmcache_core import frame
from lmcache_core.cli.alone import SPACE, Alone, beside, buffer, owner_of, the_tier, together, told_by_loggers
from lmcache_core.cli.disk_cache import can_be_inspected
from lmcache_core.cli.loading import load_usable
from lmcache_core.cli.output import add_json_option, byte_progress, print_json, print_note, visible
from lmcache_core.cli.verification import damage
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError, FrameError, LayoutError, LMCacheError
from lmcache_core.iothreads import IoThreads
from lmcache_core.namespace import Namespace
from lmcache_core.protocols import Chunk, ChunkKey, Describes, Lists, ReadResult, Scannable, Stored, WriteResult
from lmcache_core.units import format_size, parse_size

LIMIT = 30.0
"""Seconds that one operation may take."""
MOST_BYTES = 1 << 30
"""Of a chunk: what is larger is none, whatever lists it."""
_ASKED = 64
"""Chunks that the target is asked for at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the YAML file; by default the one that LMCACHE_CORE_CONFIG names"
    )
    parser.add_argument("--from", metavar="TIER", dest="source", required=True, help="the tier to read")
    parser.add_argument("--to", metavar="TIER", dest="target", required=True, help="the tier to write")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--space", metavar="HEX", help="only chunks of this space or namespace, by its first digits")
    only.add_argument("--model", metavar="NAME", help="only chunks of the model of this name")
    parser.add_argument("--dry-run", action="store_true", help="say what would be copied, and copy nothing")
    parser.add_argument("--rate", metavar="SIZE", help="copy at most so many bytes a second, as in 200MiB")
    parser.add_argument(
        "--concurrency", metavar="N", type=int, default=4, help="chunks under way at once (default: %(default)s)"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


@dataclass
class Counts:
    """What became of the chunks of the source."""

    found: int = 0
    """Those that were chosen."""
    found_nbytes: int = 0
    copied: int = 0
    """With `--dry-run`, those that would be."""
    copied_nbytes: int = 0
    there: int = 0
    """On the target already."""
    damaged: int = 0
    gone: int = 0
    """Not on the source any more when they were read."""


class _Found(NamedTuple):
    """What the source lists."""

    key: ChunkKey
    nbytes: int
    stored: Stored | None = None
    """All that is known of it, if the source knows."""


class Plan(NamedTuple):
    """What is asked for."""

    source: TierConfig
    target: TierConfig
    space: str | None
    model: str | None
    dry: bool
    rate: int | None
    concurrency: int


def run(arguments: argparse.Namespace) -> int:
    """Copy. The exit code is 1 if something could not be."""
    loaded = load_usable(arguments.config)
    name = loaded.provenance.name
    plan = Plan(
        the_tier(loaded.config, arguments.source, name),
        the_tier(loaded.config, arguments.target, name),
        arguments.space,
        arguments.model,
        arguments.dry_run,
        _rate(arguments),
        arguments.concurrency,
    )
    if plan.concurrency < 1:
        arguments.usage_error("--concurrency: must be at least 1")
    if plan.source is plan.target:
        arguments.usage_error("--from and --to are the same tier")
    _check(plan)
    counts = Counts()
    copier = Copier(plan, counts)
    problem = ""
    with told_by_loggers(), byte_progress() as bar:
        task = bar.add_task("copying", total=None)

        def moved(nbytes: int) -> None:
            bar.update(task, total=counts.found_nbytes, advance=nbytes)

        try:
            beside(lambda: copier.run(moved), grace=LIMIT)
        except LMCacheError as error:
            problem = str(error)
        except (KeyboardInterrupt, SystemExit):
            print_note(f"interrupted: {_said(counts, plan)}; the same command goes on where this one has ended")
            raise
    if arguments.json:
        print_json(
            {"from": plan.source.name, "to": plan.target.name, "dry_run": plan.dry, **asdict(counts)}
            | {"problem": problem or None}
        )
    else:
        print(visible(_said(counts, plan)))
        if problem:
            print_note(f"not all was copied: {problem}")
    return 1 if problem or counts.damaged else 0


def _rate(arguments: argparse.Namespace) -> int | None:
    if arguments.rate is None:
        return None
    try:
        rate = parse_size(arguments.rate)
    except ConfigError as error:
        arguments.usage_error(f"--rate: {error}")
    if not rate:
        arguments.usage_error("--rate: must be more than 0")
    return rate


def _said(counts: Counts, plan: Plan) -> str:
    verb = "would be copied" if plan.dry else "copied"
    parts = [f"{counts.copied} of {counts.found} chunks {verb}, {format_size(counts.copied_nbytes)}"]
    parts += [f"{counts.there} were there already"]
    parts += [f"{counts.damaged} are damaged and were left"] if counts.damaged else []
    parts += [f"{counts.gone} have gone meanwhile"] if counts.gone else []
    return f"{plan.source.name} to {plan.target.name}: {', '.join(parts)}"


def _check(plan: Plan) -> None:
    """
    Raises:
        LMCacheError: One of the tiers cannot be used for it.
    """
    if plan.target.write == "never":
        raise ConfigError(f"{plan.target.name} is only read (write: never); it cannot be copied to")
    if plan.source.cipher != plan.target.cipher or (plan.source.codec != "none" and plan.target.codec == "none"):
        raise ConfigError(
            f"chunks are copied as they are stored, and what {plan.source.name} stores {plan.target.name} could not "
            "read: write the same codec and cipher for both"
        )
    for tier in (plan.source, plan.target):
        if (owner := owner_of(tier)) is not None:
            raise LMCacheError(
                f"{tier.name} is in use by process {owner}, with which it would share its chunks and capacity; stop "
                "that process first"
            )
    if can_be_inspected(plan.source.backend):
        for path in plan.source.options.paths():
            if not Path(path).is_dir():  # opening it would make it
                raise LMCacheError(f"{plan.source.name}: {path} is no directory")


class Copier:
    """Copies what `plan` says, and counts it in `counts`.

    Raises:
        LMCacheError: Nothing can be copied from that source.
    """

    def __init__(self, plan: Plan, counts: Counts) -> None:
        self._plan = plan
        self._counts = counts
        self._moved: Callable[[int], None] = _nobody
        self._target_is_absent = plan.dry and _is_absent(plan.target)
        self._source = Alone(plan.source, LIMIT)
        self._target = Alone(plan.target, LIMIT)
        if not isinstance(self._source.backend, Scannable | Lists):
            raise LMCacheError(
                f"{plan.source.name} cannot be copied from: backend {plan.source.backend} does not list what it holds; "
                "a source is a tier that does, such as one of disk, redis, s3 or nfs"
            )
        self._manifests: dict[bytes, bytes] = {}
        self._described: set[bytes] = set()
        self._wanted: Collection[bytes] | None = None
        self._queue: asyncio.Queue[_Found | None] = asyncio.Queue(2 * plan.concurrency)
        self._pace = _Pace(plan.rate)
        self._threads = IoThreads("lmcache-copy", 2)

    async def run(self, moved: Callable[[int], None]) -> None:
        """Copy. `moved` is told the bytes that are done with.

        Raises:
            LMCacheError: A tier failed, or has no room left; what has been copied stays.
        """
        self._moved = moved
        try:
            await self._source.open()
            if not self._target_is_absent:
                await self._target.open()
            await self._choose()
            async for stored in self._chosen():
                self._counts.found += 1
                self._counts.found_nbytes += stored.nbytes
            self._moved(0)
            await together([self._feed(), *(self._work() for _ in range(self._plan.concurrency))])
        finally:
            await self._target.settled(LIMIT)
            await self._target.close()
            await self._source.close()
            self._threads.close()

    # What is copied

    async def _choose(self) -> None:
        plan = self._plan
        if isinstance(self._source.backend, Describes):
            self._manifests = await self._source.bounded("listing models", self._source.backend.manifests())
        if plan.space is None and plan.model is None:
            return
        stored = {each.key.space async for each in self._listed()} - {SPACE}
        known = {space: _namespace(self._manifests.get(space, b"")) for space in stored}
        if plan.model is not None:
            self._wanted = {space for space, each in known.items() if each and each.model_name == plan.model}
            names = sorted({each.model_name for each in known.values() if each})
        else:
            assert plan.space is not None
            digits = plan.space.lower()
            self._wanted = {
                space
                for space, each in known.items()
                if digits and (space.hex().startswith(digits) or (each and each.content.hex().startswith(digits)))
            }
            names = sorted({(each.content if each else space).hex()[:16] for space, each in known.items()})
        if not self._wanted:
            what = f"model {plan.model!r}" if plan.model is not None else f"space {plan.space!r}"
            raise LMCacheError(f"{plan.source.name} has no {what}; it has: {', '.join(names) or 'none'}")

    async def _listed(self) -> AsyncIterator[_Found]:
        """All that the source holds, least recently used first if it knows."""
        backend = self._source.backend
        if isinstance(backend, Scannable):
            async for scanned in backend.scan():
                for stored in scanned:
                    yield _Found(stored.key, stored.nbytes, stored)
        else:
            async for batch in self._source.listing():
                for key, nbytes in batch:
                    yield _Found(key, nbytes)

    async def _chosen(self) -> AsyncIterator[_Found]:
        async for found in self._listed():
            space = found.key.space
            if space != SPACE and (self._wanted is None or space in self._wanted):
                yield found

    async def _feed(self) -> None:
        """Hand out what the target does not have, least recently used first, as a tier wants to be filled."""
        batch: list[_Found] = []
        async for found in self._chosen():
            batch.append(found)
            if len(batch) == _ASKED:
                await self._ask(batch)
                batch = []
        if batch:
            await self._ask(batch)
        for _ in range(self._plan.concurrency):
            await self._queue.put(None)

    async def _ask(self, batch: Sequence[_Found]) -> None:
        keys = [found.key for found in batch]
        held = [False] * len(keys) if self._target_is_absent else await self._target.contains(keys)
        for found, there in zip(batch, held, strict=True):
            if there:
                self._counts.there += 1
                self._moved(found.nbytes)
            else:
                await self._queue.put(found)

    # Copying

    async def _work(self) -> None:
        memory = buffer(frame.ALIGN)
        while (found := await self._queue.get()) is not None:
            if not self._plan.dry:
                if found.nbytes > MOST_BYTES:
                    self._counts.damaged += 1
                    self._moved(found.nbytes)
                    continue
                if len(memory) < found.nbytes:
                    memory = buffer(found.nbytes)
                if not await self._copy(found, memory[: found.nbytes]):
                    self._moved(found.nbytes)
                    continue
            self._counts.copied += 1
            self._counts.copied_nbytes += found.nbytes
            self._moved(found.nbytes)

    async def _copy(self, found: _Found, memory: memoryview) -> bool:
        """Whether it is on the target now."""
        await self._pace.wait(found.nbytes)
        (read,) = await self._source.read([found.key], [memory])
        if read is ReadResult.MISS:
            self._counts.gone += 1
            return False
        stored = found.stored or _as_stored(found, memory)
        if read is not ReadResult.HIT or stored is None or await self._threads.finish(_is_damaged, stored, memory):
            self._counts.damaged += 1
            return False
        await self._describe(stored.key.space)
        chunk = Chunk(stored.key, memory.toreadonly(), stored.pages, stored.parent)
        (result,) = await self._target.write([chunk])
        if result is WriteResult.FULL:
            raise BackendError(f"{self._plan.target.name} is full")
        return True

    async def _describe(self, space: bytes) -> None:
        """Let people know there too what it is of."""
        manifest = self._manifests.get(space)
        if manifest and space not in self._described and isinstance(self._target.backend, Describes):
            self._described.add(space)
            await self._target.bounded("describing", self._target.backend.describe(space, manifest))


def _nobody(nbytes: int) -> None:
    """Told how much is done."""


def _is_absent(tier: TierConfig) -> bool:
    """Whether opening a tier would make it, which a dry run must not."""
    return can_be_inspected(tier.backend) and not all(Path(path).is_dir() for path in tier.options.paths())


def _namespace(manifest: bytes) -> Namespace | None:
    try:
        return Namespace.from_manifest(manifest)
    except LayoutError:
        return None


def _as_stored(found: _Found, memory: memoryview) -> Stored | None:
    """What a frame says of itself; None if that is not what it is stored as."""
    try:
        header = frame.read_header(memory)
    except FrameError:
        return None
    if header.space != found.key.space or header.pages[-1] != found.key.page:
        return None
    return Stored(found.key, header.pages, found.nbytes, header.parent)


def _is_damaged(stored: Stored, memory: memoryview) -> bool:
    return damage(stored, memory) is not None


class _Pace:
    """Keeps to so many bytes a second."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._next = 0.0

    async def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._next)
        self._next = start + nbytes / self._rate
        await asyncio.sleep(start - now)
