"""What users write, and what it comes to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.azure import AzureOptions
from lmcache_backends.gcs import GcsOptions
from lmcache_backends.objects.tally import Tally
from lmcache_core.config import load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import (
    Abortable,
    CostlyProbes,
    CountsEvents,
    Describes,
    ReadsShorter,
    ReportsUsage,
    Scannable,
    StorageBackend,
)

PAGES = Path(__file__).parents[3] / "docs" / "backends"
KNOWN: dict[str, dict[str, Any]] = {
    "azure": {"container": "kv-cache", "account": "kvcache"},
    "gcs": {"bucket": "kv-cache"},
}
KEY = "bm90LXRvLWJlLXNlZW4="


@pytest.mark.parametrize(("door", "options"), [("azure", AzureOptions), ("gcs", GcsOptions)])
def test_the_plugin_is_found_by_its_name(door: str, options: type[Any]) -> None:
    plugin = load_backend(door)
    assert plugin.options_type is options
    backend = plugin.create(convert(KNOWN[door] | {"part": "16MiB", "stall_timeout": "250ms"}, options))
    for capability in (StorageBackend, Abortable, CostlyProbes, CountsEvents, Describes, ReadsShorter):
        assert isinstance(backend, capability)
    assert not isinstance(backend, Scannable)
    assert not isinstance(backend, ReportsUsage)


def test_a_place_may_be_a_url() -> None:
    azure = AzureOptions(container="az://kv-cache/team/a/", account="kvcache")
    assert (azure.place_name(), azure.key_prefix()) == ("kv-cache", "team/a/")
    assert azure.url() == "https://kvcache.blob.core.windows.net"
    emulated = AzureOptions(container="kv-cache", account="kvcache", endpoint="http://127.0.0.1:10000/kvcache/")
    assert emulated.url() == "http://127.0.0.1:10000/kvcache"
    google = GcsOptions(bucket="gs://kv-cache/team-a")
    assert (google.place_name(), google.key_prefix(), google.url()) == (
        "kv-cache",
        "team-a/",
        "https://storage.googleapis.com",
    )


@pytest.mark.parametrize(
    ("door", "changes", "message"),
    [
        ("azure", {"container": "az://"}, "'az://' is no name of a container; write its name, or az://name/prefix"),
        ("azure", {"container": "Capitals"}, "'Capitals' is no name of a container"),
        ("azure", {"container": "two--dashes"}, "is no name of a container"),
        ("azure", {"container": "ab"}, "is no name of a container"),
        ("azure", {"container": "az://kv-cache/a b"}, "prefix 'a b' is not possible; write names of letters, digits"),
        ("azure", {"account": "A.B"}, "'A.B' is no name of an account; write 3 to 24 letters and digits"),
        ("azure", {"endpoint": "azure:1"}, "'azure:1' is no URL of a server; write it as in https://account.blob."),
        ("azure", {"access_key": "not-to-be-seen!"}, "access_key is no key of an account; copy all of it"),
        ("azure", {"access_key": KEY, "sas_token": "a=b"}, "access_key and sas_token both say who we are"),
        ("azure", {"access_key": KEY, "identity": "azure_cli"}, "access_key says who we are already; delete it, or"),
        ("azure", {"part": 1000}, "part 1000B is too small; write 64KiB or more, as in 8MiB"),
        ("gcs", {"bucket": "gs://K"}, "is no name of a bucket; write its name, or gs://name/prefix"),
        ("gcs", {"endpoint": "https://host/path"}, "endpoint has a path, '/path'"),
        ("gcs", {"credentials": "/a", "token": "not-to-be-seen"}, "credentials and token both say who we are"),
        ("gcs", {"connect_timeout": 0}, "connect_timeout must be longer than 0"),
        ("gcs", {"verify": False, "ca_file": "/ca.pem"}, "`verify: false` checks no certificate; delete it or ca_file"),
        ("gcs", {"bucket": "gs://kv-cache/a", "prefix": "b"}, "bucket has a prefix already; write one of the two"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, door: str, changes: dict[str, Any], message: str) -> None:
    wanted = KNOWN[door] | changes
    lines = [f"{key}: {json.dumps(value)}" for key, value in wanted.items()]
    file = tmp_path / "node.yaml"
    file.write_text(f"tiers:\n  - backend: {door}\n" + "".join(f"    {line}\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    told = str(caught.value)
    assert any(told.startswith(f"{file}:{3 + list(wanted).index(key)}: ") for key in changes)
    assert f"{door}: " in told
    assert message in told
    assert "not-to-be-seen" not in told
    assert KEY not in told


def test_secrets_are_not_printed() -> None:
    azure = AzureOptions(container="kv-cache", account="kvcache", access_key=KEY)
    assert KEY not in repr(azure)
    assert "access_key=***, sas_token=''" in repr(azure)
    assert "hush" not in repr(GcsOptions(bucket="kv-cache", token="hush-hush"))


@pytest.mark.parametrize("door", ["azure", "gcs"])
def test_the_page_has_examples_that_load_and_every_counter(door: str) -> None:
    text = (PAGES / f"{door}.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        (tier,) = load_config(example, env={"KV_SECRET": KEY}).config.tiers
        assert isinstance(tier.options, AzureOptions | GcsOptions)
    for policy in re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL):
        json.loads(policy)
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert [name for name in Tally().counts() if name not in told] == []
