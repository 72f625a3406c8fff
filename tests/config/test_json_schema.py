"""The schema says of every setting what the loader accepts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lmcache_core.config import Config, TierConfig, fields_of, schema


def tier_of(name: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = schema()["properties"]["tiers"]["items"]["anyOf"]
    return next(item for item in items if item["properties"]["backend"].get("const") == name)


def test_it_is_json_and_closed() -> None:
    whole = json.loads(json.dumps(schema()))
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert whole["additionalProperties"] is False
    assert list(whole["required"]) == []
    assert set(whole["properties"]) == set(Config.__struct_fields__)
    assert "$ref" not in json.dumps(whole)


def test_values() -> None:
    properties = schema()["properties"]
    capacity = properties["cpu"]["properties"]["capacity"]
    assert capacity["default"] == "4GiB"
    assert [option["type"] for option in capacity["anyOf"]] == ["integer", "string", "string"]
    assert properties["cpu"]["properties"]["policy"]["enum"] == ["lru", "s3fifo"]
    assert properties["page_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**20}
    assert properties["page_tokens"]["default"] == 64
    assert properties["metrics"]["properties"]["enabled"]["anyOf"][0] == {"type": "boolean"}
    quotas = properties["shares"]["items"]["properties"]["tiers"]
    assert quotas["additionalProperties"]["anyOf"] == capacity["anyOf"]
    assert properties["salt"]["type"] == "string"
    assert "default" not in properties["salt"]
    for field in fields_of(Config):
        assert properties[field.key]["description"] == field.description != ""


@pytest.mark.parametrize(
    ("text", "fits"), [("20GiB", True), ("500 MB", True), ("1.5TiB", True), ("12", True), ("20 bananas", False)]
)
def test_the_pattern_of_sizes(text: str, fits: bool) -> None:
    pattern = schema()["properties"]["cpu"]["properties"]["capacity"]["anyOf"][1]["pattern"]
    assert bool(re.search(pattern, text)) is fits


def test_each_installed_backend_has_its_options() -> None:
    disk = tier_of("fakedisk")
    generic = {field.key for field in fields_of(TierConfig)} - {"options"}
    assert set(disk["properties"]) == generic | {"path", "capacity", "direct", "segment", "patience", "mode"}
    assert disk["required"] == ["backend", "path", "capacity"]
    assert disk["properties"]["path"] == {"type": "string", "description": "Directory of the chunks."}
    assert disk["properties"]["patience"]["anyOf"][-1] == {"type": "null"}
    assert disk["properties"]["direct"]["default"] is True
    remote = tier_of("fakeremote")
    assert remote["required"] == ["backend", "url"]
    assert remote["properties"]["nodes"]["anyOf"][1]["items"] == {"type": "string"}
    assert remote["properties"]["pool"]["properties"]["connections"]["default"] == 4
    assert remote["properties"]["pool"]["additionalProperties"] is False
