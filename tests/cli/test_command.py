"""What holds for every command: exit codes, errors on one line, pipes that break, Ctrl-C, and what starting costs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_core
from lmcache_core.cli import COMMANDS, make_parser
from lmcache_core.cli.output import Column, age, print_table, visible
from tests.cli.conftest import Run

PROGRAM = str(Path(sys.executable).with_name("lmcache-core"))


def start(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload,no-any-return]


def test_the_installed_program_prints_its_version() -> None:
    done = start("version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lmcache-core {lmcache_core.__version__}\n", "")


def test_version_in_process(run: Run) -> None:
    assert run("version").out == f"lmcache-core {lmcache_core.__version__}\n"
    assert run("version", "--json").json == {"version": lmcache_core.__version__}
    assert run("--version").out == f"lmcache-core {lmcache_core.__version__}\n"
    assert run("--version").code == 0


@pytest.mark.parametrize("words", [["version"], ["--help"], ["config", "--help"]])
def test_starting_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import json, sys
from lmcache_core.cli import main
code = main({words!r})
heavy = {{"numpy", "prometheus_client", "rich", "torch", "transformers", "xxhash"}}
print(json.dumps([code, sorted(heavy & set(sys.modules))]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out.splitlines()[-1]) == [0, []]


def test_help_names_every_command(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0
    assert re.findall(r"^    ([a-z]+(?: [a-z]+)?)(?:  |$)", shown.out, flags=re.MULTILINE) == list(COMMANDS)
    assert shown.err == ""


@pytest.mark.parametrize("words", [[], ["bogus"], ["config"], ["inspect"], ["version", "--nope"], ["backends", "x"]])
def test_a_wrong_command_line_is_exit_code_2_with_the_usage(run: Run, words: list[str]) -> None:
    refused = run(*words)
    assert refused.code == 2
    assert refused.out == ""
    assert refused.err.startswith("usage: lmcache-core")
    assert re.search(r"^lmcache-core.*: error: ", refused.err, flags=re.MULTILINE)


def test_options_are_not_abbreviated(run: Run) -> None:
    assert run("version", "--js").code == 2


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    done = start("inspect", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"lmcache-core: error: {tmp_path / 'nowhere'} is no directory; name the `path` of a disk tier\n"
    )


def test_an_error_of_several_lines_becomes_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad\nname.yaml").write_text("cpu: [\n")
    refused = run("config", "show", tmp_path / "bad\nname.yaml")
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert refused.err.startswith("lmcache-core: error: ")


def test_an_error_of_the_system_is_one_line_too(run: Run, tmp_path: Path) -> None:
    refused = run("config", "migrate", tmp_path)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"lmcache-core: error: {tmp_path}: Is a directory\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    program = subprocess.Popen([PROGRAM, "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait(60) == 141


def test_ctrl_c_is_exit_code_130_and_says_nothing(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = subprocess.Popen(
        [PROGRAM, "config", "migrate", str(fifo)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with fifo.open("wb"):  # open when the program has opened it too; it waits for more now
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (130, b"", b"")


def test_a_terminal_gets_a_table_that_fits_it() -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "70"}
    program = subprocess.Popen([PROGRAM, "config", "show"], stdout=child, env=environment)
    os.close(child)
    text = b""
    try:
        while part := os.read(parent, 65536):
            text += part
    except OSError:
        pass  # how a terminal tells that the other side has closed it
    os.close(parent)
    assert program.wait(60) == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r\n", "\n")
    assert plain != text.decode()
    assert "────" in plain
    assert max(len(line) for line in plain.splitlines()) <= 70
    assert re.search(r"cpu\.capacity +4GiB +default", plain)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    """A table as a terminal of that width shows it."""
    monkeypatch.setattr("lmcache_core.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    columns = [Column("name"), Column("last use", right=True), Column("meaning")]
    print_table(columns, [("0123456789abcdef", "5m", "what it is there for, in some words"), ("b", "1h", "short")])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_narrow_terminal_wraps_headers_and_prose_and_no_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_a_terminal(monkeypatch, capsys, 80) == [
        "name               last use   meaning",
        "─" * 65,
        "0123456789abcdef         5m   what it is there for, in some words",
        "b                        1h   short",
    ]
    assert on_a_terminal(monkeypatch, capsys, 54) == [
        "                   last",
        "name                use   meaning",
        "─" * 54,
        "0123456789abcdef     5m   what it is there for, in",
        "                          some words",
        "b                    1h   short",
    ]


def test_a_terminal_too_narrow_for_a_table_gets_a_block_for_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_a_terminal(monkeypatch, capsys, 40) == [
        "name      0123456789abcdef",
        "last use  5m",
        "meaning   what it is there for, in some",
        "          words",
        "",
        "name      b",
        "last use  1h",
        "meaning   short",
    ]


def test_elsewhere_a_table_is_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("name"), Column("bytes", right=True)], [("a", "1"), ("bcdefg", "2000"), ("x" * 300, "3")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "bytes"], ["a", "1"], ["bcdefg", "2000"], ["x" * 300, "3"]]
    assert {len(line) for line in lines} == {307}


def test_text_from_elsewhere_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible("a\x1b[31mb\nc\u202ed") == r"a\x1b[31mb\nc\u202ed"
    assert visible("Ünïcode 模型") == "Ünïcode 模型"
    print_table([Column("model")], [("\x1b]0;title\x07[bold]",)])
    assert capsys.readouterr().out == "model\n\\x1b]0;title\\x07[bold]\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (0, "0s"), (119, "119s"), (600, "10m"), (7300, "2h"), (200_000, "2d")]
)
def test_ages(seconds: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert age(1_000_000.0 - seconds) == text
    assert age(None) == "-"


def test_names_that_are_no_text_are_printed(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(raw)
    done = subprocess.run(
        [os.fsencode(PROGRAM), b"inspect", raw, b"--json"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1, "there is no cache"
    assert json.loads(done.stdout)["path"] == os.fsdecode(raw)


def test_every_command_has_a_module_with_arguments() -> None:
    assert make_parser(*COMMANDS).parse_args(["version"]).command == "version"


@pytest.mark.parametrize("words", [["version"], ["backends"], ["version", "--no-such"]], ids=" ".join)
def test_a_standard_output_that_is_closed_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "lmcache_core", *words]
    ran = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == (2 if "--no-such" in words else 0)
    assert "Traceback" not in ran.stderr
    assert bool(ran.stderr) == ("--no-such" in words)
