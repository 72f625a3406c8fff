"""What holds for every test: nothing blocks an event loop, and a skip says what is missing."""

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster, BlockBusterFunction, BlockingError
from blockbuster import blockbuster as blockbuster_module

pytest.register_assert_rewrite("lmcache_core.testing")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers side by side have a core each. Threads of torch that wait for each other's cores are far slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

WATCHED = ["lmcache_core", "lmcache_backends", "lmcache_transfer"]
# The suite for backends' authors blocks on purpose: it seeds and reads data past the code under test.
UNWATCHED = ["lmcache_core.testing"] if importlib.util.find_spec("lmcache_core.testing") else []

# What moves KV to and from files, which blockbuster does not know by itself.
FILE_IO = [
    "builtins.open",
    "fcntl.flock",
    "fcntl.lockf",
    "io.open",
    "os.copy_file_range",
    "os.fdatasync",
    "os.fsync",
    "os.ftruncate",
    "os.open",
    "os.posix_fallocate",
    "os.pread",
    "os.preadv",
    "os.pwrite",
    "os.pwritev",
    "os.readv",
    "os.sync",
    "os.truncate",
    "os.writev",
]


def watch_for_blocking_calls() -> BlockBuster:
    watch = BlockBuster(WATCHED, excluded_modules=UNWATCHED)
    for name in FILE_IO:
        watch.functions[name] = BlockBusterFunction(
            None,
            name,
            scanned_modules=WATCHED,
            excluded_modules=UNWATCHED,
            can_block_functions=[("linecache.py", {"updatecache"})],  # tracebacks in log records
        )
    # The index's mutex is held for microseconds, and by design also taken on event loops.
    watch.functions["threading.Lock.acquire"].can_block_in("lmcache_core/node.py", "__enter__")
    return watch


watch = watch_for_blocking_calls()


@pytest.fixture(autouse=True)
def blocking_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail a test in which the product makes a blocking call on a thread that runs an event loop.

    The call raises, but raising is not enough: what a tier raises is a miss to everybody above it. So calls are
    collected too. A test that blocks on purpose clears the list.
    """
    calls: list[str] = []

    class Noted(BlockingError):
        def __init__(self, func: str) -> None:
            super().__init__(func)
            calls.append(func)

    monkeypatch.setattr(blockbuster_module, "BlockingError", Noted)
    watch.activate()
    try:
        yield calls
    finally:
        watch.deactivate()
    if calls:
        pytest.fail(f"blocking calls on an event loop: {', '.join(calls)}", pytrace=False)


ENDING = 10.0
"""Seconds that threads of a closed node or client have to end in: loaded machines take their time."""


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lmcache-")}


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Fail a test that leaves a node or a client open: it would go on, and say things, in the tests that follow."""
    before = our_threads()
    yield
    until = time.monotonic() + ENDING
    while left := our_threads() - before:
        if time.monotonic() > until:
            pytest.fail(f"threads go on: {', '.join(sorted(each.name for each in left))}", pytrace=False)
        for thread in left:
            thread.join(0.1)


def pytest_configure(config: pytest.Config) -> None:
    """Tests press Ctrl-C in processes that they start. A shell has what runs in its background ignore that, and what is
    started there inherits it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # Sockets lie below these folders, and a socket's path is short: `popen-gw1` is longer than it need be.
        folder = Path(config.option.basetemp)
        config.option.basetemp = folder.with_name(folder.name.removeprefix("popen-gw"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.workers import longest_first

        items[:] = longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.workers import ByUnit

    config.option.loadscopereorder = False  # workers have put their tests in order
    return ByUnit(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        pytest.skip("root is missing: this test mounts, or makes devices or namespaces")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and not says_what_is_missing(report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is skipped without saying what is missing"
    return report


def says_what_is_missing(reason: str) -> bool:
    return reason.removeprefix("Skipped:").strip() not in {"", "Skipped", "unconditional skip"}
