"""Printing: tables for people (boxes on terminals, plain columns elsewhere), JSON for programs, errors on one line."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

__all__ = [
    "Column",
    "Page",
    "accept_any_text",
    "add_json_option",
    "age",
    "byte_progress",
    "is_terminal",
    "print_error",
    "print_json",
    "print_note",
    "print_table",
    "visible",
]

_PROSE = 24
"""Characters: cells of fewer are not wrapped, others not to less."""


class Column(NamedTuple):
    """One column of a table."""

    header: str
    right: bool = False
    """Align to the right, as numbers are."""


def add_json_option(parser: Any) -> None:
    """Add `--json` to a parser."""
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def accept_any_text(*streams: TextIO) -> None:
    """Print what an encoding lacks as an escape instead of failing on it: paths may be of any bytes."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    """`text` on one line, with everything that a terminal would obey as an escape. What lies on a disk or stands in a
    file is somebody else's text."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it."""
    return stream.isatty()


def print_json(value: object) -> None:
    """Print a value for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_error(text: str) -> None:
    """Say on standard error, in one line, what went wrong."""
    print(f"lmcache-core: error: {visible('; '.join(text.splitlines()))}", file=sys.stderr)


def print_note(text: str) -> None:
    """Say something beside the result, on standard error."""
    print(visible(text), file=sys.stderr)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows for people; each cell is any text."""
    cells = _visible_cells(rows)
    if is_terminal(sys.stdout):
        from rich.console import Console  # only terminals need it

        console = Console(file=sys.stdout)
        console.print(_boxed(columns, cells, console.width))
        return
    for line in _aligned(columns, [[column.header for column in columns], *cells]):
        print(line)


def _visible_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[visible(cell) for cell in row] for row in rows]


class Page(NamedTuple):
    """What is shown at a time: lines of text, and tables below them."""

    lines: Sequence[str]
    tables: Sequence[tuple[Sequence[Column], Sequence[Sequence[str]]]] = ()

    def print(self) -> None:
        """Print it once."""
        for line in self.lines:
            print(visible(line))
        for columns, rows in self.tables:
            print()
            print_table(columns, rows)

    def drawn(self, width: int) -> RenderableType:
        """What a terminal of that width shows."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(visible(line)) for line in self.lines]
        for columns, rows in self.tables:
            parts += ["", _boxed(columns, _visible_cells(rows), width)]
        return Group(*parts)

    def fitted(self, console: Console) -> RenderableType:
        """What that terminal shows at a time."""
        return _cut(console, self.drawn(console.width))


def _cut(console: Console, whole: RenderableType) -> RenderableType:
    """As many of its lines as the terminal has, the last of which says how many more there are."""
    from rich.console import Group
    from rich.segment import Segment, Segments
    from rich.text import Text

    lines = console.render_lines(whole, pad=False)
    if len(lines) <= console.height:
        return whole
    left = len(lines) - console.height + 1
    shown = [[*line, Segment.line()] for line in lines[: console.height - 1]]
    more = Text(f"... {left} more lines; a higher terminal shows them", no_wrap=True, overflow="ellipsis")
    return Group(Segments([segment for line in shown for segment in line]), more)


def _aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[number]) for row in rows) for number in range(len(columns))]
    lines = []
    for row in rows:
        texts = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(texts).rstrip())
    return lines


def _boxed(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> RenderableType:
    from rich import box  # only terminals need it
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    words = [max(map(len, column.header.split())) for column in columns]
    cells = [max([cell_len(row[number]) for row in rows], default=0) for number in range(len(columns))]
    least = [max(word, min(cell, _PROSE)) for word, cell in zip(words, cells, strict=True)]
    gaps = 3 * (len(columns) - 1)
    if rows and sum(least) + gaps > width:
        return _blocks(columns, rows)
    whole = [max(cell_len(column.header), cell) for column, cell in zip(columns, cells, strict=True)]
    tight = sum(whole) + gaps > width
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, header_style="bold")
    for column, narrow, cell in zip(columns, least, cells, strict=True):
        table.add_column(
            column.header,
            justify="right" if column.right else "left",
            overflow="fold",
            min_width=narrow,
            max_width=narrow if tight and cell <= _PROSE else None,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _blocks(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> RenderableType:
    """Each row as lines of its own, for terminals that are too narrow for the table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    blocks: list[RenderableType] = []
    for row in rows:
        if blocks:
            blocks.append("")
        block = Table.grid(padding=(0, 2))
        block.add_column(style="bold", no_wrap=True)
        block.add_column(overflow="fold")
        for column, cell in zip(columns, row, strict=True):
            block.add_row(column.header, Text(cell))
        blocks.append(block)
    return Group(*blocks)


def byte_progress() -> Progress:
    """A progress bar for bytes, on standard error; it draws nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()]
    hidden = not is_terminal(sys.stderr)
    return Progress(*columns, console=Console(file=sys.stderr), disable=hidden, transient=True)


def age(then: float | None) -> str:
    """How long ago a moment was, roughly: `42s`, `17m`, `5h`, `12d`."""
    if then is None:
        return "-"
    seconds = max(0.0, time.time() - then)
    for unit, size, below in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
