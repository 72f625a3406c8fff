"""`lmcache-core plan`: from which length on loading a prefix pays, and which chunks use a link well."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lmcache_core.cli.output import Column, add_json_option, print_json, print_note, print_table, visible
from lmcache_core.errors import ConfigError, UsageError
from lmcache_core.planning.forms import Engine, Link, Shape
from lmcache_core.planning.measured import Measured, read_measured
from lmcache_core.planning.plan import NamedLink, Plan, Row
from lmcache_core.planning.plot import FORMATS, check_matplotlib, draw, pays
from lmcache_core.planning.quantities import format_bandwidth, parse_bandwidth, parse_flops, parse_number
from lmcache_core.planning.shape import DTYPES, read_config, shape_of
from lmcache_core.units import format_size, parse_duration

_T = TypeVar("_T")

_LENGTHS = "1024,2048,4096,8192,16384,32768,65536,131072"
_MOST = 24
"""Links, or lengths."""
_FAR_OFF = 0.25
_LONGEST = 10**9
"""Tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package."""
    parser.add_argument("--model", metavar="PATH", required=True, help="a model's config.json, or the folder with it")
    parser.add_argument("--bandwidth", metavar="RATES", help="of links to load over, as in 64Gbps,8GB/s")
    parser.add_argument("--latency", metavar="TIME", default="0", help="of each chunk over them (default: %(default)s)")
    parser.add_argument(
        "--measured", metavar="FILE", help="also load from the tiers that bench tier --json has measured into FILE"
    )
    parser.add_argument(
        "--flops", metavar="RATE", required=True, help="peak of the engine's processors together, as in 990T"
    )
    parser.add_argument(
        "--mfu", metavar="PART", default="0.5", help="what of it a prefill reaches (default: %(default)s)"
    )
    parser.add_argument(
        "--parameters",
        metavar="NUMBER",
        help="weights that each token is multiplied with, as in 8.03B; by default worked out from the model's settings",
    )
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", choices=list(DTYPES), help="of the KV, as in fp8; by default that of the weights"
    )
    parser.add_argument(
        "--chunk-tokens", metavar="NUMBER", default="256", help="tokens of a chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths", metavar="NUMBERS", default=_LENGTHS, help="lengths of prefixes in tokens (default: %(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw it to FILE, a png, svg or pdf")
    add_json_option(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Plan."""
    options = _Options(arguments)
    engine, links, chunk_tokens = options.engine(), options.links(), options.chunk_tokens()
    lengths, parameters, plot = options.lengths(), options.parameters(), options.plot()
    if plot is not None:
        check_matplotlib()
    file = Path(arguments.model)
    settings = read_config(file)
    try:
        shape = shape_of(settings, parameters, arguments.kv_dtype)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if arguments.measured is not None:
        tiers = read_measured(Path(arguments.measured), shape.kv_bytes(chunk_tokens))
        links += [NamedLink(f"tier {each.tier}", each.link, each.concurrency) for each in tiers]
        for each in tiers:
            _doubt(each)
    options.distinct([each.name for each in links])
    plan = Plan(shape, engine, links, chunk_tokens, lengths)
    if arguments.json:
        print_json(plan.as_json())
    else:
        _print(plan)
    if plot is not None:
        draw(plan, f"{_described(shape)}; {_computing(engine)}", plot)
        print_note(f"drawn to {plot}")
    return 0


def _doubt(measured: Measured) -> None:
    """Say how far a line through measurements is to be trusted, where that is not far."""
    if measured.sizes == 1:
        print_note(
            f"tier {measured.tier}: measured with one size of chunks, which tells no latency; measure two or more"
        )
    elif measured.off > _FAR_OFF:
        print_note(
            f"tier {measured.tier}: its latency and bandwidth are up to {measured.off:.0%} off what was measured"
        )


