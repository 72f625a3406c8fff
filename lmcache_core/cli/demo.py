"""`lmcache-core demo`: hands over to `lmcache_core.demo`, which needs packages that few have installed."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from lmcache_core.cli.ending import terminable
from lmcache_core.errors import PluginError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the package.

    Raises:
        PluginError: What the demo needs isn't installed.
    """
    _demo("add_arguments")(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Raises:
        PluginError: What the demo needs isn't installed.
    """
    try:
        with terminable():
            return int(_demo("run_demo")(arguments))  # the result knows its exit code
    except ImportError as error:
        raise _lacking(error) from error


def _demo(name: str) -> Any:
    try:
        module = importlib.import_module("lmcache_core.demo")
    except ImportError as error:
        raise _lacking(error) from error
    return getattr(module, name)


def _lacking(error: ImportError) -> PluginError:
    what = f"the module {error.name!r}" if error.name else str(error)
    return PluginError(f"the demo lacks {what}; install it with: pip install 'lmcache-core[demo]'")
