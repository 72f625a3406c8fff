"""`lmcache-core status`: what it shows is what the node has, and it follows a node that goes and comes back."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmcache_core import Cache
from lmcache_core.cli.output import Page
from lmcache_core.cli.running import Known
from lmcache_core.cli.status import MOST_ROWS, Hits, Seen, hits, page
from lmcache_core.client import Stats, TierStats
from lmcache_core.service.wire import ClientStats
from tests.cli.conftest import AtWork, Run
from tests.cli.kv import FRAME_BYTES, make_namespace, prompt_of, settings
from tests.node.kv import until
from tests.service.kit import Process, serving

POOL = 4 << 20


def test_status_in_json_is_what_happened(run: Run, node: AtWork) -> None:
    node.fill(prompt_of(1, 3))
    node.fill(prompt_of(1, 1), model="model-b")
    with node.engine() as cache:
        cache.lookup(prompt_of(1, 4))
        cache.lookup(prompt_of(2, 1))
        cache.pin(prompt_of(1, 1))
        held = cache.client.hold(cache._model, cache.prompt(prompt_of(1, 2)).keys)
        client = cache.client
        until(lambda: len(client.clients()) == 1)  # type: ignore[attr-defined]
        shown = run("status", "--socket", node.socket, "--json")
        cache.client.release(held)
    assert (shown.code, shown.err) == (0, "")
    status = shown.json
    assert (status["socket"], status["up"], status["pid"]) == (str(node.socket), True, node.pid)
    assert status["pool"] == {
        "capacity": POOL,
        "usable": POOL,
        "used": 4 * FRAME_BYTES,
        "slots": 4,
        "chunks": 4,
        "staged": 0,
    }
    assert (status["leases"], status["pinned"], status["frozen"]) == (1, 1, False)
    assert status["hits"] == {"lookup_tokens": 80, "hit_tokens": {"cpu": 48}, "ratio": 0.6}
    assert status["interval"] is None
    assert status["tiers"] == [
        {
            "name": "cpu",
            "backend": None,
            "up": True,
            "why": None,
            "used": 4 * FRAME_BYTES,
            "capacity": POOL,
            "chunks": 4,
            "queued": 0,
            "quarantined": 0,
            "read_latency": None,
            "read_bandwidth": None,
        },
        {
            "name": "disk",
            "backend": "disk",
            "up": True,
            "why": None,
            "used": 4 * FRAME_BYTES,
            "capacity": 64 << 20,
            "chunks": 4,
            "queued": 0,
            "quarantined": 0,
            "read_latency": None,
            "read_bandwidth": None,
        },
    ]
    (client_told,) = status["clients"]
    assert {**client_told, "seconds": 0} == {
        "name": "engine",
        "pid": os.getpid(),
        "uid": os.getuid(),
        "tenant": None,
        "shard": 0,
        "leases": 1,
        "stores": 0,
        "seconds": 0,
    }
    owners = {(each["kind"], each["name"], each["idle"]): each["nbytes"] for each in status["owners"]}
    assert owners["model", "model-a", False] == {"cpu": 3 * FRAME_BYTES, "disk": 3 * FRAME_BYTES}
    assert owners["model", "model-b", False] == {"cpu": FRAME_BYTES, "disk": FRAME_BYTES}
    (largest, other) = status["namespaces"]
    namespace = make_namespace("model-a")
    assert largest == {
        "id": namespace.content.hex(),
        "model": "model-a",
        "spaces": [namespace.space(0).hex()],
        "chunks": 3,
        "pages": 12,
        "pinned": 1,
        "leased": 2,
        "nbytes": {"cpu": 3 * FRAME_BYTES, "disk": 3 * FRAME_BYTES},
    }
    assert (other["model"], other["chunks"]) == ("model-b", 1)


def test_status_for_people(run: Run, node: AtWork) -> None:
    node.fill(prompt_of(1, 3))
    with node.engine() as cache:
        cache.lookup(prompt_of(1, 4))
    run("freeze", "--socket", node.socket)
    with node.engine() as cache:
        until(lambda: len(cache.client.clients()) == 1)  # type: ignore[attr-defined]
        shown = run("status", "--socket", node.socket)
    assert (shown.code, shown.err) == (0, "")
    assert [re.sub(r"\d+s$", "0s", line) for line in shown.lines] == [
        f"node     {node.socket} (process {node.pid})",
        "state    frozen: it serves what it has and stores nothing new",
        "pool     396KiB of 4MiB used, all usable",
        "chunks   3 in the pool, 0 being stored, 0 pinned",
        "leases   0",
        "hits     75.0% of 64 tokens looked up (cpu 75.0%)",
        "",
        "tier  state    used  capacity  chunks  queued  quarantined",
        "cpu   up     396KiB      4MiB       3       -            -",
        "disk  up     396KiB     64MiB       3       0           0B",
        "",
        f"client  {'pid'.rjust(len(str(os.getpid())))}  shard  leases  stores  age",
        f"engine  {os.getpid()}      0       0       0   0s",
        "",
        "namespace     model    chunks  stored",
        f"{make_namespace('model-a').content.hex()[:12]}  model-a       3  cpu 396KiB, disk 396KiB",
    ]


def test_tenants_are_shown_where_there_are_any(run: Run, node: AtWork) -> None:
    node.fill(prompt_of(1, 1))
    node.fill(prompt_of(2, 2), tenant="blue")
    with node.engine(tenant="blue") as blue, node.engine():
        until(lambda: len(blue.client.clients()) == 2)  # type: ignore[attr-defined]
        shown = run("status", "--socket", node.socket)
    assert sorted(re.findall(r"^engine .* (\S+)$", shown.out, flags=re.MULTILINE)) == ["-", "blue"]
    assert re.search(r"^blue +tenant +in use +cpu 264KiB, disk 264KiB$", shown.out, flags=re.MULTILINE)
    assert re.search(r"^model-a +model +in use +cpu 132KiB, disk 132KiB$", shown.out, flags=re.MULTILINE)


def test_a_tier_that_is_down_is_a_problem(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.symlink_to(blocked)  # cannot be opened now; somebody may mend it
    path = tmp_path / "s"
    with Cache.open(settings(blocked, socket=str(path)), make_namespace()):
        shown = run("status", "--socket", path)
        assert shown.code == 1
        assert re.search(r"^blocked  down ", shown.out, flags=re.MULTILINE)
        why = f"disk: {blocked}: Too many levels of symbolic links; a symbolic link is in the way"
        assert shown.lines[2].startswith(f"down     blocked: {why}")
        tier = run("status", "--socket", path, "--json").json["tiers"][1]
        assert (tier["up"], tier["why"].startswith(why)) == (False, True)


def test_serve_says_which_tier_is_down_and_why(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.symlink_to(blocked)
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(settings(blocked, tmp_path / "fine", cpu="4MiB")))
    path = tmp_path / "s"
    process = Process("-m", "lmcache_core", "serve", "--config", str(file), "--socket", str(path))
    try:
        line = process.line()
        assert line.startswith(
            f"serving at {path}: 4MiB of host memory, tiers: blocked (down, it is tried again: disk: {blocked}: Too"
        )
        assert line.endswith("), fine")
    finally:
        process.close()


def seen(looked_up: int, found: dict[str, int], pid: int = 1, clients: int = 2, namespaces: int = 2) -> Seen:
    counts = {"lookup_tokens": {"lookup": float(looked_up)}, "hit_tokens": {k: float(v) for k, v in found.items()}}
    tier = TierStats("a-tier-name", "disk", True, 1234 << 30, 5678 << 30, 12_345_678, 1234, 1234 << 20)
    stats = Stats(987 << 30, 900 << 30, 765 << 30, 9, 123_456, 12, 34, 5, 0.0, (tier,), counts)
    told = [
        ClientStats(4_194_304, 0, f"an-engine-with-a-long-name-{n} (4194304)", 7, 1e6, 9, 9) for n in range(clients)
    ]
    known = [
        Known(
            make_namespace(f"an-organisation/A-Model-Of-{n}-Billion-Parameters-Instruct"),
            [bytes(32)],
            9_999_999,
            nbytes={"cpu": 765 << 30, "a-tier-name": 1234 << 30},
        )
        for n in range(namespaces)
    ]
    return Seen(10.0, pid, stats, told, known)


def documented() -> dict[str, list[str]]:
    """Keys that docs/cli.md tells of, by the object that has them."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    _, _, status = text.partition("\n## `lmcache-core status`")
    _, _, table = status.partition("| in JSON | keys |\n")
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", table.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    return {name.strip("`"): re.findall(r"`(\w+)`", keys) for name, keys in rows}


def test_the_keys_of_status_in_json_are_documented(run: Run, process: AtWork) -> None:
    process.fill(prompt_of(1, 1), tenant="team")
    with process.engine():
        status = run("status", "--socket", process.socket, "--json").json
    found = {"the whole": list(status)}
    for key in ("pool", "kept", "hits"):
        found[key] = list(status[key])
    for key in ("tiers", "clients", "owners", "namespaces"):
        found[key] = list(status[key][0])
    told = documented()
    interval = told.pop("interval")
    assert told == found
    assert interval == ["seconds", *found["hits"]]


def on_terminal(height: int) -> list[str]:
    """Lines that a terminal of that height shows of a node."""
    out = io.StringIO()
    console = Console(file=out, width=80, height=height, force_terminal=True, color_system=None)
    console.print(page("/run/node.sock", seen(10, {"cpu": 5}), None).fitted(console))
    return [line.rstrip() for line in out.getvalue().rstrip("\n").split("\n")]


def test_a_small_terminal_says_what_it_does_not_show() -> None:
    whole = on_terminal(200)
    assert len(whole) > 20
    assert on_terminal(len(whole)) == whole
    small = on_terminal(8)
    assert small == [*whole[:7], f"... {len(whole) - 7} more lines; a higher terminal shows them"]


def test_hits_of_an_interval() -> None:
    before, now = seen(1000, {"cpu": 500}), seen(1400, {"cpu": 600, "disk": 100})
    assert hits(now, before) == Hits(400, {"cpu": 100, "disk": 100})
    assert hits(now, before).ratio == 0.5
    assert hits(now) == Hits(1400, {"cpu": 600, "disk": 100})
    assert hits(before, before) == Hits(0, {})
    assert hits(before, before).ratio is None
    for later in (seen(1400, {"cpu": 900}, pid=2), seen(900, {"cpu": 900})):
        assert hits(later, before) == hits(later), "another life: its counters began at 0"


def drawn(page: Page, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as text:
        console.print(page.drawn(width))
    return [line.rstrip() for line in text.get().splitlines()]


def test_large_figures_fit_80_columns_as_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    now = seen(123_456_789, {"cpu": 60_000_000, "a-tier-name": 40_000_000})
    lines = drawn(page("/run/user/1000/lmcache-core/node.sock", now, seen(0, {})), 80, monkeypatch)
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("─")] != []
    assert len([line for line in lines if line.startswith("─")]) == 3, "three tables, none of them in blocks"
    assert "pool     765GiB of 987GiB used, 900GiB usable yet" in lines
    assert any("81.0% of 123,456,789 tokens looked up" in line for line in lines)


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = page("/s", seen(0, {}, clients=MOST_ROWS + 5, namespaces=MOST_ROWS), None).tables
    assert [len(rows) for _, rows in tables] == [2, MOST_ROWS, MOST_ROWS]
    assert [rows[-1][0] for _, rows in tables[1:2]] == ["and 6 more"]


# Watching


class Watched:
    """`lmcache-core status --watch` as a process."""

    def __init__(self, *words: str, stdout: int = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_core", "status", "--watch", *words],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        )

    def line(self) -> Any:
        """Its next line, as JSON."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 30)[0], "it shows nothing"
        return json.loads(self.process.stdout.readline())

    def until(self, **wanted: object) -> Any:
        """Its next line that has these values."""
        for _ in range(60):
            line = self.line()
            if wanted.items() <= line.items():
                return line
        raise AssertionError(f"it never showed {wanted}")

    def interrupt(self, *signals: signal.Signals) -> tuple[int, bytes]:
        """Ctrl-C, or other signals. Returns its exit code and what it said on standard error."""
        for each in signals or [signal.SIGINT]:
            self.process.send_signal(each)
        err = self.process.communicate(timeout=30)[1]
        return self.process.returncode, err


@contextmanager
def watching(*words: str, stdout: int = subprocess.PIPE) -> Iterator[Watched]:
    watched = Watched(*words, stdout=stdout)
    try:
        yield watched
    finally:
        if watched.process.poll() is None:
            watched.process.kill()
        watched.process.communicate()


@pytest.mark.slow
def test_a_node_is_followed_when_it_dies_and_comes_back(tmp_path: Path) -> None:
    config = settings(tmp_path / "disk", cpu="4MiB")
    with watching("--json", "--socket", str(tmp_path / "node.sock")) as watched:
        assert "there is no node at" in watched.until(up=False)["why"]
        with serving(tmp_path, **config) as (first, path):
            shown = watched.until(up=True, pid=first.process.pid)
            assert shown["interval"] is None
            at_work = AtWork(path, tmp_path / "disk", first.process.pid)
            at_work.fill(prompt_of(1, 3))
            with at_work.engine() as cache:
                cache.lookup(prompt_of(1, 4))
                told = [watched.line()["interval"] for _ in range(3)]
            assert sum(each["lookup_tokens"] for each in told) == 64
            assert sum(each["hit_tokens"].get("cpu", 0) for each in told) == 48
            assert all(0.5 < each["seconds"] < 20 for each in told)
            first.kill()
            assert "there is no node at" in watched.until(up=False)["why"]
        with serving(tmp_path, **config) as (second, _):
            assert watched.until(up=True, pid=second.process.pid)["tiers"][1]["chunks"] == 3
            second.freeze()
            assert "does not answer within 5s" in watched.until(up=False)["why"]
            second.process.send_signal(signal.SIGCONT)
            watched.until(up=True, pid=second.process.pid)
        assert watched.interrupt() == (130, b"")


class Terminal:
    """A terminal, as the side that draws sees it."""

    def __init__(self) -> None:
        self._parent, self.child = pty.openpty()
        self._text = ""

    def until(self, word: str, times: int) -> None:
        """Wait until something has been drawn so often."""
        while self._text.count(word) < times:
            assert select.select([self._parent], [], [], 30)[0], "nothing is drawn"
            self._text += os.read(self._parent, 65536).decode()

    def all(self) -> str:
        """What was written to it, when everybody has closed it."""
        with suppress(OSError):  # how a terminal tells that the other side has closed it
            while part := os.read(self._parent, 65536):
                self._text += part.decode()
        os.close(self._parent)
        return self._text


@contextmanager
def redrawn(process: AtWork) -> Iterator[tuple[Watched, Terminal]]:
    """A node that is watched on a terminal, and what is seen there."""
    terminal = Terminal()
    with watching("--socket", str(process.socket), stdout=terminal.child) as watched:
        os.close(terminal.child)
        yield watched, terminal


def test_a_terminal_is_redrawn(process: AtWork) -> None:
    process.fill(prompt_of(1, 3))
    with redrawn(process) as (watched, terminal):
        terminal.until("just now", times=2)
        assert watched.interrupt() == (130, b"")
        text = terminal.all()
    assert text.startswith("\x1b[?1049h"), "a screen of its own"
    assert text.count("\x1b[?1049l") == 1, "given back at the end"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\x1b[H", "\n")).replace("\r\n", "\n")
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "model-a" in plain
    assert "nothing looked up" in plain


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_gives_the_terminal_back(process: AtWork, times: int) -> None:
    with redrawn(process) as (watched, terminal):
        terminal.until("node ", times=1)
        assert watched.interrupt(*[signal.SIGTERM] * times) == (143, b"")
        text = terminal.all()
    for shown, hidden in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert text.count(shown) == text.count(hidden) == 1, "the screen and the cursor"


def test_elsewhere_pages_follow_one_another(process: AtWork) -> None:
    with watching("--socket", str(process.socket)) as watched:
        assert watched.process.stdout is not None
        pages = 0
        while pages < 2:
            assert select.select([watched.process.stdout], [], [], 30)[0]
            pages += watched.process.stdout.readline().decode().startswith("node ")
        assert watched.interrupt()[0] == 130
