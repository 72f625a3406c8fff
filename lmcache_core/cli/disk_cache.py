"""A cache on disk as commands see it: looked at through the disk backend, which is found by name like any plugin."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeVar, cast

from lmcache_core.errors import BackendError, LayoutError
from lmcache_core.namespace import Namespace
from lmcache_core.plugins import BACKENDS, load_backend
from lmcache_core.protocols import Stored

__all__ = [
    "Entry",
    "Inspected",
    "Named",
    "Shard",
    "Space",
    "can_be_inspected",
    "look",
    "namespace_of",
    "namespaces",
    "the_one_named",
]


class Entry(Protocol):
    """A stored chunk and where it lies."""

    @property
    def stored(self) -> Stored:
        """What it is."""
        ...

    @property
    def used(self) -> float:
        """When it was last stored or used: seconds since 1970."""
        ...

    @property
    def file(self) -> Path:
        """Where its frame lies."""
        ...

    @property
    def offset(self) -> int:
        """Where its frame starts."""
        ...


class Shard(Protocol):
    """What one owner has, or had."""

    name: str
    owner: str
    locked: bool | None
    nbytes: int
    damaged: int
    lost: int
    entries: Sequence[Entry]
    readable: bool


class Inspected(Protocol):
    """A path at one moment."""

    shards: Sequence[Shard]
    manifests: Mapping[bytes, bytes]

    def entries(self) -> Iterator[Entry]:
        """Of all shards."""
        ...


def can_be_inspected(backend: str) -> bool:
    """Whether a backend's chunks lie where `look` can find them."""
    return backend == "disk"


def look(path: Path) -> Inspected:
    """What lies below the path of a disk tier. Takes no lock and changes nothing.

    Raises:
        BackendError: It cannot be read.
        PluginError: The disk backend isn't installed.
    """
    if not path.is_dir():
        raise BackendError(f"{path} is no directory; name the `path` of a disk tier")
    load_backend("disk")  # says what is wrong if it cannot be used
    entry = next(iter(entry_points(group=BACKENDS, name="disk")))
    inspection = importlib.import_module(f"{entry.module}.inspection")
    return cast("Inspected", inspection.inspect_path(path))


@dataclass
class Space:
    """Chunks of one namespace: of all its groups if its manifest is there, else of one group."""

    namespace: Namespace | None
    digests: list[bytes]
    """What its chunks are stored under, one for each group."""
    chunks: int = 0
    nbytes: int = 0
    used: list[float] = field(default_factory=list)
    """The first and the last use of a chunk."""

    @property
    def id(self) -> str:
        """Hex digits that name it."""
        return self.digests[0].hex() if self.namespace is None else self.namespace.content.hex()

    def add(self, entry: Entry) -> None:
        """Count a chunk."""
        self.chunks += 1
        self.nbytes += entry.stored.nbytes
        first, last = self.used or (entry.used, entry.used)
        self.used = [min(first, entry.used), max(last, entry.used)]


def namespaces(seen: Iterable[Inspected]) -> list[Space]:
    """The namespaces of which chunks are stored, the largest first."""
    by_digest: dict[bytes, Space] = {}
    seen = list(seen)
    for inspected in seen:  # all manifests first: a tier of several paths has them on the first
        for digest, manifest in inspected.manifests.items():
            if digest not in by_digest and (namespace := namespace_of(digest, manifest)) is not None:
                digests = [namespace.space(number) for number in range(len(namespace.groups))]
                by_digest |= dict.fromkeys(digests, Space(namespace, digests))
    for inspected in seen:
        for entry in inspected.entries():
            digest = entry.stored.key.space
            space = by_digest.get(digest)
            if space is None:
                space = by_digest[digest] = Space(None, [digest])
            space.add(entry)
    found = {id(space): space for space in by_digest.values() if space.chunks}
    return sorted(found.values(), key=lambda space: (-space.nbytes, space.id))


def namespace_of(digest: bytes, manifest: bytes) -> Namespace | None:
    """What a manifest says that lies under the digest of a space; None if it is of another one."""
    try:
        namespace = Namespace.from_manifest(manifest)
    except LayoutError:
        return None  # its chunks are shown under their bare digest
    return namespace if digest in (namespace.space(number) for number in range(len(namespace.groups))) else None


class Named(Protocol):
    """A namespace that can be named."""

    @property
    def id(self) -> str:
        """Hex digits that name it."""
        ...

    @property
    def digests(self) -> Sequence[bytes]:
        """What its chunks are stored under."""
        ...

    @property
    def namespace(self) -> Namespace | None:
        """What is known of it."""
        ...


N = TypeVar("N", bound=Named)


def the_one_named(name: str, found: Sequence[N]) -> N | None:
    """The namespace of the model `name`, or whose digest of content, or of a group, starts with it; None if there is
    none.

    Raises:
        LayoutError: There are several, or the name is empty.
    """
    if not name:
        raise LayoutError("an empty text names no namespace; write a model's name or the first digits of a digest")
    matching = [space for space in found if space.namespace is not None and space.namespace.model_name == name]
    wanted = name.lower()
    matching = matching or [
        space
        for space in found
        if space.id.startswith(wanted) or any(digest.hex().startswith(wanted) for digest in space.digests)
    ]
    if len(matching) > 1:
        ids = [space.id[:16] for space in matching]
        if len(set(ids)) == len(ids):
            names = ", ".join(ids)
        else:  # alike but for their encoding: what their chunks are stored under differs
            names = ", ".join(space.digests[0].hex()[:16] for space in matching)
        raise LayoutError(f"{name!r} stands for {len(matching)} namespaces; write more digits of one of {names}")
    return matching[0] if matching else None
