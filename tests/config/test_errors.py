"""What users get wrong: each mistake is told with file, line and key, and with what to write instead."""

from __future__ import annotations

import time
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from lmcache_core.config import InvalidConfig, load_config
from lmcache_core.config.loading import MOST_PROBLEMS
from lmcache_core.errors import ConfigError

DISK = """\
tiers:
  - backend: fakedisk
    path: /nvme
    capacity: 500GiB
"""


GOOD_KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="


class Mistake(NamedTuple):
    """A text and what must be in the error, in this order."""

    text: str
    says: tuple[str, ...]


MISTAKES = {
    "a key that is too short": Mistake(
        DISK + "    cipher:\n      key: c2hvcnQ=\n",
        ("tiers.yaml:6: ", "tiers[0].cipher.key", "has 5 bytes instead of 32", "openssl rand -base64 32", "${file:"),
    ),
    "a key in hex": Mistake(
        DISK + f"    cipher:\n      key: {GOOD_KEY}\n      older:\n        - '{'0f' * 32}'\n",
        ("tiers.yaml:8: ", "tiers[0].cipher.older[0]", "has 48 bytes instead of 32"),
    ),
    "a passphrase for a key": Mistake(
        DISK + f"    cipher:\n      key: {GOOD_KEY}\n      tenants:\n        acme: correct horse battery staple!\n",
        ("tiers.yaml:8: ", "tiers[0].cipher.tenants.acme", "is not base64"),
    ),
    "a cipher without a key": Mistake(
        DISK + "    cipher: {older: []}\n", ("tiers.yaml:5: ", "tiers[0].cipher lacks the key 'key' (text)")
    ),
    "a key of a tenant that is no name": Mistake(
        DISK + f"    cipher: {{key: {GOOD_KEY}, tenants: {{'a b': {GOOD_KEY}}}}}\n",
        ("tiers.yaml:5: ", "tiers[0].cipher.tenants.a b", "is no name"),
    ),
    "a codec that there isn't": Mistake(
        DISK + "    codec: zst\n", ("tiers.yaml:5: ", "tiers[0].codec", "write one of none, lz4, zstd", "'zstd'")
    ),
    "unknown key in a tier": Mistake(
        DISK + "    admitt: always\n",
        ("tiers.yaml:5: ", "unknown key 'admitt' in tiers[0]", "did you mean 'admit'?"),
    ),
    "misspelt option of a backend": Mistake(
        "tiers:\n  - backend: fakedisk\n    path: /a\n\n\n\n    capcity: 500GiB\n",
        ("tiers.yaml:7: ", "unknown key 'capcity' in tiers[0]", "did you mean 'capacity'?"),
    ),
    "unknown key at the top": Mistake(
        "cpu:\n  capacity: 1GiB\ntier: []\n", ("tiers.yaml:3: ", "unknown key 'tier'", "did you mean 'tiers'?")
    ),
    "unknown key in a section": Mistake(
        "cpu:\n  size: 1GiB\n",
        ("tiers.yaml:2: ", "unknown key 'size' in cpu", "known are capacity, hugepages, numa_nodes, policy"),
    ),
    "unknown key in a nested section": Mistake(
        DISK + "    breaker:\n      cooldwn: 1s\n",
        ("tiers.yaml:6: ", "unknown key 'cooldwn' in tiers[0].breaker", "did you mean 'cooldown'?"),
    ),
    "unknown key in a section of an option": Mistake(
        "tiers:\n- {backend: fakeremote, url: 'x://y',\n   pool: {conections: 3}}\n",
        ("tiers.yaml:3: ", "unknown key 'conections' in tiers[0].pool", "did you mean 'connections'?"),
    ),
    "a key of the program it replaces": Mistake(
        "chunk_size: 256\n", ("tiers.yaml:1: ", "unknown key 'chunk_size'", "'lmcache-core config migrate' converts")
    ),
    "text for a number": Mistake(
        "chunk_tokens: many\n",
        ("tiers.yaml:1: ", "chunk_tokens: 'many' is not possible", "write a whole number of at least 1"),
    ),
    "a fraction for a whole number": Mistake(
        "page_tokens: 64.5\n", ("tiers.yaml:1: ", "page_tokens: 64.5 is not possible", "write a whole number")
    ),
    "zero where one is least": Mistake(
        "page_tokens: 0\n", ("tiers.yaml:1: ", "page_tokens: 0 is not possible", "a whole number of at least 1")
    ),
    "a port out of range": Mistake(
        "metrics:\n  port: 70000\n",
        ("tiers.yaml:2: ", "metrics.port: 70000 is not possible", "whole number of at least 0 and of at most 65535"),
    ),
    "a number for a truth value": Mistake(
        "cpu:\n  hugepages: 2\n", ("tiers.yaml:2: ", "cpu.hugepages: 2 is not possible", "write true or false")
    ),
    "a number for text": Mistake(
        "tiers:\n- backend: fakedisk\n  path: 5\n  capacity: 1GiB\n",
        ("tiers.yaml:3: ", "tiers[0].path: 5 is not possible", "write text; quote it"),
    ),
    "an unknown unit": Mistake(
        "cpu:\n  capacity: 20 bananas\n",
        ("tiers.yaml:2: ", "cpu.capacity: '20 bananas' is not a size", "no unit 'bananas'", "such as 512MiB, 20GiB"),
    ),
    "an ambiguous unit": Mistake(
        "cpu:\n  capacity: 20G\n",
        ("tiers.yaml:2: ", "cpu.capacity: '20G' is not a size", "write GiB (powers of 1024) or GB (powers of 1000)"),
    ),
    "a negative size": Mistake(
        "cpu:\n  capacity: -1GiB\n", ("tiers.yaml:2: ", "cpu.capacity: '-1GiB'", "must not be negative", "20GiB")
    ),
    "a size that forgot its unit": Mistake(
        "cpu:\n  capacity: 20\n",
        ("tiers.yaml:2: ", "cpu.capacity: 20B cannot hold a chunk", "with a unit, as in 20GiB", "bare number is bytes"),
    ),
    "a tier too small for anything": Mistake(
        "tiers:\n- backend: fakedisk\n  path: /a\n  segment: 1\n  capacity: 500\n",
        ("tiers.yaml:5: ", "tiers[0].capacity: 500B cannot hold a chunk", "as in 500GiB"),
    ),
    "a bad duration": Mistake(
        DISK + "    read_timeout: soon\n",
        ("tiers.yaml:5: ", "tiers[0].read_timeout: 'soon' is not a duration", "such as 250ms, 2s"),
    ),
    "a size for a duration": Mistake(
        DISK + "    read_timeout: 2GiB\n", ("tiers.yaml:5: ", "tiers[0].read_timeout: '2GiB'", "no unit 'GiB'", "2s")
    ),
    "no time at all": Mistake(
        DISK + "    write_timeout: 0\n",
        ("tiers.yaml:5: ", "tiers[0].write_timeout: must be longer than 0", "write for example 2s"),
    ),
    "a time too short to answer in": Mistake(
        "call_timeout: 0s\n", ("tiers.yaml:1: ", "call_timeout: must be 1ms or longer", "for example 1s")
    ),
    "a node of its own and of another": Mistake(
        "socket: /run/a.sock\nconnect: /run/b.sock\n", ("tiers.yaml:2: ", "connect: a node of another process is used")
    ),
    "tiers beside the node of another": Mistake(
        "connect: auto\ntiers:\n- {backend: fakedisk, path: /a, capacity: 1GiB}\n",
        ("tiers.yaml:1: ", "delete `tiers` here"),
    ),
    "a socket whose path is too long": Mistake(
        f"socket: /{'a' * 200}\n", ("tiers.yaml:1: ", "socket: a socket's path has at most 107 bytes")
    ),
    "a socket whose path a terminal would obey": Mistake(
        'connect: "/run/a\\e[31m.sock"\n',
        ("tiers.yaml:1: ", r"connect: '/run/a\x1b[31m.sock' has control characters", "without them"),
    ),
    "a lease of no time": Mistake(
        "lease_timeout: 0s\n", ("tiers.yaml:1: ", "lease_timeout: must be longer than 0", "for example 30s")
    ),
    "a share of nobody": Mistake(
        "shares:\n- weight: 2\n",
        ("tiers.yaml:2: ", "shares[0]: says whose it is by one of two keys", "'tenant: NAME' or 'model: NAME'"),
    ),
    "a share of two": Mistake(
        "shares:\n- tenant: a\n  model: b\n", ("tiers.yaml:2: ", "shares[0]: says whose it is by one of two keys")
    ),
    "two shares of one": Mistake(
        "shares:\n- {tenant: a, weight: 2}\n- {tenant: a, cpu: 1GiB}\n",
        ("tiers.yaml:3: ", "shares[1]: 'a' has a share already, shares[0]"),
    ),
    "a share without weight": Mistake(
        "shares:\n- {tenant: a, weight: 0}\n",
        ("tiers.yaml:2: ", "shares[0].weight: 0 is not possible", "greater than 0"),
    ),
    "a quota of a tier that is not there": Mistake(
        DISK + "shares:\n- tenant: a\n  tiers:\n    disc: 1GiB\n",
        ("tiers.yaml:8: ", "shares[0].tiers.disc: there is no tier 'disc'", "known are fakedisk"),
    ),
    "a quota below a chunk": Mistake(
        "shares:\n- tenant: a\n  cpu: 10\n", ("tiers.yaml:3: ", "shares[0].cpu: 10B cannot hold a chunk", "as in 10GiB")
    ),
    "a quota that is no size": Mistake(
        DISK + "shares:\n- tenant: a\n  tiers: {fakedisk: 1G}\n",
        ("tiers.yaml:7: ", "shares[0].tiers.fakedisk: '1G' is not a size"),
    ),
    "a tenant that is no name": Mistake(
        "tenant: a b\n", ("tiers.yaml:1: ", "tenant: 'a b' is no name", "up to 64 letters")
    ),
    "a share that lasts no time": Mistake(
        "share_timeout: 0\n", ("tiers.yaml:1: ", "share_timeout: must be longer than 0", "for example 1h")
    ),
    "a misspelt choice": Mistake(
        DISK + "    write: thru\n",
        (
            "tiers.yaml:5: ",
            "tiers[0].write: 'thru' is not possible",
            "write one of through, evict, never",
            "(did you mean 'through'?)",
        ),
    ),
    "a choice that YAML takes for a truth value": Mistake(
        DISK + "    write: off\n",
        ("tiers.yaml:5: ", "tiers[0].write: false is not possible (YAML reads yes", "write one of through, evict"),
    ),
    "a misspelt policy": Mistake(
        "cpu: {policy: LRU}\n",
        ("tiers.yaml:1: ", "cpu.policy: 'LRU'", "write one of lru, s3fifo", "did you mean 'lru'?"),
    ),
    "a key twice": Mistake(
        DISK + "    path: /other\n",
        ("tiers.yaml:5: ", "the key 'path' in tiers[0] is already on line 3", "delete one of them"),
    ),
    "a key twice at the top": Mistake(
        "cpu: {}\nsalt: a\ncpu: {}\n", ("tiers.yaml:3: ", "the key 'cpu' is already on line 1", "delete one")
    ),
    "chunks that are no whole pages": Mistake(
        "page_tokens: 96\nchunk_tokens: 256\n",
        ("tiers.yaml:2: ", "chunk_tokens: 256 is not a multiple of page_tokens (96)", "write 288"),
    ),
    "pages that don't divide the default chunk": Mistake(
        "page_tokens: 100\n", ("chunk_tokens: 256 is not a multiple of page_tokens (100)", "write 300")
    ),
    "two tiers of one name": Mistake(
        DISK + DISK.replace("tiers:\n", ""),
        ("tiers.yaml:5: ", "tiers[1].name: 'fakedisk' is already the name of tiers[0]", "'name: fakedisk-2'"),
    ),
    "two tiers in one directory": Mistake(
        "tiers:\n- {backend: disk, path: /a/b, capacity: 1GiB}\n- backend: disk\n  name: b\n  capacity: 1GiB\n"
        "  path: [/c, /a/./b/]\n",
        ("tiers.yaml:6: ", "tiers[1].path: '/a/b' is already the path of tiers[0]", "write another directory"),
    ),
    "two backends in one directory": Mistake(
        "tiers:\n- {backend: disk, path: /a/b, capacity: 1GiB}\n- {backend: nfs, path: /a/c/../b}\n",
        ("tiers.yaml:3: ", "tiers[1].path: '/a/b' is already the path of tiers[0]", "write another directory"),
    ),
    "a tier inside the directory of another": Mistake(
        "tiers:\n- {backend: disk, path: /a, capacity: 1GiB}\n- {backend: nfs, path: /b}\n"
        "- backend: disk\n  name: c\n  capacity: 1GiB\n  path: [/c, /b/kv]\n",
        ("tiers.yaml:7: ", "tiers[2].path: '/b/kv' is inside '/b', the path of tiers[1]", "beside that one"),
    ),
    "a tier around the directory of another": Mistake(
        "tiers:\n- {backend: disk, path: /a/b/c, capacity: 1GiB}\n- {backend: nfs, path: /a/}\n",
        ("tiers.yaml:3: ", "tiers[1].path: '/a/b/c', the path of tiers[0], is inside '/a'", "beside that one"),
    ),
    "a tier below the root beside one at the root": Mistake(
        "tiers:\n- {backend: disk, path: /, capacity: 1GiB}\n- {backend: nfs, path: /a}\n",
        ("tiers.yaml:3: ", "tiers[1].path: '/a' is inside '/', the path of tiers[0]"),
    ),
    "tiers that ask contrary things of the process": Mistake(
        DISK + "  - {backend: fakedisk, name: b, path: /b, capacity: 1GiB, mode: slow}\n",
        (
            "tiers.yaml:5: ",
            "tiers[1].mode: 'slow' and 'fast' (tiers[0]) cannot both be in one process",
            "write the same for both",
        ),
    ),
    "a name that would break a log line": Mistake(
        DISK + '    name: "a\\nb"\n', ("tiers.yaml:5: ", "tiers[0].name: ", "is no name", "letters, digits")
    ),
    "an unknown backend": Mistake(
        "tiers:\n  - path: /a\n    backend: fakedsk\n",
        ("tiers.yaml:3: ", "tiers[0].backend: there is no backend 'fakedsk'", "did you mean 'fakedisk'?", "installed"),
    ),
    "no backend": Mistake(
        "tiers:\n  - path: /a\n",
        ("tiers.yaml:2: ", "tiers[0] lacks the key 'backend'", "write 'backend: NAME', installed are: ", "fakedisk"),
    ),
    "a required option is missing": Mistake(
        "tiers:\n\n  - backend: fakedisk\n    capacity: 1TiB\n",
        ("tiers.yaml:3: ", "tiers[0] lacks the key 'path' (text): Directory of the chunks."),
    ),
    "options that contradict each other": Mistake(
        "tiers:\n  - backend: fakedisk\n    path: /a\n    capacity: 2MiB\n",
        ("tiers.yaml:2: ", "tiers[0]: segment is larger than capacity; write a smaller segment"),
    ),
    "never written and admitted at the second touch": Mistake(
        DISK + "    write: never\n    admit: second-touch\n",
        ("tiers.yaml:6: ", "tiers[0].admit: 'second-touch' says what is written", "delete one of the two"),
    ),
    "a breaker with times the wrong way round": Mistake(
        DISK + "    breaker:\n      cooldown: 10s\n      max_cooldown: 1s\n",
        ("tiers.yaml:7: ", "tiers[0].breaker.max_cooldown: 1s is shorter than cooldown (10s)", "at least 10s"),
    ),
    "no variable of that name": Mistake(
        "cpu: {}\nsalt: ${env:TENANT_SALT}\n",
        ("tiers.yaml:2: ", "salt: the environment variable TENANT_SALT is not set"),
    ),
    "no file of that name": Mistake(
        "salt: ${file:/no/such/file}\n",
        ("tiers.yaml:1: ", "salt: ${file:/no/such/file}: cannot be read: No such file or directory; create it"),
    ),
    "a file by a relative path": Mistake(
        "salt: ${file:secret}\n", ("tiers.yaml:1: ", "salt: ${file:secret}: write the whole path", "'/'")
    ),
    "a reference of another form": Mistake(
        "salt: ${TENANT_SALT}\n", ("tiers.yaml:1: ", "salt: ${TENANT_SALT} is no reference", "write ${env:NAME}")
    ),
    "a reference without an end": Mistake(
        "salt: ${env:TENANT\n", ("tiers.yaml:1: ", "salt: ${env:TENANT is no reference", "write ${env:NAME}")
    ),
    "no YAML": Mistake(
        "cpu:\n  capacity: 1GiB\n tiers: []\n", ("tiers.yaml:3: ", "not YAML: ", "look at this line and the one before")
    ),
    "an open quote": Mistake("salt: 'abc\ncpu: {}\n", ("tiers.yaml:", "not YAML: ", "quoted scalar")),
    "a tab": Mistake("cpu:\n\tcapacity: 1GiB\n", ("tiers.yaml:2: ", "a tab; indent with spaces")),
    "a character that is none": Mistake("cpu: {}\nsalt: a\0b\n", ("tiers.yaml:2: ", "does not allow")),
    "two documents": Mistake("cpu: {}\n---\ncpu: {}\n", ("tiers.yaml:2: ", "a second document starts", "one document")),
    "a list at the top": Mistake(
        "- backend: fakedisk\n", ("tiers.yaml:1: ", "the top level is a list", "write 'tiers:' above it")
    ),
    "text at the top": Mistake(
        "hello\n", ("tiers.yaml:1: ", "the top level must be a mapping of keys to values, not text; write 'key: value'")
    ),
    "tiers as a mapping": Mistake(
        "tiers:\n  backend: fakedisk\n",
        ("tiers.yaml:1: ", "tiers must be a list, not the mapping", "start each entry with '- '"),
    ),
    "a tier that is only a name": Mistake(
        "tiers:\n  - fakedisk\n", ("tiers.yaml:2: ", "tiers[0] must be a mapping", "'fakedisk'")
    ),
    "a section that is a value": Mistake(
        "cpu: 20GiB\n",
        (
            "tiers.yaml:1: ",
            "cpu must be a mapping of keys to values, not the text '20GiB'",
            "write cpu: {capacity: 20GiB}",
        ),
    ),
    "a section that is a truth value": Mistake(
        "metrics: true\n", ("tiers.yaml:1: ", "metrics must be a mapping", "write metrics: {enabled: true}")
    ),
    "a number with a zero in front": Mistake(
        "chunk_tokens: 0256\n", ("tiers.yaml:1: ", "begins with 0 in chunk_tokens as octal", "leave out the zero")
    ),
    "more tokens than a prompt has": Mistake(
        "chunk_tokens: 100000000000\n", ("tiers.yaml:1: ", "chunk_tokens: 1", "of at most 1048576")
    ),
    "an option that YAML takes for a truth value": Mistake(
        "tiers:\n- {backend: disk, path: /a, capacity: 1GiB, direct: off}\n",
        ("tiers.yaml:2: ", "tiers[0].direct: false is not possible (YAML reads", "write one of auto, always, never"),
    ),
    "a path that is a number": Mistake(
        "tiers:\n- {backend: disk, path: 5, capacity: 1GiB}\n",
        ("tiers.yaml:2: ", "tiers[0].path: 5 is not possible", "write text or a list of text", "quote text"),
    ),
    "a backend of another version": Mistake(
        "tiers:\n- backend: infinistore\n",
        (
            "tiers.yaml:2: ",
            "there is no backend 'infinistore'; this version of lmcache-core has no such backend; installed",
        ),
    ),
    "a socket by a relative path": Mistake(
        "connect: node.sock\n", ("tiers.yaml:1: ", "connect: 'node.sock' must be absolute; write it from / on, or auto")
    ),
    "a key without a value": Mistake(
        "cpu:\n  capacity:\n", ("tiers.yaml:2: ", "cpu.capacity has no value", "write one (size) or delete it")
    ),
    "a key that is a number": Mistake("cpu:\n  5: 1\n", ("tiers.yaml:2: ", "the key 5 in cpu is no text")),
    "a list for a value": Mistake(
        "page_tokens: [64]\n", ("tiers.yaml:1: ", "page_tokens: [64] is not possible", "write a whole number")
    ),
    "a merge key": Mistake("cpu:\n  <<: {capacity: 1GiB}\n", ("tiers.yaml:2: ", "merge keys", "write the keys out")),
    "a Python object": Mistake(
        "cpu: !!python/object/apply:os.system ['true']\n", ("tiers.yaml:1: ", "tag", "not allowed; delete it")
    ),
    "the options of a tier as a section": Mistake(
        DISK + "    options: {direct: true}\n", ("tiers.yaml:5: ", "unknown key 'options' in tiers[0]")
    ),
}


