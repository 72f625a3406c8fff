"""What users write, and what it comes to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.mooncake import MooncakeOptions
from lmcache_backends.mooncake.errors import failed, lacks
from lmcache_backends.mooncake.tally import Tally
from lmcache_core.config import load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import Abortable, CostlyProbes, CountsEvents, ReadsShorter, Scannable, StorageBackend

PAGE = Path(__file__).parents[3] / "docs" / "backends" / "mooncake.md"


def test_the_plugin_is_found_by_its_name() -> None:
    plugin = load_backend("mooncake")
    assert plugin.options_type is MooncakeOptions
    backend = plugin.create(convert({"master": "kv-master:50051", "segment": "16GiB"}, MooncakeOptions))
    for capability in (StorageBackend, CountsEvents, ReadsShorter):
        assert isinstance(backend, capability)
    for lacking in (Abortable, CostlyProbes, Scannable):
        assert not isinstance(backend, lacking)


def test_the_address_of_the_master() -> None:
    assert MooncakeOptions(master="kv-master:50051").address() == ("kv-master", 50051)
    assert MooncakeOptions(master="[::1]:1").address() == ("::1", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"master": "kv-master"}, "master 'kv-master' is no host and port; write it as in kv-master:50051"),
        ({"master": "http://kv-master:1"}, "is no host and port"),
        ({"master": "kv-master:x"}, "is no host and port"),
        ({"prefix": "a/b"}, "prefix 'a/b' is not possible; write at most 64 letters, digits, '.', '_' and '-'"),
        ({"metadata": "kv-master:8080"}, "metadata 'kv-master:8080' is no server; write P2PHANDSHAKE, or a URL"),
        ({"host": ""}, "host '' is no name; write that of this host"),
        ({"devices": "mlx5_0"}, "devices is for `protocol: rdma`; write that too, or delete it"),
        ({"connect_timeout": 0}, "connect_timeout must be longer than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    wanted = {"master": "kv-master:50051"} | changes
    file = tmp_path / "node.yaml"
    lines = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in wanted.items())
    file.write_text(f"tiers:\n  - backend: mooncake\n{lines}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (key,) = changes
    assert str(caught.value).startswith(f"{file}:{3 + list(wanted).index(key)}: mooncake: ")
    assert message in str(caught.value)


def test_a_library_that_cannot_be_loaded_is_told_by_what_it_lacks() -> None:
    verbs = lacks(ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"))
    assert str(verbs) == "mooncake: Mooncake needs libibverbs; on Debian, apt-get install libibverbs1"
    cuda = lacks(ImportError("libcuda.so.1: cannot open shared object file"))
    assert str(cuda).endswith("; without CUDA, pip install mooncake-transfer-engine-non-cuda")


def test_codes_are_told_with_what_to_do() -> None:
    assert str(failed(-900, "kv-master:1", "reading a chunk")) == (
        "mooncake: kv-master:1: reading a chunk failed (-900): the master does not answer; start it, or correct "
        "master; the tier tries again by itself"
    )
    assert "(-1234): look at the lines that Mooncake writes" in str(failed(-1234, "kv-master:1", "reading a chunk"))


def test_the_page_has_examples_that_load_and_every_counter() -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        (tier,) = load_config(example).config.tiers
        assert isinstance(tier.options, MooncakeOptions)
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert [name for name in Tally().counts() if name not in told] == []
