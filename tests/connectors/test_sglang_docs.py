"""The page about SGLang names every option, with its default, and none that is gone; the examples can be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmcache_core.connectors.sglang
from lmcache_core.config import load_config
from lmcache_core.config.fields import fields_of
from lmcache_core.connectors.sglang.options import Options, read_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sglang.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (.+) \|$", PAGE.partition("## Options")[2], re.MULTILINE)
EXAMPLES = ROOT / "examples" / "sglang"


def test_every_option_is_in_the_page() -> None:
    assert [name for name, _, _ in ROWS] == [field.key for field in fields_of(Options)]


@pytest.mark.parametrize(("name", "default", "text"), ROWS, ids=[name for name, _, _ in ROWS])
def test_the_defaults_are_those_of_the_code(name: str, default: str, text: str) -> None:
    plain = getattr(Options(), name)
    if not default:
        assert plain in (None, "")
    else:
        written: Any = int(default) if default.isdigit() else default
        assert getattr(read_options({name: written})[0], name) == plain
    assert text.endswith(".")


def test_every_option_has_a_description() -> None:
    assert all(field.description for field in fields_of(Options))


def check(extra: dict[str, Any]) -> None:
    options, strange = read_options(extra)
    assert (options.config, strange) == ("cache.yaml", [])
    assert extra["module_path"] == lmcache_core.connectors.sglang.__name__
    assert extra["class_name"] in lmcache_core.connectors.sglang.__all__
    assert extra["hicache_storage_pass_prefix_keys"] is True
    assert extra["interface_v1"] == 1


def test_what_the_page_says_to_write_can_be_used() -> None:
    (written,) = re.findall(r"extra-config '(\{.*?\})'", PAGE, re.DOTALL)
    check(json.loads(written))


def test_the_examples_can_be_used() -> None:
    check(yaml.safe_load((EXAMPLES / "hicache.yaml").read_text()))
    assert [tier.backend for tier in load_config(EXAMPLES / "cache.yaml", env={}).config.tiers] == ["disk"]