def message_of(text: str) -> str:
    Path("tiers.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(Path("tiers.yaml"), env={})
    return str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"wrong_{number}: 1" for number in range(9000)),
        "tiers:\n" + "  - {path: /a}\n" * 6000,
        "tiers:\n" + "  - {backend: fakedsk}\n" * 6000,
        "tiers:\n" + "  - {backend: fakedisk, path: /a, capacity: 1GiB}\n" * 2500,
    ],
)
def test_of_very_many_mistakes_some_are_told(text: str) -> None:
    Path("tiers.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(InvalidConfig) as error:
        load_config("tiers.yaml", env={})
    assert time.monotonic() - started < 5
    assert len(error.value.problems) == MOST_PROBLEMS
    assert error.value.problems[0] == str(error.value)


def test_mistakes_are_told_in_the_order_of_the_file_and_those_of_the_environment_last() -> None:
    text = "cpu: {policy: no}\ntiers:\n- {backend: fakedisk, path: 5}\nlayout: odd\n"
    Path("tiers.yaml").write_text(text)
    with pytest.raises(InvalidConfig) as error:
        load_config("tiers.yaml", env={"LMCACHE_CORE_LEASE_TIMEOUT": "soon", "LMCACHE_CORE_CPU__CAPACITY": "1GiB"})
    starts = ["tiers.yaml:1: cpu.policy", "tiers.yaml:3: tiers[0].path", "tiers.yaml:4: layout"]
    starts.append("environment LMCACHE_CORE_LEASE_TIMEOUT: lease_timeout")
    assert [told[: len(start)] for told, start in zip(error.value.problems, starts, strict=True)] == starts
    text = "tiers: [{backend: fakeremote, url: 'a${env:SECRET}', pool: {connections: -1}}, '${env:SECRET}']\nsalt: [5]"
    assert "hunter2" not in all_of(text, SECRET="hunter2")
    assert "hunter2" not in all_of("salt: hunter2\ncpu: x\ntiers: ['${env:SECRET}', 5]\n", SECRET="hunter2")


def test_what_follows_from_another_mistake_is_not_told() -> None:
    """Pages of a size that is not known, tiers that are not there: nothing can be said of what goes with them."""
    text = (
        DISK.replace("capacity", "capcity")
        + "page_tokens: 0\nchunk_tokens: 100\nshares: [{tenant: a, tiers: {fakedisk: 1GiB}}]\n"
    )
    assert all_of(text).splitlines() == [
        "<text>:4: unknown key 'capcity' in tiers[0]; did you mean 'capacity'?",
        "<text>:5: page_tokens: 0 is not possible; write a whole number of at least 1 and of at most 1048576",
    ]


def all_of(text: str, **env: str) -> str:
    with pytest.raises(InvalidConfig) as error:
        load_config(text, env=env)
    return "\n".join(error.value.problems)


def test_many_tiers_are_compared_at_once() -> None:
    tiers = [{"backend": "nfs", "name": f"t{number}", "path": f"/kv/{number}"} for number in range(2000)]
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"tiers\[2000\].path: '/kv/7/a' is inside '/kv/7', the path of tiers\[7\]"):
        load_config({"tiers": [*tiers, {"backend": "nfs", "path": "/kv/7/a"}]})
    assert time.monotonic() - started < 5


