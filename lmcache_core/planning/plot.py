"""A picture of a plan: seconds against tokens, computed and loaded."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from lmcache_core.errors import PluginError
from lmcache_core.planning.plan import Plan

__all__ = ["FORMATS", "check_matplotlib", "draw"]

FORMATS = (".pdf", ".png", ".svg")
_POINTS = 200
_COLOURS = ("#2a6f97", "#e09f3e", "#588157", "#7b2cbf", "#8d6e63", "#c2185b", "#00838f", "#546e7a")


def check_matplotlib() -> None:
    """Make sure that a picture can be drawn.

    Raises:
        PluginError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PluginError("the plot needs matplotlib; install it with: pip install 'lmcache-core[plot]'")


def draw(plan: Plan, title: str, path: Path) -> None:
    """Draw a plan to a file whose name ends in one of `FORMATS`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and seldom asked for
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    first, last = min(plan.lengths), max(plan.lengths)
    if last < 8 * first:  # too little to see a course
        first, last = max(first // 4, 1), last * 4
    rows = [plan.row(tokens) for tokens in _points(plan, first, last)]
    tokens = [row.tokens for row in rows]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(tokens, [row.compute_s for row in rows], color="#b0413e", linewidth=2.5, label="computed")
    for number, (each, found) in enumerate(zip(plan.links, plan.crossovers(), strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        style = ("-", "--", ":")[number // len(_COLOURS) % 3]
        label = f"loaded, {each.name}: {pays(found)}"
        axes.plot(tokens, [row.load_s[number] for row in rows], color=colour, linestyle=style, label=label)
        if found is not None and first <= found <= last:
            axes.plot([found], [plan.engine.seconds(plan.shape, found)], "o", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(first, last)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens of the prefix")
    axes.set_ylabel("seconds (lower is better)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    figure.savefig(path, dpi=150)


def _points(plan: Plan, first: int, last: int) -> list[int]:
    """Lengths to draw: in even steps of the picture, and whole chunks, between which lines have steps."""
    steps = (round(first * (last / first) ** (step / _POINTS)) for step in range(1, _POINTS))
    whole = (math.ceil(tokens / plan.chunk_tokens) * plan.chunk_tokens for tokens in steps)
    return sorted({first, *(tokens for tokens in whole if tokens < last), last})


def pays(crossover: float | None) -> str:
    """From where on loading pays."""
    if crossover is None:
        return "never pays"
    if crossover == 0:
        return "always pays"
    return f"pays beyond {crossover:,.0f} tokens"
