"""`lmcache-core config` and `backends`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
import yaml

from lmcache_core.assembly import build_node
from lmcache_core.coding.codecs import load_codec
from lmcache_core.config import Config, fields_of, load_config
from lmcache_core.errors import ConfigError
from lmcache_core.plugins import load_backend
from tests.cli.conftest import Run

GOOD = """
cpu: {capacity: 2GiB}
salt: pepper
tiers:
  - backend: disk
    path: /nvme/kv
    capacity: 10GiB
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


def test_check_accepts(run: Run, good: Path) -> None:
    checked = run("config", "check", good)
    assert (checked.code, checked.out, checked.err) == (0, f"{good}: valid; tiers: disk; nothing was opened\n", "")
    plain = {"file": str(good), "valid": True, "error": None, "errors": [], "warnings": [], "connect": None}
    assert run("config", "check", good, "--json").json == plain


def test_check_without_a_file_takes_the_one_of_the_environment(
    run: Run, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("config", "check").out == "defaults: valid; tiers: none; nothing was opened\n"
    monkeypatch.setenv("LMCACHE_CORE_CONFIG", str(good))
    assert run("config", "check").out == f"{good}: valid; tiers: disk; nothing was opened\n"


def test_check_warns_of_a_pool_that_this_machine_cannot_hold(
    run: Run, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.hostpool.available_memory", lambda: 2**30)
    checked = run("config", "check", good)
    warning = f"{good}:2: cpu.capacity: 2GiB is more than the 1GiB of memory that this machine has free; an engine here"
    assert checked.code == 0
    assert checked.err == f"warning: {warning} would not start\n"
    assert run("config", "check", good, "--json").json["warnings"] == [f"{warning} would not start"]


def test_check_says_whose_node_a_client_uses(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.hostpool.available_memory", lambda: 1)
    file = tmp_path / "engine.yaml"
    file.write_text("connect: /run/node.sock\n")
    checked = run("config", "check", file)
    what = "valid; uses the node at /run/node.sock and its tiers; nothing was opened"
    assert (checked.code, checked.out, checked.err) == (0, f"{file}: {what}\n", "")
    assert run("config", "check", file, "--json").json["connect"] == "/run/node.sock"


def test_check_refuses_with_file_line_and_remedy(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(GOOD.replace("path:", "paht:"))
    checked = run("config", "check", file)
    assert (checked.code, checked.out) == (1, "")
    problem = f"{file}:6: unknown key 'paht' in tiers[0]; did you mean 'path'?"
    assert checked.err == f"lmcache-core: error: {problem}\n"
    as_json = run("config", "check", file, "--json")
    assert (as_json.code, as_json.err) == (1, "")
    plain = {"file": str(file), "valid": False, "error": problem, "errors": [problem], "warnings": [], "connect": None}
    assert as_json.json == plain


SEVERAL = """\
page_tokens: many
cpu: {capacity: 20}
log_intervall: 5s
tiers:
  - backend: disk
    path: /nvme/kv
    capacity: 10GiB
    read_timeout: 0
  - {backend: valkey, url: redis://h}
  - {backend: nfs, path: /mnt/kv}
  - backend: disk
    paht: /nvme/kv
metrics:
  port: 70000
lease_timeout: 0
"""


def test_check_tells_all_mistakes_in_the_order_of_the_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(SEVERAL)
    checked = run("config", "check", file)
    assert (checked.code, checked.out) == (1, "")
    told = [line.removeprefix(f"lmcache-core: error: {file}:").partition("; ")[0] for line in checked.err.splitlines()]
    assert told == [
        "1: page_tokens: 'many' is not possible",
        "2: cpu.capacity: 20B cannot hold a chunk",
        "3: unknown key 'log_intervall'",
        "8: tiers[0].read_timeout: must be longer than 0",
        "9: tiers[1].backend: there is no backend 'valkey'",
        "12: unknown key 'paht' in tiers[3]",
        "14: metrics.port: 70000 is not possible",
        "15: lease_timeout: must be longer than 0",
    ]
    as_json = run("config", "check", file, "--json").json
    assert [f"lmcache-core: error: {each}" for each in as_json["errors"]] == checked.err.splitlines()
    assert as_json["error"] == as_json["errors"][0]
    assert run("config", "show", file).err == f"{checked.err.splitlines()[0]}\n", "others say the first"


def test_check_tells_all_that_contradicts_and_that_backends_refuse(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.yaml"
    tiers = [
        "{backend: disk, path: /nvme/kv, capacity: 10GiB}",
        "{backend: nfs, path: /nvme/kv/a}",
        "{backend: nfs, path: /mnt/kv}",
    ]
    file.write_text("\n  - ".join(["chunk_tokens: 100\ntiers:", *tiers]))
    told = run("config", "check", file, "--json").json["errors"]
    assert told == [
        f"{file}:1: chunk_tokens: 100 is not a multiple of page_tokens (64); write 128",
        f"{file}:4: tiers[1].path: '/nvme/kv/a' is inside '/nvme/kv', the path of tiers[0]; write one beside that one",
        f"{file}:5: tiers[2].name: 'nfs' is already the name of tiers[1]; write another, as in 'name: nfs-2'",
    ]
    tiers = [
        "{backend: redis, url: redis://h, codec: zstd}",
        "{backend: nfs, path: /mnt/kv}",
        "{backend: redis, name: two, url: redis://h, capacity: 5MiB}",
    ]
    file.write_text("\n  - ".join(["tiers:", *tiers]))
    load_codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    told = run("config", "check", file).err.splitlines()
    load_codec.cache_clear()
    starts = [
        f"{file}:2: tiers[0].codec: zstd needs a package",
        f"{file}:4: tiers[2].capacity: a tier of 'redis' is not",
    ]
    starts = [f"lmcache-core: error: {start}" for start in starts]
    assert [line[: len(start)] for line, start in zip(told, starts, strict=True)] == starts


def test_check_asks_the_backends_too(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(GOOD.replace("/nvme/kv", "nvme/kv"))
    checked = run("config", "check", file)
    assert checked.code == 1
    assert checked.err == (
        f"lmcache-core: error: {file}:6: disk: path 'nvme/kv' must be absolute; write it from / on\n"
    )


def test_check_of_a_missing_file(run: Run, tmp_path: Path) -> None:
    checked = run("config", "check", tmp_path / "nope.yaml")
    assert checked.code == 1
    assert "cannot be read: No such file or directory" in checked.err


def test_show_has_every_setting_with_its_source(run: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CORE_TIERS__0__CONCURRENCY", "7")
    settings = {
        each["key"]: (each["value"], each["source"]) for each in run("config", "show", good, "--json").json["settings"]
    }
    assert settings["cpu.capacity"] == (2 * 2**30, f"{good}:2")
    assert settings["cpu.hugepages"] == (False, "default")
    assert settings["lease_timeout"] == (30, "default")
    assert settings["tiers[0].path"] == ("/nvme/kv", f"{good}:6")
    assert settings["tiers[0].concurrency"] == (7, "environment LMCACHE_CORE_TIERS__0__CONCURRENCY")
    assert settings["salt"] == ("***", f"{good}:3")
    assert {field.key for field in fields_of(Config)} <= {key.partition(".")[0].partition("[")[0] for key in settings}


def test_show_prints_the_same_for_people_and_no_secret(run: Run, good: Path) -> None:
    shown = run("config", "show", good)
    assert shown.code == 0
    assert ["cpu.capacity", "2GiB", f"{good}:2"] in [line.split() for line in shown.lines]
    assert ["salt", "***", f"{good}:3"] in [line.split() for line in shown.lines]
    assert "pepper" not in shown.out + shown.err


def test_show_without_a_file_takes_the_one_of_the_environment(
    run: Run, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ["cpu.capacity", "4GiB", "default"] in [line.split() for line in run("config", "show").lines]
    monkeypatch.setenv("LMCACHE_CORE_CONFIG", str(good))
    assert ["cpu.capacity", "2GiB", f"{good}:2"] in [line.split() for line in run("config", "show").lines]


def test_the_schema_has_the_options_of_backends(run: Run) -> None:
    schema = run("config", "schema").json
    assert schema["title"] == "Configuration of lmcache-core"
    titles = {tier["title"]: tier for tier in schema["properties"]["tiers"]["items"]["anyOf"]}
    assert "path" in titles["disk tier"]["properties"]
    assert run("config", "schema", "--json").json == schema


FOREIGN = """
chunk_size: 128
local_cpu: true
max_local_cpu_size: 5
save_decode_cache: true
"""


def test_migrate_writes_yaml_and_notes_apart(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(FOREIGN)
    migrated = run("config", "migrate", file)
    assert migrated.code == 0
    config = load_config(migrated.out).config
    assert (config.chunk_tokens, config.cpu.capacity) == (128, 5 * 2**30)
    notes = migrated.err.splitlines()
    assert [note.split(": ")[1] for note in notes] == list(yaml.safe_load(FOREIGN))
    assert "dropped: save_decode_cache: what is stored follows from chunks and turns" in notes

    as_json = run("config", "migrate", file, "--json")
    assert as_json.err == ""
    assert as_json.json["yaml"] == migrated.out
    assert [f"{note['status']}: {note['key']}: {note['why']}" for note in as_json.json["notes"]] == notes


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: \xff", "not UTF-8 text; save the file as UTF-8"),
        (b"- a list", "the top level must be a mapping of keys to values"),
        (b"#" * (2**20 + 1), "larger than 1048576 bytes; this is not a configuration"),
    ],
)
def test_migrate_refuses_what_is_no_configuration(run: Run, tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_bytes(content)
    migrated = run("config", "migrate", file)
    assert (migrated.code, migrated.out) == (1, "")
    assert migrated.err.startswith(f"lmcache-core: error: {file}: ")
    assert problem in migrated.err


# Backends

THIRD_PARTY = '''
import msgspec
from lmcache_core.hookspecs import hookimpl
from lmcache_core.units import ByteSize, Secret

class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    """Where it listens."""
    size: ByteSize = 2**20
    """Bytes of a [bold]batch[/bold]."""
    password: Secret = ""

@hookimpl
def lmcache_backend_options():
    return Options

@hookimpl
def lmcache_create_backend(options):
    raise NotImplementedError
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two packages with backends, one of them broken."""
    for name, source in (("cloudy", THIRD_PARTY), ("shattered", "import nothing_of_that_name\n")):
        (tmp_path / f"{name}_kv.py").write_text(source)
        info = tmp_path / f"{name}_kv-2.1.dist-info"
        info.mkdir()
        extra = "Provides-Extra: cloudy\nRequires-Dist: cloud-client; extra == 'cloudy'\n" if name == "cloudy" else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-kv\nVersion: 2.1\n{extra}")
        (info / "entry_points.txt").write_text(f"[lmcache_core.backends]\n{name} = {name}_kv\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_backend.cache_clear()
    invalidate_caches()
    yield
    for name in ("cloudy_kv", "shattered_kv"):
        sys.modules.pop(name, None)


def test_backends_are_listed_with_their_options(run: Run) -> None:
    listed = run("backends")
    assert (listed.code, listed.err) == (0, "")
    assert "disk (lmcache-core 0.1.0)" in listed.lines
    row = next(line for line in listed.lines if line.startswith("threads "))
    assert row.split(maxsplit=3) == ["threads", "integer", "4", "Reads and writes at the same time."]


@pytest.mark.usefixtures("installed")
def test_a_broken_backend_is_told_and_the_others_are_listed(run: Run) -> None:
    listed = run("backends", "--json")
    assert listed.code == 1
    found = {each["name"]: each for each in listed.json["backends"]}
    assert (found["disk"]["error"], found["disk"]["lacks"], found["disk"]["install"]) == (None, [], None)
    assert found["cloudy"] == {
        "name": "cloudy",
        "distribution": "cloudy-kv",
        "version": "2.1",
        "error": None,
        "lacks": ["cloud-client"],
        "install": "pip install 'cloudy-kv[cloudy]'",
        "options": [
            {
                "key": "url",
                "type": "text",
                "default": None,
                "required": True,
                "secret": False,
                "description": "Where it listens.",
            },
            {
                "key": "size",
                "type": "size",
                "default": "1MiB",
                "required": False,
                "secret": False,
                "description": "Bytes of a [bold]batch[/bold].",
            },
            {"key": "password", "type": "text", "default": "''", "required": False, "secret": True, "description": ""},
        ],
    }
    assert found["shattered"]["options"] == []
    assert "No module named 'nothing_of_that_name'" in found["shattered"]["error"]

    for_people = run("backends")
    assert for_people.code == 1
    cloudy = for_people.lines.index("cloudy (cloudy-kv 2.1)")
    lacks = "lacks cloud-client, which is not installed: pip install 'cloudy-kv[cloudy]'"
    assert for_people.lines[cloudy + 1] == lacks
    assert any(line.startswith("url ") and line.endswith("Where it listens.") for line in for_people.lines)
    broken = for_people.lines.index("shattered (shattered-kv 2.1)")
    assert for_people.lines[broken + 1].startswith(
        "cannot be used: backend 'shattered' (shattered_kv, from shattered-kv)"
    )


@pytest.mark.usefixtures("installed")
def test_square_brackets_are_no_markup_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert "[bold]batch[/bold]" in run("backends").out


DECLINING = """
import msgspec
from lmcache_core.errors import ConfigError
from lmcache_core.hookspecs import hookimpl

class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str

@hookimpl
def lmcache_backend_options():
    return Options

@hookimpl
def lmcache_create_backend(options):
    raise ConfigError(f"url {options.url} and nothing else contradict each other")
"""


@pytest.mark.parametrize("words", [["config", "check"], ["bench"], ["clear", "--yes", "--config"]])
def test_what_a_backend_refuses_is_told_by_file_and_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "declining_kv.py").write_text(DECLINING)
    info = tmp_path / "declining_kv-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declining-kv\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcache_core.backends]\ndeclining = declining_kv\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_backend.cache_clear()
    invalidate_caches()
    file = tmp_path / "tiers.yaml"
    file.write_text("cpu: {}\ntiers:\n  - backend: declining\n    url: x://u:hunter2@h\n")
    refused = run(*words, file)
    assert (refused.code, refused.out) == (1, "")
    problem = "tiers[0]: url x://u:***@h and nothing else contradict each other"
    assert refused.err == f"lmcache-core: error: {file}:3: {problem}\n"
    sys.modules.pop("declining_kv", None)


def test_what_was_migrated_can_be_checked(run: Run, tmp_path: Path) -> None:
    old, new = tmp_path / "lmcache.yaml", tmp_path / "tiers.yaml"
    old.write_text(f"{FOREIGN}remote_url: redis://u:p@h\nlocal_disk: kv/\nmax_local_disk_size: 5\n")
    new.write_text(run("config", "migrate", old).out)
    assert run("config", "check", new).code == 0
    again = run("config", "migrate", new)
    assert (again.code, again.out) == (1, "")
    assert f"{new}:2: 'chunk_tokens' is a key of lmcache-core" in again.err


def test_check_finds_a_codec_that_is_not_installed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "coded.yaml"
    file.write_text("tiers:\n  - backend: redis\n    url: redis://h\n    codec: zstd\n")
    assert run("config", "check", file).code == 0
    load_codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for words in (["config", "check", file], ["doctor", file]):
        refused = run(*words)
        assert refused.code == 1
        assert "coded.yaml:2: tiers[0].codec: zstd needs a package that cannot be imported" in refused.err
        assert "pip install 'lmcache-core[zstd]'" in refused.err
        assert len(refused.err.splitlines()) == 1
    load_codec.cache_clear()


@pytest.mark.parametrize("words", [["config", "check"], ["doctor"]])
def test_a_capacity_that_nobody_keeps_to_is_refused(run: Run, tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "bounded.yaml"
    file.write_text("tiers:\n  - backend: redis\n    url: redis://h\n    capacity: 5MiB\n")
    refused = run(*words, file)
    assert refused.code == 1
    assert "bounded.yaml:2: tiers[0].capacity: a tier of 'redis' is not bounded by this node" in refused.err
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.capacity: a tier of 'redis' is not bounded"):
        build_node(load_config(file))
