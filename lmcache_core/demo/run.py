"""Runs the demonstration: two workers one after another, and a report."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lmcache_core.demo.options import DemoOptions
from lmcache_core.demo.packages import check_packages
from lmcache_core.demo.report import Display, draw
from lmcache_core.demo.result import DemoResult, Life, Spec
from lmcache_core.demo.servers import check_tier, served
from lmcache_core.demo.settings import settings
from lmcache_core.errors import LMCacheError, PluginError

__all__ = ["run_demo"]


def run_demo(options: DemoOptions | argparse.Namespace) -> DemoResult:
    """Measure, print a table, and write the files that were asked for.

    Raises:
        PluginError: A package that it needs isn't installed.
        OSError: A file can't be written where it should be. Found out before anything is measured.
        LMCacheError: A worker failed; the message has its last words.
    """
    if isinstance(options, argparse.Namespace):
        options = DemoOptions.of(options)
    options = options.resolved()
    check_packages(plot=options.plot)
    check_tier(options.tier)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in _files(options):
        _check_file(path)
    display = Display()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=options.out))
    try:
        display.begin(options)
        with (
            served(options.tier, folder) as tier,
            _node(folder, tier) if options.shared else contextlib.nullcontext("") as socket,
        ):
            lives = [_live(number, folder, options, display, tier, socket) for number in (1, 2)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = _joined(lives, options)
    _write_files(result, options)
    display.report(result)
    return result


def _joined(lives: list[Life], options: DemoOptions) -> DemoResult:
    return DemoResult(
        measured=tuple(each for life in lives for each in life.measured),
        answers=lives[0].answers,
        threads=lives[0].threads,
        disk_bytes=lives[0].disk_bytes,
        tier=options.tier,
        past_page_cache=all(life.past_page_cache for life in lives),
        files=_files(options),
    )


def _files(options: DemoOptions) -> tuple[Path, ...]:
    return (options.figures, *([options.picture] if options.picture else []))


def _check_file(path: Path) -> None:
    """Minutes of measuring must not end with a file that can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _write_files(result: DemoResult, options: DemoOptions) -> None:
    options.figures.write_text(json.dumps(result.figures(), indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(result, options.picture)


@contextlib.contextmanager
def _node(folder: Path, tier: dict[str, Any]) -> Iterator[str]:
    """A node in a process of its own, as long as both workers live; yields where its socket is."""
    # Paths of sockets are short, and this folder's may be long.
    with tempfile.TemporaryDirectory(prefix="lmcache-demo-") as place, (folder / "node.log").open("wb") as log:
        config = Path(place) / "tiers.yaml"
        config.touch(mode=0o600)  # the tier's settings have a secret
        config.write_text(json.dumps(settings(tier)))
        socket = str(Path(place) / "node.sock")
        command = [sys.executable, "-m", "lmcache_core", "serve", "--config", str(config), "--socket", socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment()) as process:
            try:
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise _failure((folder / "node.log").read_text(errors="replace"), process.wait())
                yield socket
            finally:
                process.terminate()


def _live(number: int, folder: Path, options: DemoOptions, display: Display, tier: dict[str, Any], socket: str) -> Life:
    """One worker from its start to its end."""
    spec = Spec(str(folder), number, options.tokens, options.repeats, options.document_tokens, tier, socket)
    path = folder / f"spec-{number}.json"
    path.touch(mode=0o600)  # the tier's settings may have a secret
    path.write_bytes(msgspec.json.encode(spec))
    words = folder / f"worker-{number}.log"
    result: Life | None = None
    with (
        words.open("wb") as log,
        display.life(number),
        subprocess.Popen(_command(path), stdout=subprocess.PIPE, stderr=log, env=_environment()) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "result" in message:
                    result = msgspec.convert(message["result"], Life)
                else:
                    display.step(message["step"], message["done"])
        except BaseException:  # the user has had enough, for one; the worker must not stay behind
            process.kill()
            raise
    code = process.returncode
    if result is None or code:
        raise _failure(words.read_text(errors="replace"), code)
    return result


def _command(spec: Path) -> list[str]:
    return [sys.executable, "-m", "lmcache_core.demo.worker", str(spec)]


def _environment() -> dict[str, str]:
    """The worker's environment. Settings of the user's own cache are not meant for it.

    The switch lets attention with a mask read grouped KV heads as they are. Without it transformers copies them for
    each head of the group, which takes as long as all the rest where few tokens meet a long cache. It makes no
    difference to attention without a mask, as in a cold prefill.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_")}
    return {**kept, "TRANSFORMERS_SDPA_FORCE_GQA": "1"}


def _failure(words: str, code: int) -> LMCacheError:
    last = [line for line in words.splitlines() if line.strip()][-1:] or [f"exit code {code}"]
    error, _, said = last[0].partition(": ")
    if error.endswith("PluginError"):
        return PluginError(said)
    if error.endswith(("ModuleNotFoundError", "ImportError")):
        return PluginError(f"the demo lacks a package ({said}); install it with: pip install 'lmcache-core[demo]'")
    return LMCacheError(f"the demo's worker failed: {last[0]}")
