"""What a person sees of the demonstration: progress, a table, the answers, a picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lmcache_core.demo.result import WORDS, DemoResult, Measured

if TYPE_CHECKING:
    from lmcache_core.demo.options import DemoOptions

__all__ = ["Display", "draw"]


class Display:
    """Progress on standard error, results on standard output."""

    def __init__(self, width: int | None = None) -> None:
        self._err = Console(stderr=True)
        self._out = Console(width=width or (None if sys.stdout.isatty() else 120))
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._step = ""
        self._began = time.monotonic()

    def begin(self, options: DemoOptions) -> None:
        """Say what is going to happen."""
        self._err.print(
            "SmolLM2-135M-Instruct in float32 on this machine's CPU reads a handbook and answers questions about it: "
            f"{options.tokens} tokens each, first without cache, then with it, then again in a new process."
            + ("" if options.document_tokens else " On two free cores that takes three to four minutes."),
            highlight=False,
        )

    @contextmanager
    def life(self, number: int) -> Iterator[None]:
        """Show the progress of a worker."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._err, disable=not self._err.is_terminal) as progress:
            self._progress, self._task, self._step = progress, None, ""
            self.step("start a process" if number == 1 else "start another process", 0.0)
            yield
            self._finish()
            self._progress = None

    def step(self, step: str, done: float) -> None:
        """Show what a worker does now and how much of it is done, from 0 to 1."""
        if self._progress is None:
            return
        if step != self._step:
            self._finish()
            self._step = step
            self._task = self._progress.add_task(step, total=1.0)
            if not self._err.is_terminal:
                self._err.print(f"- {time.monotonic() - self._began:3.0f} s: {step}", highlight=False)
        assert self._task is not None
        self._progress.update(self._task, completed=done)

    def _finish(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=1.0)
            self._progress.stop_task(self._task)

    def report(self, result: DemoResult) -> None:
        """Print what was found."""
        out = self._out
        out.print(_table(result))
        if busiest := result.busiest:
            out.print(
                Text(
                    f"This machine is busy: samples of the same thing ({result.words(busiest.kind)}) differ by "
                    f"{busiest.spread:.0%}. Times and factors are rough; for better ones run it on a quiet machine.\n",
                    style="bold yellow",
                )
            )
        for number, (name, answer) in enumerate(result.answers.items()):
            question = name if number < len(result.answers) - 1 else "(next turn)"
            out.print(Text(f"{question} ", style="bold"), Text(answer.text or "(no words)"), sep="")
        out.print(
            Text(
                "\nThe answers are those of a small model in 4 bits. What counts is that caching changes none of them:"
            )
        )
        verdict = "all tokens equal" if result.tokens_equal else "SOME TOKENS DIFFER"
        out.print(
            Text(
                f"{verdict}; largest difference in a logit of the first new token {result.max_logit_diff:.2g}.",
                style="bold green" if result.tokens_equal else "bold red",
            )
        )
        page_cache = "past the page cache" if result.past_page_cache else "maybe from the page cache"
        kept = f"on disk, read {page_cache}" if result.tier == "disk" else f"on {result.tier}, a server on this host"
        out.print(
            Text(
                f"{result.threads} threads; {result.disk_bytes / 2**20:.0f} MiB of KV {kept}; "
                "times are medians, from the call to the first new token, hashing, lookup and loading included. "
                "From cache, computed: tokens of the prompt. Spread: from the least to the most, as a part of the "
                "median. Logits: the largest difference in one of the first new token."
            )
        )
        filling = result.of("filling")[0]
        out.print(
            Text(
                f"The first time with cache, the cache itself took {filling.retrieve_s * 1e3:.0f} ms before the first "
                f"token, and {filling.store_s * 1e3:.0f} ms after the last to store the KV."
            )
        )
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        out.print(Text(f"All of it took {minutes} min {seconds} s."))
        if result.files:
            out.print(Text("\nWritten:", style="bold"))
        for path in result.files:
            out.print(Text(f"  {path}"), soft_wrap=True)


def _table(result: DemoResult) -> Table:
    title = f"Time to the first token (from {result.tier}: after a restart, in a new process)"
    # 80 columns are enough for the largest figures: nothing wraps or is cut.
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=0, title_justify="left")
    table.add_column("how", no_wrap=True)
    for name in ("from cache", "computed", "time", "spread", "faster", "logits"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in result.measured:
        if each.kind in WORDS:
            table.add_row(*_row(each, result))
    return table


def _row(each: Measured, result: DemoResult) -> list[str]:
    return [
        result.words(each.kind) + ("" if each.tokens_equal else "\nTOKENS DIFFER"),
        "\n".join(f"{tokens} {tier}" for tier, tokens in each.tiers.items()) or "-",
        str(each.computed_tokens),
        f"{each.median_s:.3f} s",
        f"{each.spread:.0%}" if len(each.ttft_s) > 1 else "-",
        _faster(each, result),
        f"{each.max_logit_diff:.1e}",
    ]


def _faster(each: Measured, result: DemoResult) -> str:
    """How many times faster than without cache, where that is more than noise."""
    if each.kind == "cold":
        return ""
    if each.kind == "filling" and result.filling_is_noise:
        return "noise"
    return f"{result.of('cold')[0].median_s / each.median_s:.1f}x"


def draw(result: DemoResult, path: Path) -> None:
    """Draw the times to the first token as bars to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and seldom asked for
    from matplotlib.figure import Figure

    shown = [result.of(kind)[0] for kind in WORDS if kind != "filling" and result.of(kind)]
    cold = shown[0].median_s
    figure = Figure(figsize=(9.5, 0.55 * len(shown) + 1.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.barh(
        [
            f"{result.words(each.kind)}\n{each.computed_tokens} of {each.prompt_tokens} tokens computed"
            for each in shown
        ],
        [each.median_s for each in shown],
        xerr=[
            [each.median_s - min(each.ttft_s) for each in shown],
            [max(each.ttft_s) - each.median_s for each in shown],
        ],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#555555"},
        color=["#b0413e" if each.kind == "cold" else "#2a6f97" for each in shown],
    )
    labels = [f" {each.median_s:.2f} s  ({cold / each.median_s:.0f}x faster)" for each in shown]
    axes.bar_label(bars, [f" {cold:.2f} s", *labels[1:]], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(each.ttft_s) for each in shown) * 1.25)
    axes.set_xlabel(
        "seconds from the call to the first new token (lower is better): median, and from the least to the most"
    )
    tier = f"from {result.tier}: after a restart, in a new process"
    title = f"SmolLM2-135M-Instruct, float32, {result.threads} CPU threads; {tier}"
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