def test_directories_side_by_side_and_modes_alike_are_no_mistake() -> None:
    text = """
        tiers:
        - {backend: disk, path: [/a/b, /a/c], capacity: 1GiB}
        - {backend: nfs, path: /a/bc}
        - {backend: fakedisk, name: one, path: /d, capacity: 1GiB, mode: slow}
        - {backend: fakedisk, name: two, path: /d, capacity: 1GiB, mode: slow, direct: false}
    """
    assert [tier.name for tier in load_config(dedent(text)).config.tiers] == ["disk", "nfs", "one", "two"]


@pytest.mark.parametrize("mistake", [pytest.param(mistake, id=name) for name, mistake in MISTAKES.items()])
def test_a_mistake_is_told_by_file_line_key_and_remedy(mistake: Mistake) -> None:
    message = message_of(mistake.text)
    assert message.startswith("tiers.yaml")
    place = 0
    for part in mistake.says:
        assert part in message[place:], f"{part!r} should follow in {message!r}"
        place = message.index(part, place) + len(part)
    assert "\n" not in message


def test_an_alias_bomb_ends_early() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    message = message_of("\n".join(lines))
    assert "more than 20000 values (aliases count each time they are used)" in message


def test_an_alias_to_itself_ends_early() -> None:
    assert "nested deeper than 32 levels" in message_of("cpu: &a {capacity: *a}\n")


