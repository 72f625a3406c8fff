"""What users write, what it comes to, and how objects are called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.objects.names import Names
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3 import S3Options
from lmcache_backends.s3.target import Target
from lmcache_core.config import load_config
from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import (
    Abortable,
    ChunkKey,
    CostlyProbes,
    CountsEvents,
    Describes,
    ReportsUsage,
    Scannable,
    StorageBackend,
)

PAGE = Path(__file__).parents[3] / "docs" / "backends" / "s3.md"


def test_the_plugin_is_found_by_its_name() -> None:
    plugin = load_backend("s3")
    assert plugin.options_type is S3Options
    backend = plugin.create(convert({"bucket": "kv-cache", "part": "16MiB", "stall_timeout": "250ms"}, S3Options))
    for capability in (StorageBackend, Abortable, CostlyProbes, CountsEvents, Describes):
        assert isinstance(backend, capability)
    assert not isinstance(backend, Scannable)
    assert not isinstance(backend, ReportsUsage)


@pytest.mark.parametrize(
    ("written", "bucket", "prefix"),
    [
        ({"bucket": "kv-cache"}, "kv-cache", ""),
        ({"bucket": "s3://kv-cache"}, "kv-cache", ""),
        ({"bucket": "s3://kv-cache/"}, "kv-cache", ""),
        ({"bucket": "s3://kv-cache/team/a/"}, "kv-cache", "team/a/"),
        ({"bucket": "kv-cache", "prefix": "/team/a"}, "kv-cache", "team/a/"),
    ],
)
def test_a_bucket_may_be_a_url(written: dict[str, Any], bucket: str, prefix: str) -> None:
    options = S3Options(**written)
    assert (options.place_name(), options.key_prefix()) == (bucket, prefix)


@pytest.mark.parametrize(
    ("written", "url", "place"),
    [
        ({}, "https://kv-cache.s3.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com"),
        ({"addressing": "path"}, "https://s3.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com"),
        ({"bucket": "kv.cache"}, "https://s3.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com"),
        ({"endpoint": "https://minio:9000/"}, "https://minio:9000", "https://minio:9000"),
        (
            {"endpoint": "https://minio:9000", "addressing": "virtual"},
            "https://kv-cache.minio:9000",
            "https://minio:9000",
        ),
        (
            {"bucket": "kv--euw1-az1--x-s3", "addressing": "path"},
            "https://s3express-euw1-az1.eu-west-1.amazonaws.com",
            "https://s3express-euw1-az1.eu-west-1.amazonaws.com",
        ),
    ],
)
def test_where_requests_go(written: dict[str, Any], url: str, place: str) -> None:
    target = Target.of(S3Options(**{"bucket": "kv-cache"} | written), "eu-west-1", "")
    assert (target.url, target.endpoint) == (url, place)


def test_the_environment_may_name_the_endpoint_and_china_has_a_domain_of_its_own() -> None:
    assert Target.of(S3Options(bucket="kv-cache"), "r", "http://here:1").url == "http://here:1"
    assert Target.of(S3Options(bucket="kv-cache", endpoint="http://a"), "r", "http://here:1").url == "http://a"
    assert (
        Target.of(S3Options(bucket="kv-cache"), "cn-north-1", "").endpoint == "https://s3.cn-north-1.amazonaws.com.cn"
    )


def test_directory_buckets_are_known_by_their_name() -> None:
    assert S3Options(bucket="kv--use1-az4--x-s3").is_express()
    assert not S3Options(bucket="kv--use1-az4--x-s3", express="never").is_express()
    assert not S3Options(bucket="kv-cache").is_express()
    assert S3Options(bucket="kv-cache", express="always").is_express()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket": "s3://"}, "'s3://' is no name of a bucket; write its name, or s3://name/prefix"),
        ({"bucket": "no bucket"}, "'no bucket' is no name of a bucket"),
        ({"bucket": "s3://kv-cache/a b"}, "prefix 'a b' is not possible; write names of letters, digits"),
        ({"prefix": "a//b"}, "prefix 'a//b' is not possible"),
        ({"prefix": "a/../b"}, "prefix 'a/../b' is not possible"),
        ({"endpoint": "minio:9000"}, "'minio:9000' is no URL of a server; write it as in https://minio.local:9000"),
        ({"endpoint": "https://minio/kv"}, "endpoint has a path, '/kv'"),
        ({"endpoint": "https://[::1"}, "is no URL of a server"),
        ({"access_key": "a"}, "access_key needs secret_key beside it; write both or neither"),
        ({"secret_key": "not-to-be-seen"}, "secret_key needs access_key beside it"),
        ({"session_token": "not-to-be-seen"}, "session_token belongs to an access_key"),
        ({"part": 1000}, "part 1000B is too small; write 64KiB or more, as in 8MiB"),
        ({"connect_timeout": 0}, "connect_timeout must be longer than 0"),
        ({"kms_key": "alias/a"}, "kms_key is for `encryption: aws:kms`"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"bucket": "kv-cache"} | changes
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        S3Options(**wanted)
    assert "not-to-be-seen" not in str(refused.value)
    lines = [f"{key}: {json.dumps(value)}" for key, value in wanted.items()]
    file = tmp_path / "node.yaml"
    file.write_text("tiers:\n  - backend: s3\n" + "".join(f"    {line}\n" for line in lines))
    (key,) = changes
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    told = str(caught.value)
    assert told.startswith(f"{file}:{3 + list(wanted).index(key)}: ")
    assert message in told
    assert "not-to-be-seen" not in told


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="bucket has a prefix already; write one of the two"):
        S3Options(bucket="s3://kv-cache/a", prefix="b")
    with pytest.raises(ConfigError, match="profile and access_key both say who we are"):
        S3Options(bucket="kv-cache", profile="p", access_key="a", secret_key="b")
    with pytest.raises(ConfigError, match="`verify: false` checks no certificate; delete it or ca_file"):
        S3Options(bucket="kv-cache", verify=False, ca_file="/ca.pem")
    with pytest.raises(ConfigError, match="sha256 is not computed for S3 Express; write crc or none"):
        S3Options(bucket="kv-cache", express="always", checksum="sha256")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "https://[::1]"])
def test_a_bucket_cannot_stand_in_front_of_an_address(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="the endpoint has an address; write path"):
        S3Options(bucket="kv-cache", endpoint=endpoint, addressing="virtual")
    assert S3Options(bucket="kv-cache", endpoint="http://minio.local", addressing="virtual").addressing == "virtual"


def test_secrets_are_not_printed() -> None:
    options = S3Options(bucket="kv-cache", access_key="AK", secret_key="hush-hush", session_token="also-hush")
    assert "hush" not in repr(options)
    assert "secret_key=***, session_token=***" in repr(options)


def test_names_are_made_of_what_every_server_takes() -> None:
    names = Names("team/a/")
    keys = [ChunkKey(bytes([odd]) * 32, bytes(range(32))) for odd in b"\x00/.%?#&+ \\\"'<>\n\xff"]
    made = [names.chunk(key) for key in keys] + [names.manifest(keys[0].space), names.absent]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch(r"team/a/[a-z0-9./]{1,200}", name) for name in made)
    assert names.space_of(names.manifest(keys[1].space)) == keys[1].space
    assert names.space_of("team/a/manifests/else.json") is None


def test_the_page_has_examples_that_load_and_every_counter() -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        (tier,) = load_config(example, env={"KV_SECRET": "s"}).config.tiers
        assert isinstance(tier.options, S3Options)
    for policy in re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL):
        json.loads(policy)
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert [name for name in Tally().counts() if name not in told] == []