class _Options:
    """The command line, read. What is wrong with it ends the command with exit code 2."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._given = arguments
        self._refuse: Callable[[str], Any] = arguments.usage_error

    def engine(self) -> Engine:
        peak = self._read("--flops", parse_flops, self._given.flops)
        return self._read("--mfu", lambda text: Engine(peak, float(text)), self._given.mfu)

    def links(self) -> list[NamedLink]:
        latency = self._read("--latency", parse_duration, self._given.latency)
        if self._given.bandwidth is None:
            if self._given.measured is None:
                self._refuse("say over what to load: --bandwidth, --measured or both")
            return []
        rates = self._several("--bandwidth", parse_bandwidth, self._given.bandwidth)
        names = [each.strip() for each in self._given.bandwidth.split(",")]
        return [NamedLink(name, Link(rate, latency)) for name, rate in zip(names, rates, strict=True)]

    def chunk_tokens(self) -> int:
        return self._read("--chunk-tokens", _tokens, self._given.chunk_tokens)

    def lengths(self) -> list[int]:
        return sorted(set(self._several("--lengths", _tokens, self._given.lengths)))

    def parameters(self) -> float | None:
        given = self._given.parameters
        return None if given is None else self._read("--parameters", parse_number, given)

    def plot(self) -> Path | None:
        if self._given.plot is None:
            return None
        path = Path(self._given.plot)
        if path.suffix.lower() not in FORMATS:
            self._refuse(f"--plot: the name of the file must end in one of {', '.join(FORMATS)}")
        return path

    def distinct(self, names: list[str]) -> None:
        """Refuse two links of one name."""
        if len(names) > _MOST:
            self._refuse(f"there are {len(names)} links; at most {_MOST} can be shown")
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            self._refuse(f"--bandwidth: {twice[0]} is there twice")

    def _several(self, option: str, parse: Callable[[str], _T], text: str) -> list[_T]:
        parts = text.split(",")
        if len(parts) > _MOST:
            self._refuse(f"{option}: there are {len(parts)}; at most {_MOST} can be shown")
        return [self._read(option, parse, part.strip()) for part in parts]

    def _read(self, option: str, parse: Callable[[str], _T], text: str) -> _T:
        try:
            return parse(text)
        except (ConfigError, UsageError) as error:
            self._refuse(f"{option}: {error}")
        except ValueError:
            self._refuse(f"{option}: {text[:64]!r} is no number")
        raise AssertionError("an error of the command line ends it")


def _tokens(text: str) -> int:
    number = parse_number(text)
    if number != int(number) or number > _LONGEST:
        raise ConfigError(f"{text!r} is no number of tokens; write whole ones, at most {_LONGEST:,}")
    return int(number)


def _print(plan: Plan) -> None:
    chunk = f"{_size(plan.chunk_bytes)} a chunk of {plan.chunk_tokens:,} tokens"
    for name, text in (
        ("model", _described(plan.shape)),
        ("KV", f"{_size(plan.shape.kv_bytes_per_token)} a token, {chunk}"),
        ("prefill", _computing(plan.engine)),
    ):
        print(f"{name:<8} {visible(text)}")
    print()
    columns = [Column("link"), *(Column(name, right=True) for name in ("bandwidth", "latency", "a chunk reaches"))]
    columns += [Column(name, right=True) for name in ("90% from", "95% from")]
    found = plan.crossovers()
    rows = [[*_link_cells(plan, each), pays(where)] for each, where in zip(plan.links, found, strict=True)]
    print_table([*columns, Column("loading")], rows)
    print()
    columns = [Column("tokens", right=True), Column("computed", right=True)]
    columns += [Column(each.name, right=True) for each in plan.links]
    print_table(columns, [_row_cells(row) for row in plan.rows()])


def _described(shape: Shape) -> str:
    kinds = [
        f"{each.count} layers with {'full attention' if each.window is None else f'a window of {each.window:,} tokens'}"
        for each in shape.layers
    ]
    return f"{', '.join(kinds)}; {_count(shape.parameters)} weights a token"


def _computing(engine: Engine) -> str:
    return f"{_count(engine.peak * engine.mfu)}FLOP/s: {engine.mfu:g} of {_count(engine.peak)}FLOP/s"


def _link_cells(plan: Plan, each: NamedLink) -> list[str]:
    name = each.name if each.concurrency is None else f"{each.name}, {each.concurrency} at once"
    sizes = [_chunk_for(plan, each.link.size_for(share)) for share in (0.9, 0.95)]
    share = f"{each.link.share(plan.chunk_bytes):.1%}"
    return [name, format_bandwidth(each.link.bandwidth), _time(each.link.latency), share, *sizes]


def _chunk_for(plan: Plan, nbytes: float) -> str:
    """A size of chunks, and how many tokens have it."""
    tokens = math.ceil(nbytes / plan.shape.kv_bytes_per_token)
    return f"{_size(math.ceil(nbytes / 1024) * 1024)} ({tokens:,} tokens)" if nbytes >= 1 else "any"


def _row_cells(row: Row) -> list[str]:
    loads = [f"{_time(seconds)} ({_times(row.compute_s / seconds)})" for seconds in row.load_s]
    return [f"{row.tokens:,}", _time(row.compute_s), *loads]


def _times(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 9.995 else f"{factor:,.0f}x"


def _size(nbytes: float) -> str:
    return format_size(round(nbytes))


def _time(seconds: float) -> str:
    """Three digits, and a unit in which they are easily read."""
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:
            value = seconds / factor
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _count(number: float) -> str:
    """Three digits and a prefix: `6.98 G`."""
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