def test_deep_nesting_ends_early() -> None:
    assert "nested deeper than 32 levels" in message_of("cpu: " + "[" * 5000 + "]" * 5000)


def test_a_long_list_ends_early() -> None:
    started = time.monotonic()
    message = message_of("cpu:\n" + "- b\n" * 250_000)
    assert message.startswith("tiers.yaml:2000")
    assert message.endswith(": more than 20000 values; this is not a configuration")
    assert time.monotonic() - started < 5


def test_a_huge_file_is_refused_unread() -> None:
    assert "larger than 1048576 bytes" in message_of("#" * (2**20 + 1))
    assert "larger than 1048576 bytes" in message_of("é" * (2**19 + 10))


def test_a_file_that_is_no_text() -> None:
    Path("tiers.yaml").write_bytes(b"cpu: {}\nsalt: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"tiers\.yaml:2: not UTF-8 text; save the file as UTF-8"):
        load_config("tiers.yaml", env={})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("none.yaml", "No such file or directory"),
        ("folder", "Is a directory"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_read(path: str, says: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as error:
        load_config(path, env={})
    assert str(error.value) == f"the configuration {path!r} cannot be read: {says}"
    with pytest.raises(ConfigError) as error:
        load_config(None, env={"LMCACHE_CORE_CONFIG": path})
    assert str(error.value) == f"LMCACHE_CORE_CONFIG: the configuration {path!r} cannot be read: {says}"


def test_a_mistake_in_text_and_in_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"^<text>:2: unknown key 'capcity' in cpu; did you mean 'capacity'\?$"):
        load_config(dedent("cpu:\n  capcity: 1GiB"), env={})
    with pytest.raises(ConfigError, match=r"^configuration: unknown key 'capcity' in cpu; did you mean 'capacity'\?$"):
        load_config({"cpu": {"capcity": "1GiB"}}, env={})


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("page_tokens: ${env:SECRET}\n", "hunter2"),
        ("cpu: {capacity: '${env:SECRET}'}\n", "hunter2"),
        ("cpu: {policy: '${env:SECRET}'}\n", "hunter2"),
        ("cpu: ${env:SECRET}\n", "hunter2"),
        ("tiers: ['${env:SECRET}']\n", "hunter2"),
        ("page_tokens: redis://me:hunter2@host\n", "hunter2"),
        ("page_tokens: redis://:hunt/er@2@host\n", "hunt"),
        ("page_tokens: https://host/?password=hunter2\n", "hunter2"),
        ("tiers: [{backend: fakedisk, path: /a, capacity: 1GiB, name: '${env:SECRET}!'}]\n", "hunter2"),
        ("tiers: [{backend: '${env:SECRET}'}]\n", "hunter2"),
        (
            "tiers: [{backend: fakeremote, name: a, url: a}, {backend: fakeremote, url: a, name: a-hunter2},"
            " {backend: fakeremote, url: a, name: 'a-${env:SECRET}'}]\n",
            "a-hunter2-2",
        ),
        ("salt: 123456\n", "123456"),
        ("salt: 0123456\n", "123456"),
        ("salt: [hunter2]\n", "hunter2"),
        ("salt: {hunter2: 1}\n", "hunter2"),
        ("salt: 2001-02-03\n", "2001"),
        ("salt: !hunter2\n", "hunter2"),
        ("salt: *hunter2\n", "hunter2"),
        ("salt: a${hunter2\n", "hunter2"),
        ("salt:hunter2\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, password: 123456}]\n", "123456"),
        ("tiers: [{backend: fakeremote, url: a, password: [hunter2]}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, tokens: hunter2}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, tokens: [123456]}]\n", "123456"),
        ("tiers: [{backend: fakeremote, url: a, password: hunter2, pool: {connections: -1}}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: redis://u:hunter2@h, pool: {connections: -1}}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: 'x-${env:SECRET}', pool: {connections: -1}}]\n", "hunter2"),
        ("tiers: [{backend: disk, path: 'redis://u:hunter2@h/', capacity: 1GiB}]\n", "hunter2"),
        ('tiers: [{backend: disk, path: [a, "redis://u:hun\'t@h/"], capacity: 1GiB}]\n', "hun't"),
        ("tiers: [{backend: fakeremote, url: a, name: 'redis://u:hunter2@h'}]\n", "hunter2"),
        ("tiers: [{backend: 'redis://u:hunter2@h'}]\n", "hunter2"),
        ("'redis://u:hunter2@h': 1\n", "hunter2"),
        ("'redis://u:hunter2@h': 1\n'redis://u:hunter2@h': 1\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, pool: '${env:SECRET}'}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, cipher: {key: hunter2}}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, cipher: hunter2}]\n", "hunter2"),
        ("tiers: [{backend: fakeremote, url: a, cipher: {key: [hunter2]}}]\n", "hunter2"),
        (f"tiers: [{{backend: fakeremote, url: a, cipher: {{key: {GOOD_KEY}, older: [hunter2]}}}}]\n", "hunter2"),
        (f"tiers: [{{backend: fakeremote, url: a, cipher: {{key: {GOOD_KEY}, older: hunter2}}}}]\n", "hunter2"),
        (
            f"tiers: [{{backend: fakeremote, url: a, cipher: {{key: {GOOD_KEY}, tenants: {{a: hunter2}}}}}}]\n",
            "hunter2",
        ),
        (f"tiers: [{{backend: fakeremote, url: a, cipher: {{key: {GOOD_KEY}, oldr: []}}}}]\n", GOOD_KEY),
        (f"tiers: [{{backend: fakeremote, url: a, cipher: {{key: {GOOD_KEY}}}, read_timeout: 0}}]\n", GOOD_KEY),
    ],
)
def test_errors_do_not_show_secrets(text: str, secret: str) -> None:
    Path("tiers.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("tiers.yaml", env={"SECRET": "hunter2"})
    assert not [told for told in getattr(error.value, "problems", ()) if secret in told]
    failure: BaseException | None = error.value
    while failure is not None:
        assert secret not in str(failure)
        failure = failure.__cause__
